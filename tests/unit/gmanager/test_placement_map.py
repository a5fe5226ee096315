"""The Request Placement Map follows what instances report, through gaps, restarts and silence."""

from dataclasses import replace

import pytest

from services.common.errors import InvalidRequest
from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager.cluster import Cluster, InstanceLoad, RowKey
from services.gmanager.placement_map import Delta, PlacementMap
from tests.unit.gmanager.builders import PERF, make_heartbeat, make_info, make_row


def registered(*inst_ids: int, now_s: float = 0.0) -> PlacementMap:
    placement_map = PlacementMap()
    for inst_id in inst_ids:
        placement_map.register(make_info(inst_id), now_s)
    return placement_map


def key(req_id: int, inst_id: int) -> RowKey:
    return RowKey(ReqId(req_id), InstId(inst_id))


def test_changes_add_replace_and_remove_rows() -> None:
    placement_map = registered(1)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, make_row(7, 1, 3), full=True), 0.0)
    outcome = placement_map.apply_heartbeat(
        make_heartbeat(1, 2, make_row(7, 1, 5), make_row(8, 1, 1)), 0.5
    )
    assert outcome.delta.rows == {key(7, 1), key(8, 1)}
    assert placement_map.cluster().entries == (make_row(7, 1, 5), make_row(8, 1, 1))
    outcome = placement_map.apply_heartbeat(make_heartbeat(1, 3, make_row(7, 1, 0)), 1.0)
    assert outcome.delta.rows == {key(7, 1)}
    assert placement_map.row(key(7, 1)) is None


def test_a_full_report_replaces_the_rows_of_its_instance_only() -> None:
    placement_map = registered(1, 2)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, make_row(7, 1, 3), full=True), 0.0)
    placement_map.apply_heartbeat(make_heartbeat(2, 1, make_row(7, 2, 4, owner=1), full=True), 0.0)
    outcome = placement_map.apply_heartbeat(make_heartbeat(1, 2, make_row(9, 1, 2), full=True), 0.5)
    assert outcome.delta.rows == {key(7, 1), key(9, 1)}
    assert placement_map.cluster().entries == (make_row(7, 2, 4, owner=1), make_row(9, 1, 2))


def test_a_gap_asks_for_a_full_report_until_one_comes() -> None:
    placement_map = registered(1)
    first = placement_map.apply_heartbeat(make_heartbeat(1, 1, full=True), 0.0)
    gap = placement_map.apply_heartbeat(make_heartbeat(1, 3, make_row(7, 1, 3)), 0.5)
    after = placement_map.apply_heartbeat(make_heartbeat(1, 4), 1.0)
    full = placement_map.apply_heartbeat(make_heartbeat(1, 5, full=True), 1.5)
    asked = [outcome.full_report for outcome in (first, gap, after, full)]
    assert asked == [False, True, True, False]
    assert placement_map.cluster().entries == ()


def test_changes_as_the_first_report_ask_for_the_rest() -> None:
    outcome = registered(1).apply_heartbeat(make_heartbeat(1, 1, make_row(7, 1, 3)), 0.0)
    assert outcome.full_report


def test_an_overtaken_heartbeat_changes_nothing_but_the_age() -> None:
    placement_map = registered(1)
    placement_map.apply_heartbeat(make_heartbeat(1, 5, make_row(7, 1, 3), full=True), 0.0)
    old = make_heartbeat(1, 4, make_row(7, 1, 9), load=InstanceLoad(free_blocks=1))
    outcome = placement_map.apply_heartbeat(old, 2.0)
    assert outcome.delta == Delta()
    instance = placement_map.instance(InstId(1))
    assert instance is not None
    assert (instance.last_heartbeat_s, instance.load.free_blocks) == (2.0, 0)
    assert placement_map.cluster().entries == (make_row(7, 1, 3),)


@pytest.mark.parametrize("incarnation", [1, 3])
def test_an_unknown_incarnation_must_register(incarnation: int) -> None:
    placement_map = PlacementMap()
    placement_map.register(make_info(1, incarnation=2), 0.0)
    heartbeat = make_heartbeat(1, 1, make_row(7, 1, 3), incarnation=incarnation, full=True)
    assert placement_map.apply_heartbeat(heartbeat, 0.0).register_again
    assert placement_map.cluster().entries == ()


def test_a_new_incarnation_drops_the_rows_of_the_old_one() -> None:
    placement_map = registered(1)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, make_row(7, 1, 3), full=True), 0.0)
    delta = placement_map.register(make_info(1, incarnation=2), 1.0)
    assert delta == Delta(frozenset({InstId(1)}), frozenset({key(7, 1)}))
    assert placement_map.cluster().entries == ()


def test_registering_the_same_incarnation_again_keeps_its_rows() -> None:
    placement_map = registered(1)
    load = InstanceLoad(free_blocks=9)
    heartbeat = make_heartbeat(1, 1, make_row(7, 1, 3), full=True, load=load)
    placement_map.apply_heartbeat(heartbeat, 0.0)
    placement_map.register(make_info(1), 1.0)
    cluster = placement_map.cluster()
    assert cluster.entries == (make_row(7, 1, 3),)
    assert cluster.instances[0].load == load
    assert placement_map.apply_heartbeat(make_heartbeat(1, 2), 1.0).full_report


def test_silence_drops_an_instance_and_its_rows() -> None:
    placement_map = registered(1, 2)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, make_row(7, 1, 3), full=True), 1.0)
    assert placement_map.expire(3.0, timeout_s=3.0) == Delta()
    assert placement_map.expire(3.5, timeout_s=3.0) == Delta(frozenset({InstId(2)}), frozenset())
    delta = placement_map.expire(4.5, timeout_s=3.0)
    assert delta == Delta(frozenset({InstId(1)}), frozenset({key(7, 1)}))
    assert placement_map.cluster() == Cluster()


def test_leaving_is_idempotent_and_spares_the_successor() -> None:
    placement_map = PlacementMap()
    placement_map.register(make_info(1, incarnation=2), 0.0)
    assert placement_map.deregister(InstId(1), Incarnation(1)) == Delta()
    assert placement_map.deregister(InstId(1), Incarnation(2)).instances == {InstId(1)}
    assert placement_map.deregister(InstId(1), Incarnation(2)) == Delta()


def test_an_unchanged_report_has_an_empty_delta() -> None:
    placement_map = registered(1)
    load = InstanceLoad(free_blocks=4)
    row = make_row(7, 1, 3)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, row, full=True, load=load), 0.0)
    outcome = placement_map.apply_heartbeat(make_heartbeat(1, 2, row, full=True, load=load), 0.5)
    assert outcome.delta == Delta()


def test_a_restored_map_serves_at_once_and_asks_for_confirmation() -> None:
    before = registered(1)
    before.apply_heartbeat(make_heartbeat(1, 8, make_row(7, 1, 3), full=True), 100.0)
    placement_map = PlacementMap()
    placement_map.restore(before.cluster(), now_s=5.0)
    assert placement_map.cluster().entries == (make_row(7, 1, 3),)
    assert placement_map.expire(7.0, timeout_s=3.0) == Delta()
    assert placement_map.apply_heartbeat(make_heartbeat(1, 9), 7.0).full_report


def test_a_map_that_begins_anew_lends_nothing_of_the_old_one() -> None:
    placement_map = registered(1, 2)
    placement_map.apply_heartbeat(make_heartbeat(2, 1, make_row(7, 2, 4, owner=1), full=True), 0.0)
    placement_map.restore(Cluster(), 1.0)
    assert not placement_map.snapshot().lent


def test_restoring_leaves_out_rows_without_an_instance() -> None:
    placement_map = PlacementMap()
    placement_map.restore(Cluster(entries=(make_row(7, 1, 3),)), now_s=0.0)
    assert placement_map.cluster() == Cluster()


@pytest.mark.parametrize(
    "heartbeat",
    [
        pytest.param(make_heartbeat(1, 1, make_row(7, 2, 3), full=True), id="row-of-another"),
        pytest.param(
            make_heartbeat(1, 1, full=True, load=InstanceLoad(free_blocks=101)), id="too-many-free"
        ),
    ],
)
def test_a_contradictory_report_is_refused_whole(heartbeat: object) -> None:
    placement_map = registered(1)
    before = placement_map.cluster()
    with pytest.raises(InvalidRequest):
        placement_map.apply_heartbeat(heartbeat, 0.0)  # type: ignore[arg-type]
    assert placement_map.cluster() == before


def test_constants_that_a_heartbeat_brings_replace_the_old_ones() -> None:
    placement_map = PlacementMap()
    placement_map.register(make_info(1), 0.0)
    placement_map.apply_heartbeat(make_heartbeat(1, 1, full=True), 0.0)
    perf = replace(PERF, attention_s_per_token=2e-6)
    refined = replace(make_heartbeat(1, 2), perf=perf)
    outcome = placement_map.apply_heartbeat(refined, 0.0)
    assert outcome.delta.instances == {1}
    assert placement_map.apply_heartbeat(make_heartbeat(1, 3), 0.0).delta.instances == set()
    instance = placement_map.instance(InstId(1))
    assert instance is not None
    assert instance.info.perf == perf
