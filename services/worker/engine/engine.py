"""The step loop: schedule -> run -> postprocess, on one thread that alone touches sequences.

Everyone else reaches the sequences through `call`, which runs a function between two steps. What a
step brings leaves through the listener; what it wants moved or released leaves as events, too.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from services.common.errors import InternalError, PartLost, ServerError, Unavailable
from services.common.ids import InstId, MoveId, ReqId
from services.worker.engine.attention import ChannelPool, Creditor
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder, Schedule, SequenceOutput
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Reported one by one; a plan does not look further.
_NUM_WAITING_SIZES = 32


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine was doing after its last step; read by the heartbeat and the metrics."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_blocks: int = 0
    waiting_sizes: tuple[int, ...] = ()
    """The blocks that each of the first waiting requests needs."""
    borrowed_blocks: int = 0
    running_tokens: int = 0
    generated_tokens: int = 0
    """Since the start of the process."""
    preemptions: int = 0
    """Sequences that gave their blocks up for want of memory."""
    recomputed: int = 0
    """Sequences that lost a part on a creditor, and the tokens computed again for it."""
    recomputed_tokens: int = 0
    cache_asked_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache, and those found; since the start."""
    cache_hit_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    """Tokens that the last step computed; as many as run, where all of them decoded."""
    local_blocks: dict[ReqId, int] = field(default_factory=dict)
    creditors: dict[Creditor, frozenset[MoveId]] = field(default_factory=dict)
    """Moves whose blocks each creditor holds: their leases are to be renewed."""


class Listener(Protocol):
    """Receives what steps bring; called on the engine thread, must not block."""

    def on_outputs(self, outputs: list[SequenceOutput]) -> None: ...
    def on_moves(self, orders: list[MoveOrder]) -> None: ...
    def on_released(self, released: list[RemoteSpan]) -> None: ...
    def on_recall(self, num_blocks: int, claimant: Rank) -> None: ...


class Engine:
    """Owns the scheduler, the runner and the thread that drives them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        channels: ChannelPool,
        listener: Listener,
        memory_elsewhere: Callable[[], MemoryElsewhere],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshot = EngineSnapshot()
        self._memory_elsewhere = memory_elsewhere
        self._scheduler = scheduler
        self._runner = runner
        self._channels = channels
        self._listener = listener
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the running step; whatever is still here fails with Unavailable."""
        if self._thread.is_alive():
            self._inbox.put(self._begin_stop)
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Until the loop has ended: stopped, or broken."""
        self._thread.join()

    def call(self, function: Callable[[Scheduler], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._scheduler))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def ask(self, function: Callable[[Scheduler], T]) -> "asyncio.Future[T]":
        """`call` for those on an event loop: to be awaited there."""
        return asyncio.wrap_future(self.call(function))

    def lose_parts(
        self, inst_id: InstId, move_ids: Collection[MoveId] | None = None
    ) -> "Future[int]":
        """A creditor no longer holds what it lent: recompute what depended on it."""

        return self.call(lambda s: s.placement.lose_parts(inst_id, move_ids))

    # -- the loop ---------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._is_stopping:
            try:
                ran = self._step()
            except Exception:
                # A defect outside the model: end what is here, serve what comes.
                logger.exception("step failed")
                self._fail_all(InternalError("the engine failed"))
                ran = False
            self._empty_inbox(wait_s=0.0 if ran else 0.05)
        self._fail_all(Unavailable("the instance is shutting down"))
        self._channels.close()

    def _step(self) -> bool:
        """One step; False if there was nothing to run."""
        started_s = self._clock()
        plan = self._scheduler.schedule(started_s, self._memory_elsewhere())
        outputs = plan.failed
        if plan.items:
            outputs = plan.failed + self._run(plan)
        self._publish(plan, outputs, started_s)
        return bool(plan.items)

    def _run(self, plan: Schedule) -> list[SequenceOutput]:
        try:
            sampled = self._runner.run(plan)
        except PartLost as error:
            logger.warning("recomputing what was lent: %s", error)
            self._channels.drop(error.inst_id, error.incarnation)
            self._scheduler.placement.lose_parts(error.inst_id, incarnation=error.incarnation)
            return []
        except Exception as error:
            logger.exception("step failed; its requests end with an error")
            return self._fail(plan, InternalError(f"step failed: {type(error).__name__}"))
        return self._scheduler.postprocess(plan, sampled, self._clock())

    def _fail(self, plan: Schedule, error: InternalError) -> list[SequenceOutput]:
        req_ids = [item.sequence.req_id for item in plan.items]
        now_s = self._clock()
        return [SequenceOutput(r, error=error) for r in req_ids if self._scheduler.abort(r, now_s)]

    def _fail_all(self, error: ServerError) -> None:
        self._empty_inbox(wait_s=0.0)
        sequences = [*self._scheduler.running, *self._scheduler.waiting]
        outputs = [SequenceOutput(sequence.req_id, error=error) for sequence in sequences]
        for sequence in sequences:
            self._scheduler.abort(sequence.req_id, self._clock())
        self._scheduler.blocks.drop_idle_remote()
        self._publish(Schedule(), outputs, self._clock())

    def _publish(self, plan: Schedule, outputs: list[SequenceOutput], started_s: float) -> None:
        self.snapshot = self._take_snapshot(plan, outputs, started_s)
        if outputs:
            self._listener.on_outputs(outputs)
        if plan.moves:
            self._listener.on_moves(plan.moves)
        if plan.recall_claimant is not None:
            self._listener.on_recall(plan.num_recalled_blocks, plan.recall_claimant)
        released = self._scheduler.blocks.take_released()
        if released:
            self._listener.on_released(released)

    def _take_snapshot(
        self, plan: Schedule, outputs: list[SequenceOutput], started_s: float
    ) -> EngineSnapshot:
        last, running = self.snapshot, self._scheduler.running
        creditors: dict[Creditor, set[MoveId]] = {}
        spans = self._scheduler.blocks.remote_spans
        for span in spans:
            creditors.setdefault((span.inst_id, span.incarnation), set()).add(span.move_id)
        self._channels.retain(creditors.keys())
        counts = self._scheduler.blocks.counts
        waiting_sizes = [
            seq.table.blocks_to_reach(seq.num_tokens + 1) for seq in self._scheduler.waiting
        ]
        return EngineSnapshot(
            num_running=len(running),
            num_waiting=len(self._scheduler.waiting),
            waiting_blocks=sum(waiting_sizes),
            waiting_sizes=tuple(waiting_sizes[:_NUM_WAITING_SIZES]),
            borrowed_blocks=sum(span.num_blocks for span in spans),
            running_tokens=sum(seq.num_computed for seq in running),
            generated_tokens=last.generated_tokens + sum(len(o.token_ids) for o in outputs),
            preemptions=last.preemptions + plan.num_preempted,
            recomputed=self._scheduler.placement.num_recomputed,
            recomputed_tokens=self._scheduler.num_recomputed_tokens,
            cache_asked_tokens=counts.asked_tokens,
            cache_hit_tokens=counts.hit_tokens,
            steps=last.steps + (1 if plan.items else 0),
            step_s=self._clock() - started_s if plan.items else last.step_s,
            step_tokens=plan.num_tokens if plan.items else last.step_tokens,
            local_blocks={seq.req_id: len(seq.table.local) for seq in running if seq.table.local},
            creditors={creditor: frozenset(ids) for creditor, ids in creditors.items()},
        )

    def _empty_inbox(self, wait_s: float) -> None:
        try:
            self._inbox.get(timeout=wait_s)() if wait_s else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _begin_stop(self) -> None:
        self._is_stopping = True
