"""Whatever the cluster looks like, a plan can be carried out and makes it faster, by the model."""

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import InstId, ReqId
from services.gmanager.board import Move, Rules
from services.gmanager.cluster import Cluster, Instance, InstanceLoad, PlacementEntry
from services.gmanager.perf_model import OperatingPoint, operating_point
from services.gmanager.policy import Verdict, best_num_blocks, plan
from tests.unit.gmanager.builders import make_instance, make_row, view_of

RULES = Rules(batch_threshold=8, utilisation_threshold=0.8)
NUM_BLOCKS = 100


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    instances: list[Instance] = []
    entries: list[PlacementEntry] = []
    num_instances = draw(st.integers(2, 5))
    for inst_id in range(1, num_instances + 1):
        sizes = draw(st.lists(st.integers(1, 50), max_size=6))
        while sum(sizes) > NUM_BLOCKS:
            sizes.pop()
        waiting = draw(st.integers(0, 12))
        load = InstanceLoad(
            free_blocks=NUM_BLOCKS - sum(sizes),
            running=len(sizes),
            waiting=waiting,
            waiting_blocks=waiting * draw(st.integers(1, 40)),
            waiting_sizes=tuple(draw(st.lists(st.integers(1, 40), max_size=waiting))),
            running_tokens=16 * sum(sizes),
        )
        instances.append(make_instance(inst_id, load, num_blocks=NUM_BLOCKS))
        entries += [make_row(100 * inst_id + n, inst_id, size) for n, size in enumerate(sizes)]
    return Cluster(tuple(instances), tuple(entries))


def plan_moves(cluster: Cluster) -> list[Move]:
    decisions = plan(view_of(cluster), RULES)
    return [move for d in decisions if d.verdict is Verdict.MOVE for move in d.moves]


@settings(deadline=None, max_examples=300)
@given(clusters())
def test_every_plan_can_be_carried_out(cluster: Cluster) -> None:
    moves = plan_moves(cluster)
    assert moves == plan_moves(cluster)
    rows = {(entry.req_id, entry.inst_id): entry.num_blocks for entry in cluster.entries}
    out, taken = Counter[tuple[ReqId, InstId]](), Counter[InstId]()
    for move in moves:
        assert move.num_blocks > 0
        out[move.req_id, move.source] += move.num_blocks
        taken[move.destination] += move.num_blocks
    assert all(num_blocks < rows[key] for key, num_blocks in out.items())
    reserve = math.ceil((1 - RULES.utilisation_threshold) * NUM_BLOCKS)
    free = {instance.inst_id: instance.load.free_blocks for instance in cluster.instances}
    assert all(num_blocks <= free[c] - reserve for c, num_blocks in taken.items())
    assert not {move.source for move in moves} & {move.destination for move in moves}


@settings(deadline=None, max_examples=300)
@given(clusters())
def test_every_plan_raises_the_modelled_throughput_and_lets_somebody_in(cluster: Cluster) -> None:
    points = {instance.inst_id: operating_point(instance) for instance in cluster.instances}
    before = dict(points)
    moves = plan_moves(cluster)
    for move in moves:
        points[move.source] = points[move.source].lend_out(move.num_blocks)
        points[move.destination] = points[move.destination].take_in(move.num_blocks)
    if moves:
        total = sum(point.tokens_per_s for point in points.values())
        assert total > sum(point.tokens_per_s for point in before.values())
    for debtor in {move.source for move in moves}:
        assert int(points[debtor].admitted) > int(before[debtor].admitted)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[OperatingPoint, OperatingPoint]:
    """A debtor with a queue, and a creditor that may have one, too."""
    points = []
    for num_waiting in (draw(st.integers(1, 40)), draw(st.integers(0, 10))):
        sizes = tuple(draw(st.lists(st.integers(1, 9), max_size=num_waiting)))
        load = InstanceLoad(
            free_blocks=draw(st.integers(0, 200)),
            running=draw(st.integers(0, 20)),
            waiting=num_waiting,
            waiting_blocks=draw(st.integers(0, 200)),
            running_tokens=draw(st.integers(0, 200_000)),
            waiting_sizes=sizes,
        )
        points.append(operating_point(make_instance(1, load, num_blocks=400)))
    return points[0], points[1]


@settings(deadline=None, max_examples=300)
@given(pair=pairs(), most=st.integers(0, 200), link_s=st.sampled_from([0.0, 0.002]))
def test_the_inner_optimum_is_exact(
    pair: tuple[OperatingPoint, OperatingPoint], most: int, link_s: float
) -> None:
    """Against every k that lets one more request in, evaluated one by one."""
    debtor, creditor = pair
    found = best_num_blocks(debtor, creditor, link_s, most)

    def total(num_blocks: int) -> float:
        lent = debtor.lend_out(num_blocks, link_s)
        return lent.tokens_per_s + creditor.take_in(num_blocks).tokens_per_s

    admitted = [debtor.lend_out(num_blocks).admitted for num_blocks in range(most + 1)]
    steps = [k for k in range(1, most + 1) if admitted[k] > admitted[k - 1]]
    if steps:
        assert found in steps
        assert math.isclose(total(found), max(map(total, steps)))
    else:
        assert found == (most if debtor.admitted < debtor.waiting else 0)
