"""What to do next about one resource: a pure function of what is wanted, what there is, and time.

Called by `reconcile` with what it has just read; whatever was done before is part of that, so that
any operator can go on where another one stopped. The rules:

- Who leaves is drained first: nobody is deleted who is in use, unless his time is over.
- Fewer are wanted: those go who serve nobody yet, then who hold the least.
- An update takes no more out of service than `max_unavailable`.
- A pod that ended for good is replaced, later each time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.operator.pods import Pod

#: How often a drain is looked after.
DRAIN_POLL_S = 1.0
#: So many pods are made at once; the rest at the next look.
_MAX_CREATED = 32

_FIRST_BACKOFF_S = 10.0
_LONGEST_BACKOFF_S = 300.0
#: A pod that lived for so long did not fail because of what it is.
_LONG_LIFE_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the gManager knows of a worker."""

    num_lent_blocks: int = 0
    num_requests: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    replicas: int
    max_unavailable: int
    drain_timeout_s: float
    template_hash: str


@dataclass(frozen=True, slots=True)
class Seen:
    pods: Sequence[Pod]
    loads: Mapping[str, Load] | None
    """By address; None: the gManager does not answer."""
    drained: Collection[str]
    """Names of the pods that said themselves that nobody needs them any more."""
    taken_ids: Collection[int]
    """Instance ids that others have."""
    now_s: float

    def load_of(self, pod: Pod) -> Load:
        """None at all where nobody knows of any."""
        return (self.loads or {}).get(pod.address, Load())


class Why(StrEnum):
    SCALE_DOWN = "fewer replicas are wanted"
    UPDATE = "its template has changed"


class End(StrEnum):
    """Why a pod is deleted."""

    DRAINED = "Drained"
    TIMEOUT = "DrainTimeout"
    IDLE = "Deleted"
    """It never served, or does not run."""
    FINISHED = "Failed"


@dataclass(frozen=True, slots=True)
class Create:
    inst_id: int
    num_failures: int


@dataclass(frozen=True, slots=True)
class StartDrain:
    pod: Pod
    deadline_s: float
    why: Why


@dataclass(frozen=True, slots=True)
class CancelDrain:
    pod: Pod


@dataclass(frozen=True, slots=True)
class Delete:
    pod: Pod
    end: End


Action = Create | StartDrain | CancelDrain | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...]
    look_again_in_s: float | None
    """None: when something changes."""


def make_plan(wanted: Wanted, seen: Seen) -> Plan:
    live = [pod for pod in seen.pods if pod.is_live]
    ended = [pod for pod in seen.pods if not pod.is_terminating and pod.is_finished]
    keep, surplus = _choose(live, wanted, seen)
    num_missing = wanted.replicas - len(keep)
    waiting, replaced = _look_after_ended(ended, num_missing, wanted, seen.now_s)
    outdated = _to_update(keep, wanted, seen)
    leaving = dict.fromkeys(surplus, Why.SCALE_DOWN) | dict.fromkeys(outdated, Why.UPDATE)
    actions: list[Action] = [CancelDrain(pod) for pod in live if _must_stay(pod, leaving, seen)]
    failed = [pod for pod in replaced if pod.template_hash == wanted.template_hash]
    actions += _creations(num_missing - len(waiting), failed, seen)
    actions += [Delete(pod, End.FINISHED) for pod in replaced]
    for pod, why in leaving.items():
        action = _usher_out(pod, why, wanted, seen)
        if action is not None:
            actions.append(action)
    return Plan(tuple(actions), _look_again_in_s(waiting, leaving, actions, seen.now_s))


def is_up(pod: Pod, loads: Mapping[str, Load] | None) -> bool:
    """Whether it may be in use: there is a process, and it has been heard of."""
    return pod.is_running and (pod.is_started or loads is None or pod.address in loads)


def _choose(live: Sequence[Pod], wanted: Wanted, seen: Seen) -> tuple[list[Pod], list[Pod]]:
    """Who stays, and who leaves because there are too many."""

    def worth(pod: Pod) -> tuple[bool, bool, bool, bool, int, float, int]:
        load = seen.load_of(pod)
        is_in_use = is_up(pod, seen.loads)
        return (
            is_in_use,
            is_in_use and (pod.is_ready or pod.is_draining),
            not pod.is_draining,  # who has begun to leave goes on with it
            pod.template_hash == wanted.template_hash,
            load.num_lent_blocks + load.num_requests,
            -pod.created_at_s,
            -pod.inst_id,
        )

    ranked = sorted(live, key=worth, reverse=True)
    return ranked[: wanted.replicas], ranked[wanted.replicas :]


def _to_update(keep: Sequence[Pod], wanted: Wanted, seen: Seen) -> list[Pod]:
    """Who leaves to be made anew, the cheapest first. `keep` is ordered by worth."""
    outdated = [p for p in reversed(keep) if p.template_hash != wanted.template_hash]
    up = [pod for pod in outdated if is_up(pod, seen.loads)]

    def allowed(is_away: Callable[[Pod], bool]) -> int:
        num_here = sum(is_up(pod, seen.loads) and not is_away(pod) for pod in keep)
        return max(0, wanted.max_unavailable - (wanted.replicas - num_here))

    # They serve nobody now but would soon if they were left alone, or called back.
    idle = [pod for pod in up if pod.is_draining or not pod.is_ready]
    idle.sort(key=lambda pod: not pod.is_draining)
    idle = idle[: allowed(lambda pod: not (pod.is_ready or pod.is_draining or pod in up))]
    ready = [pod for pod in up if pod.is_ready and not pod.is_draining]
    ready = ready[: allowed(lambda pod: pod.is_draining or not pod.is_ready)]
    return [pod for pod in outdated if pod not in up] + idle + ready


def _must_stay(pod: Pod, leaving: Collection[Pod], seen: Seen) -> bool:
    """Whether a drain is to be called back, be it one whose mark was lost."""
    if pod in leaving:
        return False
    return pod.is_draining or (pod.is_running and seen.load_of(pod).is_draining)


def _usher_out(pod: Pod, why: Why, wanted: Wanted, seen: Seen) -> Action | None:
    """The next step of a pod that leaves."""
    if not is_up(pod, seen.loads):
        return Delete(pod, End.IDLE)
    if pod.drain_deadline_s is None:
        return StartDrain(pod, seen.now_s + wanted.drain_timeout_s, why)
    if pod.name in seen.drained:
        return Delete(pod, End.DRAINED)
    if seen.now_s >= pod.drain_deadline_s:
        return Delete(pod, End.TIMEOUT)
    return None


def _look_after_ended(
    ended: Sequence[Pod], num_missing: int, wanted: Wanted, now_s: float
) -> tuple[list[Pod], list[Pod]]:
    """Whose replacement has to wait, and who is cleared away."""
    waiting: list[Pod] = []
    for pod in sorted(ended, key=_due_s, reverse=True):
        is_current = pod.template_hash == wanted.template_hash
        if is_current and now_s < _due_s(pod) and len(waiting) < num_missing:
            waiting.append(pod)
    return waiting, [pod for pod in ended if pod not in waiting]


def _due_s(pod: Pod) -> float:
    """When a pod that ended is replaced: the first at once, the next ones later and later."""
    num_failures = _failures_in_a_row(pod)
    if num_failures <= 1:
        return pod.finished_at_s
    backoff_s = _FIRST_BACKOFF_S * 2.0 ** min(num_failures - 2, 10)
    return pod.finished_at_s + min(backoff_s, _LONGEST_BACKOFF_S)


def _failures_in_a_row(pod: Pod) -> int:
    """This one included."""
    is_long_life = pod.finished_at_s - pod.created_at_s >= _LONG_LIFE_S
    return 1 if is_long_life else pod.num_failures + 1


def _creations(num_pods: int, failed: Sequence[Pod], seen: Seen) -> list[Create]:
    """The smallest ids that nobody has; who comes in a failed one's place knows of it."""
    taken = {pod.inst_id for pod in seen.pods} | set(seen.taken_ids)
    failures = [_failures_in_a_row(pod) for pod in failed]
    creations: list[Create] = []
    inst_id = 0
    while len(creations) < min(num_pods, _MAX_CREATED):
        if inst_id not in taken:
            creations.append(Create(inst_id, failures.pop() if failures else 0))
        inst_id += 1
    return creations


def _look_again_in_s(
    waiting: Sequence[Pod], leaving: Collection[Pod], actions: Sequence[Action], now_s: float
) -> float | None:
    times = [max(0.0, _due_s(pod) - now_s) for pod in waiting]
    gone = {action.pod for action in actions if isinstance(action, Delete)}
    if any(pod not in gone for pod in leaving):
        times.append(DRAIN_POLL_S)
    if sum(isinstance(action, Create) for action in actions) == _MAX_CREATED:
        times.append(0.0)
    return min(times, default=None)
