"""The Request Placement Map as people see it."""

from rich.console import Console

from protos.infinite_llm.v1 import types_pb2
from services.local.console import draw_map, line_writer
from services.local.map_reader import ClusterView


def view() -> ClusterView:
    def instance(inst_id: int, load: types_pb2.InstanceLoad) -> types_pb2.InstanceView:
        info = types_pb2.InstanceInfo(inst_id=inst_id, num_blocks=96)
        return types_pb2.InstanceView(info=info, load=load)

    return ClusterView(
        instances=[
            instance(1, types_pb2.InstanceLoad(free_blocks=56, lent_blocks=40)),
            instance(0, types_pb2.InstanceLoad(free_blocks=6, borrowed_blocks=40, running=1)),
        ],
        entries=[
            types_pb2.RequestPlacementEntry(req_id=255, inst_id=0, num_blocks=90, local=True),
            types_pb2.RequestPlacementEntry(req_id=255, inst_id=1, num_blocks=40),
        ],
        moves_issued=2,
    )


def rendered(cluster_view: ClusterView, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(draw_map(cluster_view))
    return capture.get().splitlines()


def test_borrowed_blocks_are_visible_on_both_sides() -> None:
    lines = rendered(view())
    (owner,) = (line for line in lines if line.startswith("│ 0 "))
    (creditor,) = (line for line in lines if line.startswith("│ 1 "))
    assert owner.split()[-8:] == ["90", "0", "6", "40", "1", "0", "0.0", "│"]
    assert creditor.split()[-8:] == ["0", "40", "56", "0", "0", "0", "0.0", "│"]
    assert "█" in owner and "▒" not in owner
    assert "▒" in creditor and "█" not in creditor


def test_a_request_shows_where_it_lies_oldest_part_first() -> None:
    (request,) = (line for line in rendered(view()) if "00000000000000ff" in line)
    assert request.index("1: 40 borrowed") < request.index("0: 90")


def test_every_line_fits_a_terminal() -> None:
    lines = rendered(view())
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= 80


def test_an_empty_map_says_so() -> None:
    assert any("no request holds a block" in line for line in rendered(ClusterView()))


def test_lines_are_written_as_they_are() -> None:
    console = Console(width=20, color_system=None)
    line = "[bold] " + "x" * 40
    with console.capture() as capture:
        line_writer(console)(line)
    assert capture.get() == f"{line}\n"
