"""The streams of tokens from the engine thread to the callers waiting on the event loop.

Also the rManager's ear at the engine: orders to move, spans to release and the wish to have lent
memory back cross to the loop here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from opentelemetry import context as trace_context

from services.common.errors import InvalidRequest
from services.common.ids import ReqId
from services.worker.engine.sequence import MoveOrder, SequenceOutput
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank

#: Written to by the loop, read by one caller.
TokenQueue = asyncio.Queue[SequenceOutput]


class Streams:
    """Open requests by id; the engine's Listener. `on_*` come from the engine thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[ReqId, TokenQueue] = {}
        self._traces: dict[ReqId, trace_context.Context] = {}
        self.start_moves: Callable[[list[MoveOrder]], None] = _nowhere
        self.release: Callable[[RemoteSpan], None] = _nowhere
        self.recall: Callable[[int, Rank], None] = _nowhere

    @contextlib.contextmanager
    def open(self, req_id: ReqId) -> Iterator[TokenQueue]:
        """The queue of one request while its caller is there."""
        if req_id in self._queues:
            raise InvalidRequest(f"request {req_id} is running already", "req_id")
        self._queues[req_id] = queue = TokenQueue()
        self._traces[req_id] = trace_context.get_current()
        try:
            yield queue
        finally:
            del self._queues[req_id], self._traces[req_id]

    @property
    def num_open(self) -> int:
        return len(self._queues)

    @contextlib.contextmanager
    def trace_of(self, req_id: ReqId) -> Iterator[None]:
        """Run control calls for a request inside its trace, so that creditors appear in it."""
        token = trace_context.attach(self._traces.get(req_id, trace_context.get_current()))
        try:
            yield
        finally:
            trace_context.detach(token)

    def on_added(self, req_id: ReqId) -> None:
        """The engine has the request now: what came before was of an earlier one of the same id,
        whose caller left during a step."""
        self._loop.call_soon_threadsafe(self._forget_earlier, req_id)

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def on_moves(self, orders: list[MoveOrder]) -> None:
        self._loop.call_soon_threadsafe(self.start_moves, orders)

    def on_released(self, released: list[RemoteSpan]) -> None:
        self._loop.call_soon_threadsafe(self._release_all, released)

    def on_recall(self, num_blocks: int, claimant: Rank) -> None:
        self._loop.call_soon_threadsafe(self.recall, num_blocks, claimant)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            queue = self._queues.get(output.req_id)
            if queue is not None:  # its caller may have left
                queue.put_nowait(output)

    def _forget_earlier(self, req_id: ReqId) -> None:
        queue = self._queues.get(req_id)
        while queue is not None and not queue.empty():
            queue.get_nowait()

    def _release_all(self, released: list[RemoteSpan]) -> None:
        for span in released:
            self.release(span)


def _nowhere(*_: object) -> None:
    raise RuntimeError("the rManager is not connected yet")
