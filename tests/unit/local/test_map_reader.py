"""Reading the map from a gManager, and what it says about leaks."""

from typing import Any

import pytest

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from services.common.addresses import free_ports
from services.common.errors import Unavailable
from services.common.rpc import new_server
from services.local.map_reader import (
    ClusterView,
    MapReader,
    is_idle,
    num_borrowed_blocks,
    num_leaked_blocks,
)


def view(free_blocks: int, lent_blocks: int = 0, borrowed_blocks: int = 0) -> ClusterView:
    load = types_pb2.InstanceLoad(
        free_blocks=free_blocks, lent_blocks=lent_blocks, borrowed_blocks=borrowed_blocks
    )
    info = types_pb2.InstanceInfo(num_blocks=10)
    return ClusterView(instances=[types_pb2.InstanceView(info=info, load=load)])


class FakeGManager(gmanager_pb2_grpc.GManagerServicer):
    async def GetClusterView(
        self, request: gmanager_pb2.GetClusterViewRequest, context: Any
    ) -> ClusterView:
        return view(free_blocks=4)


async def test_the_map_is_read_over_the_wire() -> None:
    server = new_server()
    gmanager_pb2_grpc.add_GManagerServicer_to_server(FakeGManager(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with MapReader(f"127.0.0.1:{port}") as reader:
        assert await reader.read() == view(free_blocks=4)
    await server.stop(grace=None)


async def test_no_gmanager_is_unavailable() -> None:
    (port,) = free_ports(1)
    async with MapReader(f"127.0.0.1:{port}") as reader:
        with pytest.raises(Unavailable):
            await reader.read()


def test_idle_means_that_nothing_is_held_anywhere() -> None:
    assert is_idle(view(free_blocks=10))
    assert not is_idle(view(free_blocks=9))
    assert not is_idle(view(free_blocks=10, lent_blocks=1))
    assert not is_idle(view(free_blocks=10, borrowed_blocks=1))
    with_row = view(free_blocks=10)
    with_row.entries.add(req_id=1, num_blocks=1)
    assert not is_idle(with_row)


def test_blocks_are_counted_over_all_instances() -> None:
    two = view(free_blocks=7, borrowed_blocks=2)
    two.MergeFrom(view(free_blocks=9, borrowed_blocks=3))
    assert num_leaked_blocks(two) == 4
    assert num_borrowed_blocks(two) == 5
