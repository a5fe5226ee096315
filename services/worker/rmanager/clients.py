"""gRPC to the gManager and to other rManagers, one channel per address."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from protos.infinite_llm.v1 import types_pb2
from protos.infinite_llm.v1.worker_pb2_grpc import RManagerStub
from services.common.gmanagers import GManagers
from services.common.ids import Incarnation, InstId
from services.common.rpc import open_channel
from services.worker.rmanager.peers import PeerView

if TYPE_CHECKING:  # this name exists in the stubs' types only
    from protos.infinite_llm.v1.worker_pb2_grpc import RManagerAsyncStub


class Clients:
    """Owns the channels; `close` ends them."""

    def __init__(self, gmanager_addresses: Sequence[str]) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._addresses: dict[tuple[InstId, Incarnation], str] = {}
        self.gmanager = GManagers(gmanager_addresses)

    def rmanager(self, peer: PeerView) -> "RManagerAsyncStub":
        """Speak to a peer, and remember where it is: what it lends must be released some day."""
        self.remember(peer.inst_id, peer.incarnation, peer.control_address)
        return self.known(peer.inst_id, peer.incarnation)

    def remember(self, inst_id: InstId, incarnation: Incarnation, control_address: str) -> None:
        """Where a peer is that speaks to us, and that we may have to answer some day."""
        self._addresses[(inst_id, incarnation)] = control_address

    def known(self, inst_id: InstId, incarnation: Incarnation) -> "RManagerAsyncStub":
        """A peer met before, also when no view lists it any more; KeyError otherwise."""
        return RManagerStub(self._channel(self._addresses[(inst_id, incarnation)]))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self.gmanager.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]


def peer_view(view: types_pb2.InstanceView) -> PeerView:
    """The wire's InstanceView as the rManager's own type."""
    info, load = view.info, view.load
    return PeerView(
        inst_id=InstId(info.inst_id),
        incarnation=Incarnation(info.incarnation),
        control_address=info.control_address,
        data_address=info.data_address,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        model=info.model,
        num_blocks=info.num_blocks,
        free_blocks=load.free_blocks,
        is_draining=load.draining,
    )


def destination_view(info: types_pb2.InstanceInfo) -> PeerView:
    """A planned move's destination; whether it has room is its own answer."""
    return peer_view(types_pb2.InstanceView(info=info))
