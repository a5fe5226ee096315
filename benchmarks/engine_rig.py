"""The worker's engine in this process, without an instance around it. For the benchmarks."""

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import InternalError
from services.common.ids import ReqId
from services.worker.config import Config
from services.worker.core import Core, build_runner, build_scheduler
from services.worker.distattention.debtor import CreditorChannel, Peer
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder, Request, SequenceOutput
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank

#: No step takes as long; an engine that says nothing for this long is stuck.
_STEP_DEADLINE_S = 120.0


class EngineRig:
    """A running engine as a Subject of `measure`; the engine's listener, too."""

    def __init__(self, config: Config, core: Core) -> None:
        self._outputs: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        self._req_ids: list[ReqId] = []
        channels = ChannelPool(_no_channel)
        scheduler, runner = build_scheduler(config, core), build_runner(config, core, channels)
        self.engine = Engine(scheduler, runner, channels, self, MemoryElsewhere)

    def start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        self._req_ids = [ReqId(index + 1) for index in range(len(prompts))]
        requests = [
            Request(req_id, tuple(prompt), max_new_tokens)
            for req_id, prompt in zip(self._req_ids, prompts, strict=True)
        ]

        def add(scheduler: Scheduler) -> None:
            for request in requests:
                scheduler.add(request, time.monotonic())

        self.engine.call(add).result(_STEP_DEADLINE_S)

    def step(self) -> int:
        try:
            outputs = self._outputs.get(timeout=_STEP_DEADLINE_S)
        except queue.Empty:
            raise InternalError(f"no step within {_STEP_DEADLINE_S:.0f} s") from None
        for output in outputs:
            if output.error is not None:
                raise output.error
        return sum(len(output.token_ids) for output in outputs)

    def finish(self) -> None:
        def abort(scheduler: Scheduler) -> None:
            for req_id in self._req_ids:
                scheduler.abort(req_id, time.monotonic())

        self.engine.call(abort).result(_STEP_DEADLINE_S)
        while not self._outputs.empty():
            self._outputs.get()

    # -- the engine's listener --------------------------------------------------------------------

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self._outputs.put(outputs)

    def on_moves(self, orders: list[MoveOrder]) -> None:
        raise InternalError("there is nobody to lend blocks to")

    def on_released(self, released: list[RemoteSpan]) -> None:
        raise InternalError("there is nobody who lent blocks")

    def on_recall(self, num_blocks: int, claimant: Rank) -> None:
        raise InternalError("there is nobody who borrowed blocks")


@contextmanager
def running(rig: EngineRig) -> Iterator[EngineRig]:
    rig.engine.start()
    try:
        yield rig
    finally:
        rig.engine.stop()


def _no_channel(peer: Peer) -> CreditorChannel:
    raise InternalError(f"there is no instance {peer.inst_id}")
