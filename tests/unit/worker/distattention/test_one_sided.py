"""What NIXL adds: blocks are read from the sender's pool, and nothing else is different."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch

from services.common.errors import ConfigError, PartLost
from services.worker.distattention.link import Borrowing
from services.worker.distattention.memory import geometry_of, tensor_bytes
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.transport.one_sided_pool import OneSidedPool
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.wire import Peer
from tests.unit.worker.distattention.pieces import (
    DEADLINE_S,
    MOVE,
    NUM_HEADS,
    Creditor,
    new_pool,
    owner_peer,
)

ME = owner_peer()


def test_without_its_agent_no_such_address_is_used() -> None:
    with pytest.raises(ConfigError, match="needs NIXL"):
        Transport().listen("nixl:127.0.0.1:0", 1.0)
    with pytest.raises(OSError, match="needs NIXL"):
        Transport().connect("nixl:127.0.0.1:1", 1.0)


def serve(told: Connection) -> None:
    """A creditor in a process of its own; tells at last what it has."""
    creditor = Creditor("nixl:127.0.0.1:0", new_pool(seed=6))
    creditor.lender.moves[MOVE] = [4, 9, 0]
    creditor.lender.lend(ME, 1, [2, 5])
    told.send(creditor.peer)
    told.recv()
    told.send(creditor.pool[[4, 9, 0]].numpy())
    creditor.server.stop()


@pytest.fixture
def owner_pool() -> torch.Tensor:
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    return new_pool(seed=5)


@dataclass
class Remote:
    process: multiprocessing.process.BaseProcess
    told: Connection
    peer: Peer


@pytest.fixture
def remote(owner_pool: torch.Tensor) -> Iterator[Remote]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    yield Remote(process, here, here.recv())
    process.kill()
    process.join(DEADLINE_S)


def borrowing(pool: torch.Tensor, deadline_s: float = DEADLINE_S) -> Borrowing:
    transport = Transport(pool=OneSidedPool(tensor_bytes(pool)))
    return Borrowing(ME, geometry_of(pool, NUM_HEADS), transport, deadline_s)


def blocks_of(pool: torch.Tensor) -> list[memoryview]:
    size = geometry_of(pool, NUM_HEADS).block_bytes
    return [tensor_bytes(pool)[i * size : (i + 1) * size] for i in range(pool.shape[0])]


def test_two_processes_read_each_other_s_blocks(remote: Remote, owner_pool: torch.Tensor) -> None:
    common = borrowing(owner_pool)
    sender, fetcher = BlockSender(common, remote.peer), BlockFetcher(common, remote.peer)
    sender.send_blocks(MOVE, blocks_of(owner_pool)[:3])
    target = torch.zeros_like(owner_pool)
    fetcher.fetch_blocks(MOVE, [blocks_of(target)[0], blocks_of(owner_pool)[11]])
    theirs = new_pool(seed=6)
    assert torch.equal(target[0], theirs[2])
    assert torch.equal(owner_pool[11], theirs[5])
    remote.told.send(None)
    assert torch.equal(torch.from_numpy(remote.told.recv()), new_pool(seed=5)[:3])
    sender.close()
    fetcher.close()
    remote.process.join(DEADLINE_S)
    assert remote.process.exitcode == 0


def test_a_creditor_that_is_killed_keeps_no_owner_waiting(
    remote: Remote, owner_pool: torch.Tensor
) -> None:
    common = borrowing(owner_pool, deadline_s=1.0)
    sender, fetcher = BlockSender(common, remote.peer), BlockFetcher(common, remote.peer)
    sender.send_block(MOVE, 0, blocks_of(owner_pool)[0])
    assert remote.process.pid is not None
    os.kill(remote.process.pid, signal.SIGKILL)
    remote.process.join(DEADLINE_S)
    started = time.monotonic()
    with pytest.raises(PartLost):
        sender.send_block(MOVE, 1, blocks_of(owner_pool)[1])
    with pytest.raises(PartLost):
        fetcher.fetch_blocks(MOVE, blocks_of(owner_pool)[:2])
    assert time.monotonic() - started < 4.0


def test_memory_that_is_not_there_is_an_os_error(owner_pool: torch.Tensor) -> None:
    here, there = OneSidedPool(tensor_bytes(owner_pool)), OneSidedPool(tensor_bytes(new_pool()))
    name, landing = here.learn(there.metadata), here.land(4096)
    with pytest.raises(OSError, match="NIXL"):
        here.read(name, 4096, memoryview(bytearray(4096)), landing, DEADLINE_S)
    with pytest.raises(OSError, match="NIXL"):
        here.learn(b"nonsense")


def test_a_refusal_reaches_an_owner_that_waits_to_be_read(owner_pool: torch.Tensor) -> None:
    creditor = Creditor("nixl:127.0.0.1:0", new_pool(seed=6))
    sender = BlockSender(borrowing(owner_pool), creditor.peer)
    with pytest.raises(PartLost, match="no move"):
        sender.send_blocks(MOVE, blocks_of(owner_pool)[:6])
    creditor.server.stop()
