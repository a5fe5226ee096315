"""Parts on sockets: queries and partials of all layers without Python between them."""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kernels import AttentionPartial, Exchanged, PagedRows, WiredPart
from kernels.native.kernels import NativeKernels
from kernels.wire import LayerHeads

NUM_LAYERS, NUM_HEADS, DIM, NUM_ROWS = 3, 6, 24, 2
QUERY_BYTES = 4 * NUM_ROWS * NUM_HEADS * DIM
PARTIAL_VALUES = NUM_ROWS * NUM_HEADS * (DIM + 2)
SHORT_S = 0.05


def heads(kind: int) -> LayerHeads:
    """Eight bytes that name the kind and the layer."""
    return np.array([[kind] * 7 + [layer] for layer in range(NUM_LAYERS)], np.uint8)


QUERIES, ANSWERS = heads(1), heads(2)


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


POOL = random(5, NUM_LAYERS, 2, 2, 16, DIM, seed=0)


def new_rows() -> PagedRows:
    return PagedRows.build(
        [1, 1], [[4, 0], [2]], [32, 16], causal=False, num_blocks=len(POOL), block_size=16
    )


class Asker:
    """The end that owns the rows, by hand; the other end answers on a thread."""

    def __init__(self, kernels: NativeKernels, timeout_s: float = 10.0) -> None:
        self.mine, self._theirs = socket.socketpair()
        limit = struct.pack("@ll", 0, int(timeout_s * 1e6)) if timeout_s < 1 else bytes(16)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._kernels, self._timeout_s = kernels, timeout_s
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.mine.close()
        self._thread.shutdown()
        self._theirs.close()

    def answering(self, first: int = 0, patience_s: float = 10.0) -> None:
        self._done = self._thread.submit(self._answer, first, patience_s)

    def result(self) -> Exchanged:
        return self._done.result(10.0)

    def say(self, layer: int, query: torch.Tensor) -> None:
        self.mine.sendall(QUERIES[layer].tobytes() + query.numpy().tobytes())

    def hear(self, layer: int) -> torch.Tensor:
        size = 8 + 4 * PARTIAL_VALUES
        data = b""
        while len(data) < size:
            data += self.mine.recv(size - len(data))
        assert data[:8] == ANSWERS[layer].tobytes()
        return torch.frombuffer(bytearray(data[8:]), dtype=torch.float32)

    def _answer(self, first: int, patience_s: float) -> Exchanged:
        part = WiredPart(
            self._theirs.fileno(),
            self._timeout_s,
            ANSWERS,
            QUERIES,
            torch.empty(NUM_ROWS, NUM_HEADS, DIM),
            torch.empty(PARTIAL_VALUES),
        )
        return self._kernels.answer_layers(part, POOL, new_rows(), first, patience_s)


@pytest.fixture
def asker(native: NativeKernels) -> Iterator[Asker]:
    asker = Asker(native)
    yield asker
    asker.close()


def expected(kernels: NativeKernels, layer: int, query: torch.Tensor) -> torch.Tensor:
    out = AttentionPartial.allocate(NUM_ROWS, NUM_HEADS, DIM)
    kernels.micro_attention(query, POOL, layer, new_rows(), out)
    return torch.cat([out.acc.flatten(), out.max.flatten(), out.sum.flatten()])


@pytest.mark.parametrize("first", [0, 2])
def test_every_layer_is_answered_as_one_call_would(
    native: NativeKernels, asker: Asker, first: int
) -> None:
    asker.answering(first)
    for layer in range(first, NUM_LAYERS):
        query = random(NUM_ROWS, NUM_HEADS, DIM, seed=layer)
        asker.say(layer, query)
        assert torch.equal(asker.hear(layer), expected(native, layer, query))
    done = asker.result()
    assert done.num_sent == done.num_received == NUM_LAYERS - first and not done.has_failed


def test_who_is_asked_no_more_goes_on_with_something_else(asker: Asker) -> None:
    asker.answering(patience_s=SHORT_S)
    asker.say(0, random(NUM_ROWS, NUM_HEADS, DIM, seed=0))
    asker.hear(0)
    done = asker.result()
    assert (done.num_received, done.has_failed) == (1, False)
    assert done.waited_s >= SHORT_S


def test_another_message_is_handed_over(asker: Asker) -> None:
    asker.answering()
    asker.mine.sendall(QUERIES[1].tobytes())
    done = asker.result()
    assert (done.num_received, done.head) == (0, QUERIES[1].tobytes())


def test_a_closed_socket_is_told(asker: Asker) -> None:
    asker.answering()
    asker.mine.sendall(QUERIES[0].tobytes() + b"half a query")
    asker.mine.shutdown(socket.SHUT_RDWR)
    assert isinstance(asker.result().error, ConnectionResetError)


def test_a_peer_that_trickles_is_given_up(native: NativeKernels) -> None:
    asker = Asker(native, timeout_s=SHORT_S)
    asker.answering()
    asker.mine.sendall(QUERIES[0].tobytes() + b"a")
    assert isinstance(asker.result().error, TimeoutError)
    asker.close()
