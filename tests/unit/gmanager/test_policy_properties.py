"""Whatever the cluster looks like, a plan can be carried out and makes it faster, by the model."""

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import InstId, ReqId
from services.gmanager.cluster import Cluster, Instance, InstanceLoad, PlacementEntry
from services.gmanager.perf_model import operating_point
from services.gmanager.policy import Thresholds, plan_moves
from tests.unit.gmanager.builders import make_instance, make_row

THRESHOLDS = Thresholds(batch=8, utilisation=0.8)
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
            running_tokens=16 * sum(sizes),
        )
        instances.append(make_instance(inst_id, load, num_blocks=NUM_BLOCKS))
        entries += [make_row(100 * inst_id + n, inst_id, size) for n, size in enumerate(sizes)]
    return Cluster(tuple(instances), tuple(entries))


@settings(deadline=None, max_examples=300)
@given(clusters())
def test_every_plan_can_be_carried_out(cluster: Cluster) -> None:
    moves = plan_moves(cluster, THRESHOLDS)
    assert moves == plan_moves(cluster, THRESHOLDS)
    rows = {(entry.req_id, entry.inst_id): entry.num_blocks for entry in cluster.entries}
    out, taken = Counter[tuple[ReqId, InstId]](), Counter[InstId]()
    for move in moves:
        assert move.num_blocks > 0
        out[move.req_id, move.source] += move.num_blocks
        taken[move.destination] += move.num_blocks
    assert all(num_blocks < rows[key] for key, num_blocks in out.items())
    reserve = math.ceil((1 - THRESHOLDS.utilisation) * NUM_BLOCKS)
    free = {instance.inst_id: instance.load.free_blocks for instance in cluster.instances}
    assert all(num_blocks <= free[c] - reserve for c, num_blocks in taken.items())
    assert not {move.source for move in moves} & {move.destination for move in moves}


@settings(deadline=None, max_examples=300)
@given(clusters())
def test_every_plan_raises_the_modelled_throughput_and_lets_somebody_in(cluster: Cluster) -> None:
    points = {instance.inst_id: operating_point(instance) for instance in cluster.instances}
    before = dict(points)
    moves = plan_moves(cluster, THRESHOLDS)
    for move in moves:
        points[move.source] = points[move.source].lend_out(move.num_blocks, 1, 1)
        points[move.destination] = points[move.destination].take_in(move.num_blocks)
    if moves:
        total = sum(point.tokens_per_s for point in points.values())
        assert total > sum(point.tokens_per_s for point in before.values())
    for debtor in {move.source for move in moves}:
        assert int(points[debtor].admitted) > int(before[debtor].admitted)
