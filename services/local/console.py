"""Draws the Request Placement Map as text: who holds how many blocks, and for whom."""

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from protos.infinite_llm.v1 import types_pb2
from services.local.map_reader import ClusterView

# With it the whole map is no wider than 80 columns.
_BAR_WIDTH = 24
_OWN, _LENT, _FREE = ("█", "cyan"), ("▒", "yellow"), ("·", "dim")


def line_writer(console: Console) -> Callable[[str], None]:
    """Prints text as it is: no markup, no colours, no line breaks of rich's own."""

    def write(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return write


def draw_map(view: ClusterView) -> RenderableType:
    legend = Text.assemble(_OWN, " own  ", _LENT, " lent to others  ", _FREE, " free")
    return Panel(
        Group(_draw_instances(view), legend, _draw_requests(view)),
        title="Request Placement Map",
        subtitle=f"{view.moves_issued} moves planned",
        expand=False,
    )


def _draw_instances(view: ClusterView) -> Table:
    table = Table("inst", "blocks", box=None, pad_edge=False)
    for column in ("own", "lent", "free", "borrows", "run", "wait", "tok/s"):
        table.add_column(column, justify="right")
    for instance in sorted(view.instances, key=lambda instance: instance.info.inst_id):
        load = instance.load
        own = instance.info.num_blocks - load.free_blocks - load.lent_blocks
        table.add_row(
            f"{instance.info.inst_id}{' draining' if load.draining else ''}",
            _draw_bar(own, load.lent_blocks, instance.info.num_blocks),
            str(own),
            str(load.lent_blocks),
            str(load.free_blocks),
            Text(str(load.borrowed_blocks), style="bold" if load.borrowed_blocks else ""),
            str(load.running),
            str(load.waiting),
            f"{load.tokens_per_s:.1f}",
        )
    return table


def _draw_bar(own: int, lent: int, total: int) -> Text:
    scale = _BAR_WIDTH / max(1, total)
    # One cell at least for anything that is there at all.
    own_cells = max(round(own * scale), min(own, 1))
    lent_cells = max(round(lent * scale), min(lent, 1))
    cells = ((_OWN, own_cells), (_LENT, lent_cells), (_FREE, _BAR_WIDTH - own_cells - lent_cells))
    return Text.assemble(*((char * num, style) for (char, style), num in cells))


def _draw_requests(view: ClusterView) -> RenderableType:
    rows: dict[int, list[types_pb2.RequestPlacementEntry]] = {}
    for entry in view.entries:
        rows.setdefault(entry.req_id, []).append(entry)
    if not rows:
        return Text("no request holds a block", style="dim")
    table = Table("request", "owner", "lies on (instance: blocks)", box=None, pad_edge=False)
    for req_id, entries in sorted(rows.items()):
        table.add_row(f"{req_id:016x}", str(entries[0].owner_inst_id), _draw_spans(entries))
    return table


def _draw_spans(entries: list[types_pb2.RequestPlacementEntry]) -> Text:
    # Borrowed blocks hold the oldest tokens, so they come first.
    spans = sorted(entries, key=lambda entry: (entry.local, entry.inst_id))
    parts = []
    for span in spans:
        char, style = _OWN if span.local else _LENT
        kind = "" if span.local else " borrowed"
        parts.append((f"{char} {span.inst_id}: {span.num_blocks}{kind}  ", style))
    return Text.assemble(*parts)
