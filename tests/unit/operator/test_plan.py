"""Single decisions: who leaves, when somebody is deleted, when somebody is replaced."""

from dataclasses import replace
from typing import Any

import pytest

from services.operator.plan import (
    Action,
    CancelDrain,
    Create,
    Delete,
    End,
    Load,
    Plan,
    Seen,
    StartDrain,
    Why,
    make_plan,
)
from services.operator.pods import Pod
from tests.unit.operator.builders import NOW_S, WANTED, pod


def plan(pods: list[Pod], replicas: int = 3, **seen: Any) -> Plan:
    known: dict[str, Any] = {"loads": {}, "drained": (), "taken_ids": (), "now_s": NOW_S} | seen
    return make_plan(replace(WANTED, replicas=replicas), Seen(pods, **known))


def actions(pods: list[Pod], replicas: int = 3, **seen: Any) -> tuple[Action, ...]:
    return plan(pods, replicas, **seen).actions


def leaving(pods: list[Pod], replicas: int, **seen: Any) -> list[int]:
    return [
        action.pod.inst_id
        for action in actions(pods, replicas, **seen)
        if isinstance(action, StartDrain | Delete)
    ]


# -- how many --------------------------------------------------------------------------------------


def test_what_is_missing_gets_the_smallest_ids_that_nobody_has() -> None:
    found = actions([pod(1), pod(0, is_terminating=True)], replicas=3, taken_ids={3})
    assert found == (Create(2, 0), Create(4, 0))


def test_when_all_is_as_wanted_nothing_is_done() -> None:
    assert plan([pod(0), pod(1), pod(2)]) == Plan((), None)


def test_of_very_many_some_are_made_at_once_and_the_rest_soon() -> None:
    made = plan([], replicas=100)
    assert len(made.actions) == 32
    assert made.look_again_in_s == 0.0


# -- who leaves ------------------------------------------------------------------------------------


def test_who_does_not_serve_yet_leaves_first() -> None:
    loading = pod(0, is_started=False, is_ready=False)
    assert actions([loading, pod(1), pod(2)], 2) == (Delete(loading, End.IDLE),)


def test_who_has_been_heard_of_is_in_use_whatever_the_probe_says() -> None:
    registered = pod(0, is_started=False, is_ready=False)
    (action,) = actions([registered], 0, loads={registered.address: Load(1, 1)})
    assert isinstance(action, StartDrain)


def test_without_a_gmanager_a_process_may_be_in_use() -> None:
    (action,) = actions([pod(0, is_started=False, is_ready=False)], 0, loads=None)
    assert isinstance(action, StartDrain)


def test_who_serves_nobody_leaves_before_who_serves() -> None:
    assert leaving([pod(0), pod(1, is_ready=False), pod(2)], 2) == [1]


def test_who_holds_the_least_leaves() -> None:
    pods = [pod(0), pod(1), pod(2)]
    loads = {p.address: load for p, load in zip(
        pods, [Load(5, 2), Load(3, 3), Load(0, 9)], strict=True)}  # fmt: skip
    assert leaving(pods, 2, loads=loads) == [1]


def test_without_a_gmanager_the_newest_leaves() -> None:
    assert leaving([pod(2), pod(0), pod(1)], 2, loads=None) == [2]


def test_an_outdated_one_leaves_before_one_that_is_up_to_date() -> None:
    (action,) = actions([pod(0, template_hash="old"), pod(1), pod(2)], 2)
    assert action == StartDrain(pod(0, template_hash="old"), NOW_S + 60, Why.SCALE_DOWN)


def test_who_has_begun_to_leave_goes_on_with_it() -> None:
    pods = [pod(0, drain_deadline_s=NOW_S + 9, is_ready=False), pod(1)]
    loads = {pods[0].address: Load(7, 7, is_draining=True), pods[1].address: Load()}
    assert plan(pods, 1, loads=loads) == Plan((), 1.0)


def test_the_last_one_that_serves_stays_when_another_has_stopped_meanwhile() -> None:
    pods = [pod(0, drain_deadline_s=NOW_S + 9, is_ready=False), pod(1, is_running=False)]
    assert set(actions(pods, 1)) == {CancelDrain(pods[0]), Delete(pods[1], End.IDLE)}


def test_all_leave_when_none_is_wanted() -> None:
    assert sorted(leaving([pod(0), pod(1)], 0)) == [0, 1]


# -- how they leave --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "is_drained", "expected"),
    [(9, False, None), (9, True, End.DRAINED), (0, False, End.TIMEOUT), (-5, False, End.TIMEOUT)],
)
def test_a_drain_ends_when_nobody_needs_the_pod_or_its_time_is_over(
    left_s: float, is_drained: bool, expected: End | None
) -> None:
    leaver = pod(0, drain_deadline_s=NOW_S + left_s, is_ready=False)
    found = plan([leaver], 0, drained={leaver.name} if is_drained else ())
    assert found.actions == (() if expected is None else (Delete(leaver, expected),))
    assert found.look_again_in_s == (1.0 if expected is None else None)


def test_a_drain_is_called_back_when_more_are_wanted_again() -> None:
    leaver = pod(0, drain_deadline_s=NOW_S + 9, is_ready=False)
    assert actions([leaver], 1, drained={leaver.name}) == (CancelDrain(leaver),)


def test_a_drain_whose_mark_is_lost_is_called_back() -> None:
    forgotten = pod(0, is_ready=False)
    found = actions([forgotten], 1, loads={forgotten.address: Load(is_draining=True)})
    assert found == (CancelDrain(forgotten),)


def test_who_ends_by_itself_is_left_alone() -> None:
    ending = pod(0, is_terminating=True, is_ready=False)
    assert actions([ending], 0, loads={ending.address: Load(1, 1, is_draining=True)}) == ()


# -- updates ---------------------------------------------------------------------------------------


def old(inst_id: int, **changes: Any) -> Pod:
    return pod(inst_id, template_hash="old", **changes)


def test_an_update_takes_out_as_many_as_it_may() -> None:
    pods = [old(0), old(1), old(2)]
    assert leaving(pods, 3) == [2]
    assert leaving([old(0), old(1, is_terminating=True), old(2)], 3) == []
    assert leaving([old(0), old(1), pod(2, is_started=False, is_ready=False)], 3) == []


def test_an_update_begins_with_those_that_do_not_run() -> None:
    crashing = old(0, is_running=False, is_ready=False)
    assert actions([crashing, old(1), old(2)]) == (Delete(crashing, End.IDLE),)


def test_who_would_serve_again_counts_for_what_an_update_may_take_out() -> None:
    """A drain that was called back a moment ago has not made the pod ready yet."""
    pods = [old(0), old(1, is_ready=False), old(2, is_ready=False)]
    assert len(leaving(pods, 3)) == 1


def test_of_those_that_began_to_leave_for_another_reason_some_are_called_back() -> None:
    pods = [old(i, is_ready=False, drain_deadline_s=NOW_S + 9) for i in range(3)]
    assert [type(action) for action in actions(pods, 3)] == [CancelDrain, CancelDrain]


def test_the_only_replica_is_updated_too() -> None:
    assert leaving([old(0)], 1) == [0]


def test_an_update_that_was_taken_back_is_called_back() -> None:
    leaver = pod(0, drain_deadline_s=NOW_S + 9, is_ready=False)
    assert actions([leaver, old(1), pod(2)], 3) == (CancelDrain(leaver),)


# -- replacements ----------------------------------------------------------------------------------


def failed(inst_id: int, ago_s: float, num_failures: int, **changes: Any) -> Pod:
    return pod(
        inst_id,
        created_at_s=NOW_S - ago_s - 5,
        finished_at_s=NOW_S - ago_s,
        is_finished=True,
        is_running=False,
        is_ready=False,
        num_failures=num_failures,
        **changes,
    )


def test_the_first_failure_is_replaced_at_once() -> None:
    ended = failed(0, ago_s=0, num_failures=0)
    assert actions([ended], 1) == (Create(1, 1), Delete(ended, End.FINISHED))


@pytest.mark.parametrize(("num_failures", "backoff_s"), [(1, 10), (2, 20), (3, 40), (20, 300)])
def test_further_failures_are_replaced_later_and_later(num_failures: int, backoff_s: float) -> None:
    early = failed(0, backoff_s - 3, num_failures)
    assert plan([early], 1) == Plan((), 3.0)
    due = failed(0, backoff_s, num_failures)
    assert actions([due], 1) == (Create(1, num_failures + 1), Delete(due, End.FINISHED))


def test_who_lived_long_before_it_failed_is_replaced_at_once() -> None:
    ended = replace(failed(0, 0, num_failures=7), created_at_s=NOW_S - 3600)
    assert actions([ended], 1) == (Create(1, 1), Delete(ended, End.FINISHED))


def test_a_new_template_is_tried_at_once() -> None:
    ended = failed(0, 0, num_failures=7, template_hash="old")
    assert actions([ended], 1) == (Create(1, 0), Delete(ended, End.FINISHED))


def test_a_failure_nobody_waits_for_is_cleared_away() -> None:
    ended = failed(5, 0, num_failures=7)
    assert actions([ended, pod(0)], 1) == (Delete(ended, End.FINISHED),)
