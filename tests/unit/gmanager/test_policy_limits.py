"""What production adds to Algorithm 1: sizes, caps, limits, moves under way, nodes."""

from dataclasses import replace

import pytest

from services.common.ids import InstId, ReqId
from services.gmanager.board import Move, Rules
from services.gmanager.cluster import Cluster, Instance, InstanceLoad, LinkTerms, PlacementEntry
from services.gmanager.policy import Decision, Verdict, plan
from tests.unit.gmanager.builders import PERF, make_instance, make_row, view_of

RULES = Rules(batch_threshold=8, utilisation_threshold=0.8)
IDLE = InstanceLoad(free_blocks=100)
HELD_DOWN = InstanceLoad(
    free_blocks=0, running=2, waiting=6, waiting_blocks=60, running_tokens=1600
)
#: A debtor whose link costs: 30 layers, and a partial of a kilobyte.
LINKED = replace(PERF, num_layers=30, link_round_trip_s=1e-5, link_bytes_per_s=1e9, row_bytes=1000)


def decide(
    instances: list[Instance],
    entries: list[PlacementEntry],
    *under_way: Move,
    resting: tuple[int, ...] = (),
    rules: Rules = RULES,
) -> list[Decision]:
    view = view_of(Cluster(tuple(instances), tuple(entries)))
    return plan(view, rules, under_way, frozenset(map(InstId, resting)))


def blocks_moved(decisions: list[Decision]) -> dict[tuple[int, int], int]:
    """By source and destination."""
    return {
        (move.source, move.destination): move.num_blocks
        for decision in decisions
        if decision.verdict is Verdict.MOVE
        for move in decision.moves
    }


def move(req_id: int, num_blocks: int, source: int, destination: int) -> Move:
    return Move(ReqId(req_id), num_blocks, InstId(source), InstId(destination))


def test_the_sizes_of_waiting_requests_say_how_many_blocks_let_them_in() -> None:
    # 40 blocks let four average requests in, but only the two small ones that come first.
    load = replace(HELD_DOWN, waiting_sizes=(5, 5, 50))
    creditor = make_instance(2, replace(IDLE, free_blocks=60))
    decisions = decide([make_instance(1, load), creditor], [make_row(7, 1, 80)])
    assert blocks_moved(decisions) == {(1, 2): 10}


def test_a_creditor_lends_no_more_than_its_cap() -> None:
    creditor = make_instance(2, replace(IDLE, free_blocks=80, lent_blocks=5))
    creditor = replace(creditor, info=replace(creditor.info, max_lent_blocks=27))
    decisions = decide([make_instance(1, HELD_DOWN), creditor], [make_row(7, 1, 80)])
    assert blocks_moved(decisions) == {(1, 2): 20}


def test_one_source_has_a_limited_number_of_moves() -> None:
    # Each creditor has room for one of the six requests.
    creditors = [make_instance(i, InstanceLoad(free_blocks=30)) for i in (2, 3, 4)]
    rules = replace(RULES, max_moves_per_source=2)
    decisions = decide([make_instance(1, HELD_DOWN), *creditors], [make_row(7, 1, 80)], rules=rules)
    assert blocks_moved(decisions) == {(1, 2): 10, (1, 3): 10}


def test_one_destination_has_a_limited_number_of_moves() -> None:
    load = replace(HELD_DOWN, waiting=1, waiting_blocks=10)
    debtors = [make_instance(i, load) for i in (1, 2, 3)]
    rows = [make_row(10 + i, i, 80) for i in (1, 2, 3)]
    rules = replace(RULES, max_moves_per_destination=2)
    decisions = decide([*debtors, make_instance(4)], rows, rules=rules)
    assert blocks_moved(decisions) == {(1, 4): 10, (2, 4): 10}
    assert [decision.verdict for decision in decisions][2] is Verdict.NO_CREDITOR


def test_moves_under_way_count_at_their_destination() -> None:
    # Of the 80 blocks that the creditor may lend 45 are promised already.
    decisions = decide(
        [make_instance(1, HELD_DOWN), make_instance(2, IDLE), make_instance(3, HELD_DOWN)],
        [make_row(7, 1, 80)],
        move(9, 45, 3, 2),
        resting=(3,),
    )
    assert blocks_moved(decisions) == {(1, 2): 30}
    rules = replace(RULES, max_moves_per_destination=1)
    decisions = decide(
        [make_instance(1, HELD_DOWN), make_instance(2, IDLE), make_instance(3, HELD_DOWN)],
        [make_row(7, 1, 80)],
        move(9, 45, 3, 2),
        resting=(3,),
        rules=rules,
    )
    assert blocks_moved(decisions) == {}


def test_who_takes_in_a_move_under_way_is_no_source() -> None:
    instances = [make_instance(1, HELD_DOWN), make_instance(2), make_instance(3)]
    decisions = decide(instances, [make_row(7, 1, 80)], move(9, 4, 2, 1))
    assert [decision.verdict for decision in decisions] == [Verdict.LENDS]


def test_the_source_of_a_move_under_way_is_no_creditor() -> None:
    instances = [make_instance(1, HELD_DOWN), make_instance(2), make_instance(3)]
    decisions = decide(instances, [make_row(7, 1, 80)], move(9, 4, 2, 3))
    assert set(blocks_moved(decisions)) == {(1, 3)}


def test_a_move_under_way_between_instances_that_left_is_ignored() -> None:
    instances = [make_instance(1, HELD_DOWN), make_instance(2)]
    decisions = decide(instances, [make_row(7, 1, 80)], move(9, 4, 8, 9), move(9, 4, 8, 2))
    assert blocks_moved(decisions) == {(1, 2): 60}


def test_the_own_node_is_asked_first() -> None:
    near = make_instance(2, InstanceLoad(free_blocks=90), host="a")
    far = make_instance(3, InstanceLoad(free_blocks=100), host="b")
    decisions = decide([make_instance(1, HELD_DOWN, host="a"), near, far], [make_row(7, 1, 80)])
    assert blocks_moved(decisions) == {(1, 2): 60}
    decisions = decide([make_instance(1, HELD_DOWN, host="c"), near, far], [make_row(7, 1, 80)])
    assert blocks_moved(decisions) == {(1, 3): 60}


@pytest.mark.parametrize(
    ("host", "link_s"),
    [
        # 30 layers * (10 us + 1000 B at 1 GB/s)
        pytest.param("a", 30 * (1e-5 + 1e-6), id="same-node"),
        # 30 layers * (100 us + 1000 B at 0.1 GB/s)
        pytest.param("b", 30 * (1e-4 + 1e-5), id="other-node"),
    ],
)
def test_a_link_costs_what_links_of_its_kind_cost(host: str, link_s: float) -> None:
    rules = replace(RULES, other_node_round_trip_s=1e-4, other_node_bytes_per_s=1e8)
    instances = [make_instance(1, HELD_DOWN, host="a", perf=LINKED), make_instance(2, host=host)]
    (decision,) = decide(instances, [make_row(7, 1, 80)], rules=rules)
    debtor = decision.changes[0]
    assert debtor.before.link_s == 0.0
    assert debtor.after.link_s == pytest.approx(link_s)


def test_a_link_that_was_measured_costs_what_was_measured() -> None:
    rules = replace(RULES, other_node_round_trip_s=1e-4, other_node_bytes_per_s=1e8)
    measured = replace(LINKED, links={InstId(2): LinkTerms(5e-5, 5e8)})
    instances = [make_instance(1, HELD_DOWN, host="a", perf=measured), make_instance(2, host="b")]
    (decision,) = decide(instances, [make_row(7, 1, 80)], rules=rules)
    # 30 layers * (50 us + 1000 B at 0.5 GB/s), on another node or not
    assert decision.changes[0].after.link_s == pytest.approx(30 * (5e-5 + 2e-6))


@pytest.mark.parametrize(("own", "measured"), [(0.0, 5e8), (5e8, 0.0)])
def test_a_rate_that_is_unknown_makes_no_link_free(own: float, measured: float) -> None:
    links = {InstId(2): LinkTerms(5e-5, measured)}
    perf = replace(LINKED, link_bytes_per_s=own, links=links)
    instances = [make_instance(1, HELD_DOWN, perf=perf), make_instance(2)]
    (decision,) = decide(instances, [make_row(7, 1, 80)])
    assert decision.changes[0].after.link_s == pytest.approx(30 * (5e-5 + 2e-6))


def test_an_existing_loan_is_paid_for_already() -> None:
    instances = [make_instance(1, HELD_DOWN, perf=LINKED), make_instance(2)]
    rows = [make_row(7, 1, 80), make_row(7, 2, 5, owner=1), make_row(8, 2, 5, owner=1)]
    (decision,) = decide(instances, rows)
    debtor = decision.changes[0]
    # One call with two rows in each layer, before and after.
    assert debtor.before.link_s == pytest.approx(30 * (1e-5 + 2e-6))
    assert debtor.after.link_s == debtor.before.link_s


@pytest.mark.parametrize(
    ("instances", "entries", "verdict"),
    [
        pytest.param([make_instance(1, HELD_DOWN), make_instance(2)], [make_row(7, 1, 80)],
                     Verdict.MOVE, id="move"),
        pytest.param([make_instance(1, HELD_DOWN), make_instance(2)], [make_row(7, 1, 1)],
                     Verdict.NOTHING_TO_MOVE, id="only-a-tail"),
        pytest.param([make_instance(1, HELD_DOWN), make_instance(2)], [],
                     Verdict.NOTHING_TO_MOVE, id="no-request"),
        pytest.param([make_instance(1, HELD_DOWN)], [make_row(7, 1, 80)],
                     Verdict.NO_CREDITOR, id="alone"),
        pytest.param([make_instance(1, HELD_DOWN), make_instance(2, replace(IDLE, free_blocks=25))],
                     [make_row(7, 1, 80)], Verdict.TOO_LITTLE_ROOM, id="half-a-request"),
        pytest.param([make_instance(1, HELD_DOWN, perf=replace(LINKED, link_round_trip_s=1.0)),
                      make_instance(2)], [make_row(7, 1, 80)], Verdict.NO_GAIN, id="dear-link"),
    ],
)  # fmt: skip
def test_every_debtor_gets_a_decision_with_its_reason(
    instances: list[Instance], entries: list[PlacementEntry], verdict: Verdict
) -> None:
    (decision,) = decide(instances, entries)
    assert (decision.debtor, decision.verdict) == (1, verdict)


def test_a_decision_tells_what_was_weighed_and_what_it_would_bring() -> None:
    perf = replace(LINKED, link_round_trip_s=1.0)
    instances = [make_instance(1, HELD_DOWN, perf=perf), make_instance(2)]
    (decision,) = decide(instances, [make_row(7, 1, 80)])
    assert decision.moves == (move(7, 60, 1, 2),)
    assert [change.inst_id for change in decision.changes] == [1, 2]
    # Two requests at (12 + 1.6) ms before; eight with a second of link in each of 30 layers after.
    before, after = decision.changes[0].before, decision.changes[0].after
    assert before.tokens_per_s == pytest.approx(2 / 0.0136)
    assert after.batch == 8
    assert after.step_s == pytest.approx(0.018 + 0.0016 + 30 * (1.0 + 1e-6))
    assert decision.gain_tokens_per_s == pytest.approx(after.tokens_per_s - before.tokens_per_s)


def test_who_is_not_held_down_gets_no_decision() -> None:
    assert decide([make_instance(1), make_instance(2)], [make_row(7, 1, 80)]) == []
