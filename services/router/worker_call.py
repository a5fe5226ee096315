"""One sequence on one instance: its messages one by one, failures as the error tree has them.

Made by dispatch, once for each attempt. Closing it makes the worker abort what still runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.errors import DeadlineExceeded, InfiniteLLMError, InstanceLost, Unavailable
from services.common.ids import InstId, ReqId
from services.common.rpc import error_from_rpc
from services.router.patience import Patience
from services.router.routing import Instance
from services.router.token_job import TokenChunk, TokenJob, from_wire, to_wire
from services.router.worker_channels import WorkerChannels


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    first_token_s: float
    idle_s: float
    resume_s: float


class CallFailed(Exception):
    """The instance, and not the client or this router, is why the call has ended."""

    def __init__(self, error: InfiniteLLMError, reason: str) -> None:
        """`reason` is for the log: it may name addresses, which are not for clients."""
        super().__init__(reason)
        self.error = error
        self.reason = reason


class WorkerCall:
    def __init__(
        self,
        inst_id: InstId,
        call: "grpc.aio.UnaryStreamCall[worker_pb2.GenerateTokensRequest, worker_pb2.GenerateTokensResponse]",  # noqa: E501
        timeouts: StreamTimeouts,
        patience: Patience,
    ) -> None:
        self._inst_id = inst_id
        self._responses = aiter(call)
        self._timeouts = timeouts
        self._patience = patience
        self._has_tokens = False

    async def next(self) -> TokenChunk:
        """The next message; raises CallFailed."""
        try:
            response = await self._next_response()
        except grpc.aio.AioRpcError as error:
            translated = error_from_rpc(error)
            reason = translated.message
            if isinstance(translated, Unavailable):
                translated = Unavailable(f"instance {self._inst_id} is not reachable")
            raise CallFailed(translated, reason) from error
        except InfiniteLLMError as error:
            raise CallFailed(error, error.message) from error
        self._has_tokens = self._has_tokens or bool(response.token_ids)
        return from_wire(self._inst_id, response)

    async def _next_response(self) -> worker_pb2.GenerateTokensResponse:
        limit_s = self._timeouts.idle_s if self._has_tokens else self._timeouts.first_token_s
        silent = DeadlineExceeded(f"the instance sent nothing for {limit_s:g} s")
        async with self._patience.limit(limit_s, silent):
            response = await anext(self._responses, None)
        if response is None:
            raise InstanceLost("the instance ended the stream without a finish reason")
        if response.finish_reason == worker_pb2.FINISH_REASON_ABORT:
            raise InstanceLost("the instance gave the request up")
        return response


class WorkerCalls:
    """Makes them; owner of the channels to workers."""

    def __init__(
        self, channels: WorkerChannels, timeouts: StreamTimeouts, patience: Patience
    ) -> None:
        self.channels = channels
        self._timeouts = timeouts
        self._patience = patience

    @contextmanager
    def open(self, instance: Instance, req_id: ReqId, job: TokenJob) -> Iterator[WorkerCall]:
        with self.channels.use(instance.address) as worker:
            call = worker.Generate(to_wire(req_id, job))
            try:
                yield WorkerCall(instance.inst_id, call, self._timeouts, self._patience)
            finally:
                call.cancel()
