"""A network that does to every message what fate says: late, lost, twice, out of order.

Control messages carry the real protos to the real services; blocks and attention calls go to the
real lender of whoever listens at the address now.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from services.common.errors import InfiniteLLMError, PartLost
from services.common.ids import InstId, MoveId
from services.worker.distattention.debtor import Peer
from services.worker.kvcache.lender import Lender
from tests.unit.worker.protocol.virtual_time import beside, pause

#: Of an attention call or a copy that gets no answer.
DATA_DEADLINE_S = 1.0
NUM_LAYERS = 2
GMANAGER = "gmanager"


@dataclass(frozen=True, slots=True)
class Fate:
    """Of one message and its answer; of one block or attention call."""

    delay_s: float = 0.001
    is_lost: bool = False
    is_answer_lost: bool = False
    again_after_s: float | None = None
    is_garbled: bool = False
    """Blocks only: the checksum does not match."""


FINE = Fate()


class Host(Protocol):
    """A process at an address, for as long as it lives."""

    is_alive: bool
    services: tuple[object, ...]


class Storage:
    """The bytes of one instance's blocks, as its shape says; that is all there is to it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._bytes = bytearray(num_blocks * block_bytes)
        self._block_bytes = block_bytes
        self.shape = self

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def block(self, block_id: int) -> memoryview:
        start = block_id * self._block_bytes
        return memoryview(self._bytes)[start : start + self._block_bytes]

    def poison(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.block(block_id)[:] = bytes(self._block_bytes)


class DataHost(Host, Protocol):
    me: Peer
    lender: Lender
    storage: Storage


class Network:
    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.data_hosts: dict[InstId, DataHost] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.heal()

    def heal(self) -> None:
        """From now on every message is fine."""
        self.trouble((), (), ())

    def trouble(
        self, control: Sequence[Fate], data: Sequence[Fate], gmanager: Sequence[Fate]
    ) -> None:
        """Fates in the order in which messages are sent; those after them are fine."""
        self._control, self._data, self._gmanager = iter(control), iter(data), iter(gmanager)

    def next_data_fate(self) -> Fate:
        return next(self._data, FINE)

    # -- control ----------------------------------------------------------------------------------

    async def call(
        self, sender: Host, address: str, method: str, request: Any, timeout: float
    ) -> Any:
        fate = next(self._gmanager if address == GMANAGER else self._control, FINE)
        if not sender.is_alive:
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE)
        call = self._spawn(self._carry(address, method, request, fate))
        try:
            # It may still arrive when nobody waits any more.
            async with asyncio.timeout(timeout):
                return await asyncio.shield(call)
        except TimeoutError:
            raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED) from None

    async def _carry(self, address: str, method: str, request: Any, fate: Fate) -> Any:
        if fate.again_after_s is not None:
            again = Fate(delay_s=fate.delay_s + fate.again_after_s)
            self._spawn(self._carry(address, method, request, again))
        await asyncio.sleep(math.inf if fate.is_lost else fate.delay_s)
        host = self.hosts.get(address)
        if host is None or not host.is_alive:
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE)
        handler = next(getattr(s, method) for s in host.services if hasattr(s, method))
        copy = type(request)()
        copy.CopyFrom(request)
        try:
            answer = await handler(copy, None)
        except InfiniteLLMError as error:
            raise _rpc_error(grpc.StatusCode[error.grpc_code], error.message) from error
        await asyncio.sleep(math.inf if fate.is_answer_lost else fate.delay_s)
        return answer

    def _spawn(self, carrying: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(carrying)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the sender's business, if it still waits

    # -- data -------------------------------------------------------------------------------------

    def reach(self, sender: DataHost, peer: Peer, fate: Fate) -> DataHost:
        """On a strand: whoever answers to the greeting, after the delay."""
        if fate.is_lost:
            pause(DATA_DEADLINE_S)
            raise PartLost(peer.inst_id, "no answer")
        pause(fate.delay_s)
        host = self.data_hosts.get(peer.inst_id)
        if not sender.is_alive or host is None or not host.is_alive:
            raise PartLost(peer.inst_id, "nobody is there")
        if host.me.incarnation != peer.incarnation:
            raise PartLost(peer.inst_id, "it is another incarnation")
        return host


class Stub:
    """What gRPC makes of a service: every method as a call."""

    def __init__(self, network: Network, sender: Host, address: str) -> None:
        self._network, self._sender, self._address = network, sender, address

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._network.call, self._sender, self._address, method)


class DataLink:
    """The owner's end: sender, fetcher and channel in one."""

    def __init__(self, network: Network, owner: DataHost, peer: Peer) -> None:
        self._network, self._owner, self._peer = network, owner, peer

    def close(self) -> None:
        """Nothing is kept between two calls."""

    def send_blocks(
        self, move_id: MoveId, blocks: Iterable[memoryview], first_index: int = 0
    ) -> None:
        for index, block in enumerate(blocks, first_index):
            self.send_block(move_id, index, block)

    def send_block(self, move_id: MoveId, index: int, block: memoryview) -> None:
        fate, payload = self._network.next_data_fate(), bytes(block)
        if fate.again_after_s is not None:
            beside(partial(self._send_again, move_id, index, payload, fate.again_after_s))
        self._receive(move_id, index, payload, fate)
        if fate.is_answer_lost:
            pause(DATA_DEADLINE_S)
            raise PartLost(self._peer.inst_id, "no acknowledgement")

    def _send_again(self, move_id: MoveId, index: int, payload: bytes, after_s: float) -> None:
        with suppress(PartLost):
            self._receive(move_id, index, payload, Fate(delay_s=after_s))

    def _receive(self, move_id: MoveId, index: int, payload: bytes, fate: Fate) -> None:
        """What the creditor's connection thread does, in two halves."""
        host = self._network.reach(self._owner, self._peer, fate)
        owner, half = self._owner.me, len(payload) // 2
        block_id = host.lender.begin_receive(owner.inst_id, owner.incarnation, move_id, index)
        block = host.storage.block(block_id)
        block[:half] = payload[:half]
        pause(fate.delay_s)
        block[half:] = payload[half:]
        host.lender.end_receive(move_id, index, not fate.is_garbled)
        if fate.is_garbled or not host.is_alive:
            raise PartLost(self._peer.inst_id, "the checksum does not match")

    def fetch_blocks(
        self, move_id: MoveId, blocks: Sequence[memoryview], first_index: int = 0
    ) -> None:
        for index, block in enumerate(blocks, first_index):
            block[:] = self._read((move_id,), num_times=1)[index]

    def attend(self, move_ids: tuple[MoveId, ...]) -> list[bytes]:
        """What the creditor's attention reads in the last layer; all are read alike."""
        return self._read(move_ids, NUM_LAYERS)

    def _read(self, move_ids: tuple[MoveId, ...], num_times: int) -> list[bytes]:
        fate, owner = self._network.next_data_fate(), self._owner.me
        host = self._network.reach(self._owner, self._peer, fate)
        part = host.lender.open_part(owner.inst_id, owner.incarnation, move_ids)
        blocks: list[bytes] = []
        for number in range(1, num_times + 1):
            host.lender.begin_use(part)
            try:
                # Long enough for a lease to end under the reader, who has it pinned.
                pause(fate.delay_s if number == num_times else 0.0)
                blocks = [bytes(host.storage.block(block_id)) for block_id in part.block_ids]
            finally:
                host.lender.end_use(part)
        if fate.is_answer_lost or fate.is_garbled or not host.is_alive:
            raise PartLost(self._peer.inst_id, "no answer")
        return blocks


def _rpc_error(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
