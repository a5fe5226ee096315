"""Reads the Request Placement Map from a gManager, for people and for tests."""

from types import TracebackType
from typing import Self, TypeAlias

import grpc

from protos.infinite_llm.v1 import gmanager_pb2
from services.common.addresses import split_addresses
from services.common.gmanagers import GManagers
from services.common.rpc import CONTROL_DEADLINE_S, error_from_rpc

ClusterView: TypeAlias = gmanager_pb2.GetClusterViewResponse


class MapReader:
    """Asks whichever leads of one or several addresses; closed at the end of the `async with`."""

    def __init__(self, gmanager_address: str) -> None:
        self._gmanagers = GManagers(split_addresses(gmanager_address))

    async def read(self) -> ClusterView:
        try:
            return await self._gmanagers.ask(
                lambda gmanager: gmanager.GetClusterView(
                    gmanager_pb2.GetClusterViewRequest(), timeout=CONTROL_DEADLINE_S
                )
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def decisions(self, req_id: int | None = None) -> list[gmanager_pb2.Decision]:
        """Of the planner, newest first; all that it remembers, or those about one request."""
        request = gmanager_pb2.GetDecisionsRequest(req_id=req_id)
        try:
            answer = await self._gmanagers.ask(
                lambda gmanager: gmanager.GetDecisions(request, timeout=CONTROL_DEADLINE_S)
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return list(answer.decisions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._gmanagers.close()


def is_idle(view: ClusterView) -> bool:
    """Every block of every instance is free, and nobody holds anything for anybody."""
    return not view.entries and all(
        instance.load.free_blocks == instance.info.num_blocks
        and instance.load.lent_blocks == instance.load.borrowed_blocks == 0
        for instance in view.instances
    )


def num_leaked_blocks(view: ClusterView) -> int:
    """Blocks that are not free; only meaningful once nothing runs any more."""
    return sum(instance.info.num_blocks - instance.load.free_blocks for instance in view.instances)


def num_borrowed_blocks(view: ClusterView) -> int:
    return sum(instance.load.borrowed_blocks for instance in view.instances)
