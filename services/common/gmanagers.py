"""Finds the gManager that leads among several addresses, and speaks to it.

Used by every client of the gManager: worker, router, local. There is nothing to configure but the
addresses: one that does not lead says so at once, and the next is asked.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from protos.infinite_llm.v1.gmanager_pb2_grpc import GManagerStub
from services.common.rpc import open_channel

if TYPE_CHECKING:  # this name exists in the stubs' types only
    from protos.infinite_llm.v1.gmanager_pb2_grpc import GManagerAsyncStub

Answer = TypeVar("Answer")

#: It is gone, it is stuck, or it does not lead.
_TRY_ANOTHER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class GManagers:
    """Owns one channel per address; `close` ends them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [open_channel(address) for address in addresses]
        self._stubs: list[GManagerAsyncStub] = list(map(GManagerStub, self._channels))
        self._index = 0

    async def ask(self, call: "Callable[[GManagerAsyncStub], Awaitable[Answer]]") -> Answer:
        """One call, to the address that answered last; then to each of the others once.

        Where nobody answers, raises what the last one asked said; the next call begins with it.
        """
        tries_left = len(self._stubs)
        while True:
            index = self._index
            tries_left -= 1
            try:
                return await call(self._stubs[index])
            except grpc.aio.AioRpcError as error:
                if not tries_left or error.code() not in _TRY_ANOTHER:
                    raise
                # Unless a call beside this one has gone on already.
                if self._index == index:
                    self._index = (index + 1) % len(self._stubs)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
