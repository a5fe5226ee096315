"""A creditor small enough for tests: its lender, its pool, and a hand-driven owner."""

import socket
import ssl
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import torch
import trustme
from prometheus_client import CollectorRegistry

from benchmarks.certificates import issue
from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from kernels.reference import ReferenceKernels
from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId, MoveId
from services.worker.distattention.creditor import CreditorServer
from services.worker.distattention.debtor import CreditorChannel
from services.worker.distattention.link import Borrowing
from services.worker.distattention.memory import geometry_of, tensor_bytes
from services.worker.distattention.metrics import DataPlaneMetrics
from services.worker.distattention.session import Serving
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.transport.one_sided_pool import OneSidedPool
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.transport.socket_stream import SocketStream
from services.worker.distattention.transport.tls import TlsFiles
from services.worker.distattention.wire import (
    HEAD_BYTES,
    Geometry,
    Head,
    Hello,
    Kind,
    Peer,
)
from services.worker.kvcache.lending import LentPart

NUM_HEADS = 6
MAX_ROWS = 512
DEADLINE_S = 10.0
MOVE = MoveId(77)


@cache
def certificates() -> tuple[tempfile.TemporaryDirectory[str], TlsFiles]:
    """Of a cluster made up for the tests, and the folder, which lives as long as they run."""
    folder = tempfile.TemporaryDirectory(prefix="dp-tls-")
    return folder, issue(trustme.CA(), Path(folder.name))


def transport_for(address: str, pool: torch.Tensor | None = None) -> Transport:
    """`pool`: what others may read where the address is one-sided."""
    if address.startswith("nixl:"):
        return Transport(pool=OneSidedPool(tensor_bytes(pool)) if pool is not None else reader())
    return Transport(certificates()[1] if address.startswith("tls:") else None)


@cache
def reader() -> OneSidedPool:
    """Of an end that offers nothing."""
    return OneSidedPool(memoryview(bytearray(1 << 16)))


def borrowing_from(
    creditor: Peer, me: Peer, geometry: Geometry, deadline_s: float = DEADLINE_S
) -> Borrowing:
    return Borrowing(me, geometry, transport_for(creditor.data_address), deadline_s)


def socket_of(stream: Stream) -> socket.socket:
    """For saying what no stream would."""
    return cast(SocketStream, stream)._sock


def move_of(req_id: int) -> MoveId:
    """One move a request; the first request's is MOVE."""
    return MoveId(MOVE - 1 + req_id)


def owner_peer(inst_id: int = 1) -> Peer:
    return Peer(InstId(inst_id), Incarnation(1000 + inst_id), "")


def new_pool(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """12 blocks of 2 layers, 2 KV heads, 16 tokens, 64 values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 2, 2, 2, 16, 64, generator=generator).to(dtype)


def new_query(num_rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, NUM_HEADS, 64, generator=torch.Generator().manual_seed(seed))


def computed(
    q: torch.Tensor, pool: torch.Tensor, layer: int, parts: list[tuple[int, list[int]]]
) -> AttentionPartial:
    """What one call of the kernel on this side says; `parts` are (rows, blocks)."""
    rows = PagedRows.build(
        [num_rows for num_rows, _ in parts],
        [blocks for _, blocks in parts],
        [16 * len(blocks) for _, blocks in parts],
        causal=False,
        num_blocks=pool.shape[0],
        block_size=16,
    )
    out = AttentionPartial.allocate(*q.shape)
    ReferenceKernels().micro_attention(q, pool, layer, rows, out)
    return out


def assert_same(left: AttentionPartial, right: AttentionPartial) -> None:
    for name in ("acc", "max", "sum"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


@dataclass
class FakeLender:
    """Lends what a test writes into it, and remembers what is pinned."""

    parts: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)
    moves: dict[int, list[int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    pins: Counter[int] = field(default_factory=Counter)
    received: SimpleQueue[tuple[int, int, bool]] = field(default_factory=SimpleQueue)

    def lend(self, owner: Peer, req_id: int, block_ids: list[int]) -> None:
        self.parts[(owner.incarnation, (move_of(req_id),))] = block_ids

    def begin_receive(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_id: MoveId,
        index: int,
    ) -> int:
        try:
            return self.moves[move_id][index]
        except LookupError:
            raise PartLost(InstId(2), f"no move {move_id}") from None

    def end_receive(self, move_id: MoveId, index: int, ok: bool) -> None:
        self.received.put((move_id, index, ok))

    def open_part(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_ids: tuple[MoveId, ...],
    ) -> LentPart:
        block_ids = self.parts.get((owner_incarnation, move_ids))
        if block_ids is None:
            raise PartLost(InstId(2), f"no moves {move_ids}")
        return LentPart((), block_ids)

    def begin_use(self, part: LentPart) -> None:
        if self.gone.intersection(part.block_ids):
            raise PartLost(InstId(2), "the lease ended")
        self.pins.update(part.block_ids)

    def end_use(self, part: LentPart) -> None:
        self.pins.subtract(part.block_ids)


class Creditor:
    """A running CreditorServer with everything around it."""

    def __init__(
        self,
        address: str,
        pool: torch.Tensor,
        max_connections: int = 64,
        kernels: Kernels | None = None,
    ) -> None:
        self.pool = pool
        self.lender = FakeLender()
        self.registry = CollectorRegistry()
        self.geometry = geometry_of(pool, NUM_HEADS)
        self.metrics = DataPlaneMetrics(self.registry)
        serving = Serving(
            Peer(InstId(2), Incarnation(2002), address),
            self.geometry,
            self.lender,
            pool,
            kernels or ReferenceKernels(),
            self.metrics.creditor,
        )
        self.server = CreditorServer(
            address, serving, transport_for(address, pool), max_connections
        )
        self.peer = Peer(InstId(2), Incarnation(2002), self.server.address)
        self.server.start()

    def channel(self, me: Peer, creditor: Peer | None = None) -> CreditorChannel:
        return CreditorChannel(self._borrowing(me), creditor or self.peer, MAX_ROWS)

    def sender(self, me: Peer) -> BlockSender:
        return BlockSender(self._borrowing(me), self.peer)

    def fetcher(self, me: Peer) -> BlockFetcher:
        return BlockFetcher(self._borrowing(me), self.peer)

    def _borrowing(self, me: Peer) -> Borrowing:
        plain = borrowing_from(self.peer, me, self.geometry)
        return replace(plain, metrics=self.metrics.debtor)

    def count(self, name: str, side: str) -> float | None:
        return self.registry.get_sample_value(f"infinite_llm_{name}_total", {"side": side})


class RawOwner:
    """An owner that may say anything."""

    def __init__(self, creditor: Creditor, is_greeting: bool = True) -> None:
        address = creditor.peer.data_address
        self.stream = transport_for(address).connect(address, DEADLINE_S)
        self.sock = socket_of(self.stream)
        if is_greeting:
            self.say(Head(Kind.HELLO), greeting(creditor))
            assert self.stream.receive_head().kind is Kind.WELCOME

    def say(self, head: Head, payload: bytes | memoryview = b"") -> None:
        self.stream.send(head, payload)

    def hear_error(self) -> tuple[int, str]:
        """The ERROR that comes, after which the creditor must have hung up."""
        head = self.stream.receive_head()
        assert head.kind is Kind.ERROR
        text = self.stream.receive_bytes(head.payload_bytes).decode()
        self.hang_up()
        return head.item, text

    def hang_up(self) -> None:
        """Ends in the middle of whatever was said, and waits until the creditor has noticed."""
        socket.socket.shutdown(self.sock, socket.SHUT_WR)
        with suppress(ssl.SSLError):  # TLS complains about it
            assert self.sock.recv(1) == b""
        self.sock.close()


def greeting(creditor: Creditor, geometry: Geometry | None = None, max_rows: int = 8) -> bytes:
    me, peer = owner_peer(), creditor.peer
    return Hello(
        me.inst_id,
        me.incarnation,
        peer.inst_id,
        peer.incarnation,
        geometry or creditor.geometry,
        max_rows,
    ).pack()


def message(head: Head, payload: bytes = b"") -> bytes:
    return head._replace(payload_bytes=len(payload)).pack() + payload


def take(sock: socket.socket, num_messages: int) -> None:
    """Reads whole messages and forgets them."""
    for _ in range(num_messages):
        head = Head.unpack(_take_bytes(sock, HEAD_BYTES))
        _take_bytes(sock, head.payload_bytes)


def _take_bytes(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += sock.recv(num_bytes - len(data))
    return data


class ScriptedCreditor:
    """Welcomes one owner, then does what the script says with the connection."""

    def __init__(self, address: str, script: Callable[[socket.socket], None]) -> None:
        self._listener = transport_for(address).listen(address, DEADLINE_S)
        self.peer = Peer(InstId(2), Incarnation(2002), self._listener.address)
        self._script = script
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with socket_of(self._listener.accept()) as sock:
            take(sock, 1)
            sock.sendall(message(Head(Kind.WELCOME)))
            with suppress(ConnectionError, ssl.SSLError):  # the owner may hang up before the end
                self._script(sock)

    def join(self) -> None:
        self._thread.join()
        self._listener.close()
