"""gRPC channels to workers, one per address. Owned by the dispatcher."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from protos.infinite_llm.v1 import worker_pb2_grpc
from services.common.rpc import open_channel


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    stub: "worker_pb2_grpc.WorkerAsyncStub"
    num_calls: int = 0


class WorkerChannels:
    """Opens on first use; `prune` closes those of instances that left, once they are idle."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def use(self, address: str) -> Iterator["worker_pb2_grpc.WorkerAsyncStub"]:
        entry = self._entries.get(address)
        if entry is None:
            channel = open_channel(address, self._dead_after_s)
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            entry = self._entries[address] = _Entry(channel, stub)
        entry.num_calls += 1
        try:
            yield entry.stub
        finally:
            entry.num_calls -= 1

    async def prune(self, known: set[str]) -> None:
        gone = [
            address
            for address, entry in self._entries.items()
            if address not in known and not entry.num_calls
        ]
        for address in gone:
            await self._entries.pop(address).channel.close()

    async def close(self) -> None:
        while self._entries:
            _, entry = self._entries.popitem()
            await entry.channel.close()
