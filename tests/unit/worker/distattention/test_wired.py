"""A step whose layers the C++ kernels exchange by themselves: the same numbers, the same errors."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import kernels
from kernels import DecoderShape, LayerWeights, PagedRows, StepKv
from kernels.decoder import Decoder
from services.common.errors import PartLost
from services.common.ids import ReqId
from services.worker.distattention.debtor import CreditorChannel, Peer, RemotePart
from services.worker.distattention.memory import geometry_of
from services.worker.distattention.wire import ErrorCode, Head, Kind
from services.worker.engine.attention import ChannelPool, RemoteAttention, lent_rows
from tests.unit.worker.distattention.pieces import (
    MAX_ROWS,
    NUM_HEADS,
    Creditor,
    ScriptedCreditor,
    borrowing_from,
    message,
    move_of,
    new_pool,
    owner_peer,
    take,
)

ME = owner_peer()
GEOMETRY = geometry_of(new_pool(), NUM_HEADS)
SHORT_S = 0.2
SHAPE = DecoderShape(64, 96, NUM_HEADS, 2, 64, 1e-5)
NATIVE = kernels.select("cpu", 1)
NUM_ROWS = 3
ROWS_THAT_ASK = {1: 2, 2: 0}
"""By request: which row of the step it is."""


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) / 8


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    builder = kernels.select_decoder(NATIVE, SHAPE, torch.float32, torch.device("cpu"))
    for layer in range(2):
        matrices = {
            name: random(num_out, num_in, seed=layer)
            for name, num_out, num_in in (
                ("qkv", SHAPE.q_size + 2 * SHAPE.kv_size, 64),
                ("attention_out", 64, SHAPE.q_size),
                ("gate", 96, 64),
                ("up", 96, 64),
                ("down", 64, 96),
            )
        }
        builder.add_layer(
            LayerWeights(attention_norm=torch.ones(64), mlp_norm=torch.ones(64), **matrices)
        )
    return builder.build(torch.ones(64), random(11, 64, seed=5))


@pytest.fixture
def creditor(address: str) -> Iterator[Creditor]:
    with ExitStack() as stack:
        running = Creditor(address, new_pool(), kernels=NATIVE)
        stack.callback(running.server.stop)
        for req_id, blocks in ((1, [3, 0, 7]), (2, [11])):
            running.lender.lend(ME, req_id, blocks)
        yield running


class Owner:
    """A decoder and its channel to one creditor."""

    def __init__(self, decoder: Decoder, channel: CreditorChannel, creditor: Peer) -> None:
        self._decoder = decoder
        self.channels = ChannelPool(lambda _: channel)
        self.channels.learn(creditor)
        self.attention = RemoteAttention(NATIVE, self.channels)
        holder = (creditor.inst_id, creditor.incarnation)
        self._remote = lent_rows(
            [
                (RemotePart(ReqId(req_id), (move_of(req_id),), 1), holder, row)
                for req_id, row in ROWS_THAT_ASK.items()
            ]
        )

    def step(self) -> torch.Tensor:
        self.attention.begin(self._remote)
        rows = PagedRows.build(
            [1] * NUM_ROWS, [[0], [1], [2]], [4, 5, 6],
            causal=True, num_blocks=3, block_size=16,
        )  # fmt: skip
        pool = random(3, 2, 2, 2, 16, 64, seed=6)
        hidden = random(NUM_ROWS, 64, seed=7)
        cos, sin = random(NUM_ROWS, 32, seed=8).cos(), random(NUM_ROWS, 32, seed=8).sin()
        slots = torch.tensor([3, 20, 37])
        self._decoder.run(hidden, cos, sin, StepKv(pool, slots, rows), self.attention)
        return hidden


@pytest.fixture
def owner(decoder: Decoder, creditor: Creditor) -> Iterator[Owner]:
    owner = Owner(decoder, creditor.channel(ME), creditor.peer)
    yield owner
    owner.channels.close()


def test_the_numbers_are_those_of_one_layer_after_the_other(
    owner: Owner, creditor: Creditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [owner.step(), owner.step()]
    monkeypatch.setattr(RemoteAttention, "wired", lambda _: None)
    assert torch.equal(at_once[0], owner.step()) and torch.equal(at_once[1], at_once[0])
    owner.channels.close()
    creditor.server.stop()
    assert not creditor.lender.pins.total()
    for side in ("creditor", "debtor"):
        assert creditor.count("remote_queries", side) == 3 * 2
        assert creditor.count("remote_query_rows", side) == 3 * 2 * len(ROWS_THAT_ASK)


def test_a_part_that_is_gone_is_lost(owner: Owner, creditor: Creditor) -> None:
    owner.step()
    creditor.lender.gone.add(11)
    with pytest.raises(PartLost, match="instance 2: PART_LOST: the lease ended"):
        owner.step()
    with pytest.raises(PartLost, match="closed"):
        owner.step()


def test_a_step_given_up_midway_does_not_confuse_the_next(owner: Owner, creditor: Creditor) -> None:
    """As when another creditor was lost after this one had been asked."""
    expected = owner.step()
    channel = owner.channels.get((creditor.peer.inst_id, creditor.peer.incarnation))
    part = RemotePart(ReqId(1), (move_of(1),), 1)
    channel.begin_step([part])
    channel.send_query(0, random(1, NUM_HEADS, 64, seed=1))
    assert torch.equal(owner.step(), expected)


def answers_another_layer(sock: socket.socket) -> None:
    take(sock, 2)
    sock.sendall(message(Head(Kind.PARTIAL, 1, 2, 1), bytes(GEOMETRY.partial_bytes(2))))
    sock.recv(1)


def refuses(sock: socket.socket) -> None:
    take(sock, 2)
    sock.sendall(message(Head(Kind.ERROR, ErrorCode.INTERNAL), b"it failed"))
    sock.recv(1)


def hangs_up(sock: socket.socket) -> None:
    take(sock, 2)


def is_silent(sock: socket.socket) -> None:
    take(sock, 2)
    sock.recv(1)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (answers_another_layer, "BAD_MESSAGE"),
        (refuses, "INTERNAL: it failed"),
        (hangs_up, "closed|reset"),
        (is_silent, "timed out|within"),
    ],
)
def test_a_creditor_that_fails_is_lost(
    decoder: Decoder, address: str, script: Callable[[socket.socket], None], text: str
) -> None:
    creditor = ScriptedCreditor(address, script)
    borrowing = borrowing_from(creditor.peer, ME, GEOMETRY, SHORT_S)
    owner = Owner(decoder, CreditorChannel(borrowing, creditor.peer, MAX_ROWS), creditor.peer)
    with pytest.raises(PartLost, match=f"instance 2: .*({text})"):
        owner.step()
    owner.channels.close()
    creditor.join()
