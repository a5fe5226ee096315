"""Algorithm 1: moves what raises the cluster's throughput, and nothing that must stay."""

from dataclasses import replace

import pytest

from services.common.ids import InstId
from services.gmanager.board import Move, Rules
from services.gmanager.cluster import BatchPoint, Cluster, Instance, InstanceLoad, PlacementEntry
from services.gmanager.perf_model import operating_point
from services.gmanager.policy import Verdict
from services.gmanager.policy import plan as decide
from tests.unit.gmanager.builders import PERF, make_instance, make_row, view_of

RULES = Rules(batch_threshold=8, utilisation_threshold=0.8)


def held_down(inst_id: int, **changes: int) -> Instance:
    """Two running requests fill its memory; six of ten blocks each wait."""
    load = InstanceLoad(free_blocks=0, running=2, waiting=6, waiting_blocks=60, running_tokens=1600)
    return make_instance(inst_id, replace(load, **changes))  # type: ignore[arg-type]


def plan(
    instances: list[Instance],
    entries: list[PlacementEntry],
    under_way: tuple[Move, ...] = (),
    resting: frozenset[InstId] = frozenset(),
    **rules: float,
) -> list[Move]:
    decisions = decide(
        view_of(Cluster(tuple(instances), tuple(entries))),
        replace(RULES, **rules),  # type: ignore[arg-type]
        under_way,
        resting,
    )
    return [move for d in decisions if d.verdict is Verdict.MOVE for move in d.moves]


def move(req_id: int, num_blocks: int, source: int, destination: int) -> tuple[int, int, int, int]:
    return (req_id, num_blocks, source, destination)


def as_tuples(moves: list[Move]) -> list[tuple[int, int, int, int]]:
    return [move(m.req_id, m.num_blocks, m.source, m.destination) for m in moves]


def test_an_idle_creditor_lets_all_waiting_requests_in() -> None:
    moves = plan([held_down(1), make_instance(2)], [make_row(7, 1, 80), make_row(8, 1, 20)])
    assert as_tuples(moves) == [move(7, 60, 1, 2)]


def test_the_optimum_is_where_the_creditors_spare_room_ends() -> None:
    # The creditor has requests of its own to let in, and grows faster than the debtor would.
    perf = replace(PERF, non_attention=(BatchPoint(1, 0.0051), BatchPoint(101, 0.0151)))
    load = InstanceLoad(free_blocks=100, running=2, waiting=6, waiting_blocks=60)
    debtor, creditor = held_down(1), make_instance(2, load, perf=perf)

    def total(num_blocks: int) -> float:
        lent = operating_point(debtor).lend_out(num_blocks)
        return lent.tokens_per_s + operating_point(creditor).take_in(num_blocks).tokens_per_s

    (found,) = plan([debtor, creditor], [make_row(7, 1, 80)])
    whole_requests = range(0, 61, 10)
    assert found.num_blocks == max(whole_requests, key=total)
    assert found.num_blocks == 40


def test_uniform_short_load_moves_nothing() -> None:
    load = InstanceLoad(free_blocks=40, running=6, running_tokens=900)
    instances = [make_instance(inst_id, load) for inst_id in (1, 2, 3)]
    entries = [make_row(10 * i + r, i, 10) for i in (1, 2, 3) for r in range(6)]
    assert plan(instances, entries) == []


def test_uniform_overload_moves_nothing() -> None:
    assert plan([held_down(1), held_down(2)], [make_row(7, 1, 80), make_row(8, 2, 80)]) == []


def test_waiting_requests_that_fit_already_move_nothing() -> None:
    debtor = held_down(1, free_blocks=60)
    assert plan([debtor, make_instance(2)], [make_row(7, 1, 40)]) == []


def test_a_dear_link_outweighs_the_gain() -> None:
    perf = replace(PERF, num_layers=30, link_round_trip_s=0.01)
    debtor = replace(held_down(1), info=replace(held_down(1).info, perf=perf))
    assert plan([debtor, make_instance(2)], [make_row(7, 1, 80)]) == []


def test_the_creditor_keeps_its_reserve() -> None:
    # 45 free of 100, of which 20 stay: room for 25 blocks, two whole requests
    creditor = make_instance(2, InstanceLoad(free_blocks=45, running=1, running_tokens=100))
    assert as_tuples(plan([held_down(1), creditor], [make_row(7, 1, 80)])) == [move(7, 20, 1, 2)]


def test_the_tail_block_stays() -> None:
    moves = plan([held_down(1), make_instance(2)], [make_row(7, 1, 40), make_row(8, 1, 39)])
    assert as_tuples(moves) == [move(7, 30, 1, 2)]


def test_only_own_blocks_move() -> None:
    rows = [make_row(9, 1, 90, owner=3), make_row(7, 1, 31)]
    instances = [held_down(1), make_instance(2), make_instance(3, InstanceLoad(running=9))]
    assert as_tuples(plan(instances, rows)) == [move(7, 30, 1, 2)]


def test_several_creditors_make_room_together_the_emptiest_first() -> None:
    creditors = [
        make_instance(2, InstanceLoad(free_blocks=28)),
        make_instance(3, InstanceLoad(free_blocks=26)),
    ]
    debtor = held_down(1, waiting=1, waiting_blocks=12)
    moves = plan([debtor, *creditors], [make_row(7, 1, 80)])
    assert as_tuples(moves) == [move(7, 8, 1, 2), move(7, 4, 1, 3)]


def test_room_for_a_part_of_a_request_moves_nothing() -> None:
    debtor = held_down(1, waiting=1, waiting_blocks=12)
    creditor = make_instance(2, InstanceLoad(free_blocks=28))
    assert plan([debtor, creditor], [make_row(7, 1, 80)]) == []


def test_the_smallest_batch_is_served_first() -> None:
    rows = [make_row(7, 1, 80), make_row(8, 2, 80)]
    debtors = [held_down(1, running=3), held_down(2, running=2)]
    moves = plan([*debtors, make_instance(3)], rows)
    assert as_tuples(moves) == [move(8, 60, 2, 3), move(7, 20, 1, 3)]


def test_a_batch_above_the_threshold_is_no_debtor() -> None:
    assert plan([held_down(1, running=9), make_instance(2)], [make_row(7, 1, 80)]) == []


@pytest.mark.parametrize(
    "creditor",
    [
        pytest.param(make_instance(2, InstanceLoad(free_blocks=100, draining=True)), id="draining"),
        pytest.param(make_instance(2, model="other"), id="other-model"),
        pytest.param(make_instance(2, perf=replace(PERF, non_attention=())), id="not-measured"),
        pytest.param(make_instance(2, InstanceLoad(free_blocks=19)), id="above-utilisation"),
    ],
)
def test_who_cannot_lend(creditor: Instance) -> None:
    assert plan([held_down(1), creditor], [make_row(7, 1, 80)]) == []


def test_a_resting_owner_is_left_alone() -> None:
    instances, rows = [held_down(1), make_instance(2)], [make_row(7, 1, 80)]
    assert plan(instances, rows, resting=frozenset({InstId(1)})) == []
    assert plan(instances, rows, resting=frozenset({InstId(2)})) != []


def test_who_borrows_from_an_instance_does_not_lend_to_it() -> None:
    rows = [make_row(7, 1, 60), make_row(9, 1, 20, owner=2), make_row(9, 2, 10)]
    assert plan([held_down(1), make_instance(2)], rows) == []


def test_nobody_lends_and_borrows_in_one_plan() -> None:
    # Both have room to lend and a giant waiting: each could be the other's creditor.
    debtors = [held_down(i, free_blocks=50, waiting=1, waiting_blocks=70) for i in (1, 2)]
    rows = [make_row(7, 1, 40), make_row(8, 2, 40)]
    assert as_tuples(plan(debtors, rows)) == [move(7, 20, 1, 2)]


def test_an_unfinished_second_helping_is_not_ordered() -> None:
    # Creditor 2 has room for one of the two requests, creditor 3 for a part of the other.
    creditors = [
        make_instance(2, InstanceLoad(free_blocks=55)),
        make_instance(3, InstanceLoad(free_blocks=30)),
    ]
    debtor = held_down(1, waiting=2, waiting_blocks=60)
    assert as_tuples(plan([debtor, *creditors], [make_row(7, 1, 80)])) == [move(7, 30, 1, 2)]


def test_a_gain_within_noise_is_not_worth_a_copy() -> None:
    # W/f = 0.1 ms + 10 ms * beta: a batch of 8 is 0.4 % faster than one of 2.
    curve = (BatchPoint(1, 0.0101), BatchPoint(101, 1.0101))
    perf = replace(PERF, non_attention=curve, attention_s_per_token=0.0)
    debtor = replace(held_down(1), info=replace(held_down(1).info, perf=perf))
    assert plan([debtor, make_instance(2)], [make_row(7, 1, 80)]) == []


def test_a_known_creditor_costs_no_second_round_trip() -> None:
    # The round trip outweighs the gain unless it is paid already.
    perf = replace(PERF, num_layers=30, link_round_trip_s=0.01)
    debtor = replace(held_down(1), info=replace(held_down(1).info, perf=perf))
    instances = [debtor, make_instance(2)]
    assert plan(instances, [make_row(7, 1, 80), make_row(7, 2, 5, owner=1)]) != []


def test_a_long_queue_is_let_in_as_far_as_the_room_goes() -> None:
    debtor = held_down(1, waiting=5000, waiting_blocks=5000)
    (found,) = plan([debtor, make_instance(2)], [make_row(7, 1, 99)])
    assert found.num_blocks == 80


def test_an_empty_cluster_has_an_empty_plan() -> None:
    assert plan([], []) == []
