"""A cluster small enough to be simulated: pods that start, serve, crash, drain and end.

Carries out plans as the operator does, and says what rule a plan breaks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
    Wanted,
    is_up,
    make_plan,
)
from services.operator.pods import Pod

START_S = 3
TERMINATION_S = 4
NODE_PATIENCE_S = 60


@dataclass
class Truth:
    """What a pod really does, whatever is seen of it."""

    lent: int = 0
    requests: int = 0
    is_draining: bool = False
    is_lost: bool = False
    """Its node answers nobody."""
    age_s: int = 0
    ends_in_s: int = TERMINATION_S


@dataclass
class Cluster:
    wanted: Wanted
    pods: dict[str, Pod] = field(default_factory=dict)
    truths: dict[str, Truth] = field(default_factory=dict)
    now_s: float = 1000.0
    is_view_away: bool = False
    is_broken: Callable[[Pod], bool] = lambda pod: False
    """Pods that never become ready."""

    def add(self, pod: Pod, truth: Truth | None = None) -> None:
        self.pods[pod.name] = pod
        self.truths[pod.name] = truth or Truth()

    # -- what the operator sees -------------------------------------------------------------------

    @property
    def serving(self) -> list[Pod]:
        return [
            pod for pod in self.pods.values()
            if pod.is_ready and not pod.is_draining and not pod.is_terminating
        ]  # fmt: skip

    @property
    def loads(self) -> dict[str, Load] | None:
        if self.is_view_away:
            return None
        return {
            pod.address: Load(truth.lent, truth.requests, truth.is_draining)
            for pod, truth in ((pod, self.truths[pod.name]) for pod in self.pods.values())
            if pod.is_running and pod.is_started and not truth.is_lost
        }

    def see(self) -> Seen:
        for name, pod in self.pods.items():
            is_told = pod.is_draining and pod.is_started and not pod.is_terminating
            if is_told and not self.truths[name].is_lost:
                self.truths[name].is_draining = True  # at every look
        drained = {
            name for name, pod in self.pods.items()
            if pod.is_draining and pod.is_running and self.truths[name].is_draining
            and not self.truths[name].is_lost
            and not self.truths[name].lent and not self.truths[name].requests
        }  # fmt: skip
        return Seen(list(self.pods.values()), self.loads, drained, (), self.now_s)

    # -- what the operator does -------------------------------------------------------------------

    def step(self) -> Plan:
        seen, before = self.see(), len(self.serving)
        plan = make_plan(self.wanted, seen)
        for action in plan.actions:
            self._check(action, seen)
            self._carry_out(action)
        at_least = self.wanted.replicas
        if any(p.template_hash != self.wanted.template_hash for p in self.pods.values()):
            at_least -= self.wanted.max_unavailable
        assert len(self.serving) >= min(before, at_least), plan.actions
        return plan

    def _check(self, action: Action, seen: Seen) -> None:
        match action:
            case Delete(pod, End.TIMEOUT):
                assert pod.drain_deadline_s is not None and pod.drain_deadline_s <= self.now_s
            case Delete(pod, _) if is_up(pod, seen.loads):
                truth = self.truths[pod.name]
                assert truth.is_draining and not truth.lent and not truth.requests
            case StartDrain(pod, _, _):
                assert not pod.is_draining
            case Create(inst_id, _):
                assert inst_id not in {pod.inst_id for pod in self.pods.values()}

    def _carry_out(self, action: Action) -> None:
        match action:
            case Create(inst_id, num_failures):
                name = f"x-w-{inst_id}"
                self.add(
                    Pod(name, f"{name}@{self.now_s}", inst_id, self.wanted.template_hash,
                        self.now_s, f"{name}:7100", num_failures=num_failures)
                )  # fmt: skip
            case StartDrain(pod, deadline_s, _):
                self._update(pod.name, drain_deadline_s=deadline_s, is_ready=False)
                self.truths[pod.name].is_draining |= not self.truths[pod.name].is_lost
            case CancelDrain(pod) if not self.truths[pod.name].is_lost:
                self._update(pod.name, drain_deadline_s=None)
                self.truths[pod.name].is_draining = False
            case Delete(pod, _) if pod.is_finished:
                del self.pods[pod.name], self.truths[pod.name]
            case Delete(pod, _):
                self._update(pod.name, is_terminating=True)

    # -- what time does ---------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        for pod in list(self.pods.values()):
            self._age(pod, self.truths[pod.name])

    def _age(self, pod: Pod, truth: Truth) -> None:
        truth.age_s += 1
        if truth.is_lost:
            if truth.age_s >= NODE_PATIENCE_S:
                self._update(pod.name, is_terminating=True)
        elif pod.is_terminating:
            truth.ends_in_s -= 1
            if truth.ends_in_s <= 0:
                del self.pods[pod.name], self.truths[pod.name]
        elif not pod.is_finished:
            is_up = truth.age_s >= START_S and not self.is_broken(pod)
            is_ready = is_up and not truth.is_draining
            self._update(pod.name, is_running=True, is_started=is_up, is_ready=is_ready)
            if truth.is_draining:
                truth.lent, truth.requests = max(0, truth.lent - 2), max(0, truth.requests - 1)

    def _update(self, name: str, **changes: object) -> None:
        self.pods[name] = replace(self.pods[name], **changes)  # type: ignore[arg-type]

    def crash(self, name: str) -> None:
        """The process ends and is started again in its place."""
        self.truths[name] = Truth()
        self._update(name, is_running=False, is_started=False, is_ready=False)

    def fail(self, name: str) -> None:
        """The pod is evicted."""
        self.truths[name] = Truth()
        self._update(
            name, is_finished=True, finished_at_s=self.now_s, is_running=False, is_started=False,
            is_ready=False,
        )  # fmt: skip

    def lose(self, name: str) -> None:
        """Its node is cut off: what was seen last stays, but that it is not ready."""
        if self.pods[name].is_finished:
            return
        self.truths[name].is_lost, self.truths[name].age_s = True, 0
        self._update(name, is_ready=False)

    def lose_mark(self, name: str) -> None:
        """The annotation is gone, the worker does not know."""
        self._update(name, drain_deadline_s=None)

    # -- where it has to end ----------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        reachable = [name for name in self.pods if not self.truths[name].is_lost]
        lost = [pod for name, pod in self.pods.items() if name not in reachable]
        return (
            len(self.serving) == len(reachable) == self.wanted.replicas
            and all(pod.is_terminating for pod in lost)
            and all(p.template_hash == self.wanted.template_hash for p in self.serving)
            and not any(self.truths[name].is_draining for name in reachable)
        )

    def settle(self, limit_s: int = 3000) -> int:
        for second in range(limit_s):
            plan = self.step()
            if self.is_settled and not plan.actions:
                return second
            self.tick()
        raise AssertionError(f"never settles: {self.pods}")
