"""Speaks to the workers themselves: begin a drain, call it back. Called by `reconcile`."""

import logging

import grpc

from protos.infinite_llm.v1 import worker_pb2
from protos.infinite_llm.v1.worker_pb2_grpc import WorkerStub
from services.common.rpc import PROBE_DEADLINE_S, error_from_rpc, open_channel

_log = logging.getLogger(__name__)

#: Zero would mean the worker's own deadline.
_SHORTEST_S = 0.001


class Workers:
    """One connection per call: they are few, and minutes apart."""

    async def drain(self, address: str, left_s: float) -> bool:
        """Tells it to drain, again or for the first time; True where nobody needs it any more.

        False also where it does not answer: it may still be in use, until its time is over.
        """
        request = worker_pb2.DrainRequest(deadline_s=max(_SHORTEST_S, left_s), stay=True)
        async with open_channel(address) as channel:
            try:
                answer = await WorkerStub(channel).Drain(request, timeout=PROBE_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                _log_silence("drain", address, error)
                return False
        return not answer.open_requests and not answer.lent_blocks

    async def undrain(self, address: str) -> bool:
        """True where it serves again."""
        async with open_channel(address) as channel:
            try:
                await WorkerStub(channel).Undrain(
                    worker_pb2.UndrainRequest(), timeout=PROBE_DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                _log_silence("undrain", address, error)
                return False
        return True


def _log_silence(call: str, address: str, error: grpc.aio.AioRpcError) -> None:
    reason = error_from_rpc(error).message
    _log.warning("a worker does not %s", call, extra={"address": address, "reason": reason})
