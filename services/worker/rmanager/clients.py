"""gRPC to the gManager and to other rManagers, one channel per address."""

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass
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


#: Longer than two renewals are apart, and than anybody tries to reach a peer that does not answer.
_KEEP_S = 600.0


@dataclass(slots=True)
class _Known:
    address: str
    used_s: float


class Clients:
    """Owns the channels; `close` ends them."""

    def __init__(self, gmanager_addresses: Sequence[str]) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._known: dict[tuple[InstId, Incarnation], _Known] = {}
        self.gmanager = GManagers(gmanager_addresses)

    def rmanager(self, peer: PeerView) -> "RManagerAsyncStub":
        """Speak to a peer, and remember where it is: what it lends must be released some day."""
        self.remember(peer.inst_id, peer.incarnation, peer.control_address)
        return self.known(peer.inst_id, peer.incarnation)

    def remember(self, inst_id: InstId, incarnation: Incarnation, control_address: str) -> None:
        """Where a peer is that speaks to us, and that we may have to answer some day."""
        self._known[(inst_id, incarnation)] = _Known(control_address, _now_s())

    def known(self, inst_id: InstId, incarnation: Incarnation) -> "RManagerAsyncStub":
        """A peer met before, also when no view lists it any more; KeyError otherwise."""
        known = self._known[(inst_id, incarnation)]
        known.used_s = _now_s()
        return RManagerStub(self._channel(known.address))

    async def prune(self, in_use: Set[tuple[InstId, Incarnation]]) -> None:
        """Forget who was not spoken to for a while, but for these: we have something there, or they
        here."""
        now_s = _now_s()
        for who in in_use & self._known.keys():
            self._known[who].used_s = now_s
        self._known = {
            who: known for who, known in self._known.items() if now_s - known.used_s <= _KEEP_S
        }
        addresses = {known.address for known in self._known.values()}
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self.gmanager.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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
