import threading
from queue import SimpleQueue

import pytest
import torch

from services.common.errors import InternalError, PartLost
from services.common.ids import MoveId
from services.worker.distattention.memory import geometry_of, tensor_bytes
from services.worker.distattention.transport.socket_stream import SocketStream
from services.worker.distattention.wire import ErrorCode, Head, Kind
from tests.unit.worker.distattention.pieces import (
    DEADLINE_S,
    MOVE,
    NUM_HEADS,
    Creditor,
    RawOwner,
    message,
    new_pool,
    owner_peer,
)

ME = owner_peer()


def blocks_of(pool: torch.Tensor) -> list[memoryview]:
    size = geometry_of(pool, NUM_HEADS).block_bytes
    whole = tensor_bytes(pool)
    return [whole[i * size : (i + 1) * size] for i in range(pool.shape[0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_arrive_bit_for_bit(address: str, dtype: torch.dtype) -> None:
    source, creditor = new_pool(dtype, seed=5), Creditor(address, new_pool(dtype, seed=6))
    before = creditor.pool.clone()
    creditor.lender.moves[MOVE] = [4, 9, 0, 2, 6, 11, 8]
    sender = creditor.sender(ME)
    blocks = blocks_of(source)
    sender.send_block(MOVE, 0, blocks[10])
    sender.send_blocks(MOVE, blocks[:6], first_index=1)
    for here, there in zip([10, 0, 1, 2, 3, 4, 5], creditor.lender.moves[MOVE], strict=True):
        assert torch.equal(source[here], creditor.pool[there])
    for untouched in (1, 3, 5, 7, 10):
        assert torch.equal(before[untouched], creditor.pool[untouched])
    assert [creditor.lender.received.get(timeout=5) for _ in range(7)] == [
        (MOVE, index, True) for index in range(7)
    ]
    sender.close()
    creditor.server.stop()
    assert creditor.count("blocks_copied", "debtor") == 7
    assert creditor.count("blocks_copied", "creditor") == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_come_back_bit_for_bit(address: str, dtype: torch.dtype) -> None:
    owner, creditor = new_pool(dtype, seed=5), Creditor(address, new_pool(dtype, seed=6))
    before, lent = owner.clone(), [4, 9, 0, 2, 6, 11, 8]
    creditor.lender.lend(ME, 1, lent)
    blocks, taken = blocks_of(owner), [3, 1, 0, 5, 9, 10, 7]
    fetcher = creditor.fetcher(ME)
    fetcher.fetch_blocks(MOVE, [blocks[i] for i in taken[:6]])
    fetcher.fetch_blocks(MOVE, [blocks[taken[6]]], first_index=6)
    fetcher.close()
    creditor.server.stop()
    for here, there in zip(taken, lent, strict=True):
        assert torch.equal(owner[here], creditor.pool[there])
    for untouched in (2, 4, 6, 8, 11):
        assert torch.equal(before[untouched], owner[untouched])
    assert not creditor.lender.pins.total()
    assert creditor.count("blocks_copied", "debtor") == 7
    assert creditor.count("blocks_copied", "creditor") == 7


def test_a_block_stays_pinned_until_it_is_sent(
    creditor: Creditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    creditor.lender.lend(ME, 1, [3])
    owner = RawOwner(creditor)
    pinned: SimpleQueue[int] = SimpleQueue()
    send = type(owner.stream).send

    def watched(stream: SocketStream, head: Head, payload: bytes | memoryview = b"") -> None:
        if head.kind is Kind.BLOCK:
            pinned.put(creditor.lender.pins[3])
        send(stream, head, payload)
        if head.kind is Kind.BLOCK:
            pinned.put(creditor.lender.pins[3])

    monkeypatch.setattr(type(owner.stream), "send", watched)
    owner.say(Head(Kind.FETCH, 0, 0, MOVE))
    owner.stream.receive_bytes(owner.stream.receive_head().payload_bytes)
    assert [pinned.get(timeout=DEADLINE_S) for _ in range(2)] == [1, 1]
    creditor.server.stop()
    assert not creditor.lender.pins.total()
    owner.sock.close()


def test_an_owner_that_fetches_and_never_reads_can_be_cut_off(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    owner = RawOwner(creditor)
    owner.sock.sendall(message(Head(Kind.FETCH, 0, 0, MOVE)) * 100)
    creditor.server.stop()
    assert not creditor.lender.pins.total()
    owner.sock.close()


@pytest.mark.parametrize("end", ["released before", "ended since"])
def test_a_part_that_is_not_held_cannot_be_fetched(creditor: Creditor, end: str) -> None:
    if end == "ended since":
        creditor.lender.lend(ME, 1, [3])
        creditor.lender.gone.add(3)
    target = torch.zeros_like(creditor.pool)
    fetcher = creditor.fetcher(ME)
    with pytest.raises(PartLost, match="PART_LOST"):
        fetcher.fetch_blocks(MOVE, blocks_of(target))
    assert not target.any()


def test_another_owner_s_block_cannot_be_fetched(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    fetcher = creditor.fetcher(owner_peer(7))
    with pytest.raises(PartLost, match="PART_LOST"):
        fetcher.fetch_blocks(MOVE, blocks_of(new_pool())[:1])


def test_blocks_go_there_and_back_at_once(creditor: Creditor) -> None:
    creditor.lender.moves[MOVE] = list(range(6))
    creditor.lender.lend(ME, 1, list(range(6, 12)))
    source, target = new_pool(seed=8), torch.zeros_like(creditor.pool)
    sender, fetcher = creditor.sender(ME), creditor.fetcher(ME)
    fetching = threading.Thread(target=fetcher.fetch_blocks, args=(MOVE, blocks_of(target)[:6]))
    fetching.start()
    sender.send_blocks(MOVE, blocks_of(source)[:6])
    fetching.join()
    assert torch.equal(creditor.pool[:6], source[:6])
    assert torch.equal(creditor.pool[6:], target[:6])
    sender.close()
    fetcher.close()


def test_no_blocks_are_no_work(creditor: Creditor) -> None:
    sender, fetcher = creditor.sender(ME), creditor.fetcher(ME)
    sender.send_blocks(MOVE, [])
    fetcher.fetch_blocks(MOVE, [])
    sender.close()
    fetcher.close()
    assert creditor.lender.received.empty()


def test_a_bad_checksum_is_refused(creditor: Creditor) -> None:
    creditor.lender.moves[MOVE] = [3]
    owner = RawOwner(creditor)
    owner.say(Head(Kind.COPY, 0, 12345, MOVE), bytes(creditor.geometry.block_bytes))
    code, text = owner.hear_error()
    assert code == ErrorCode.BAD_CHECKSUM
    assert "checksum" in text
    assert creditor.lender.received.get(timeout=5) == (MOVE, 0, False)


def test_a_move_that_ends_midway_is_lost_and_the_sender_learns_why(creditor: Creditor) -> None:
    creditor.lender.moves[MOVE] = [3, 4]
    sender = creditor.sender(ME)
    blocks = blocks_of(new_pool(seed=8))
    # Longer than the window, so that blocks are under way behind the refused one.
    with pytest.raises(PartLost, match=f"PART_LOST: no move {MOVE}"):
        sender.send_blocks(MOVE, blocks)
    with pytest.raises(PartLost, match="closed"):
        sender.send_block(MOVE, 0, blocks[0])
    fresh = creditor.sender(ME)
    fresh.send_block(MOVE, 0, blocks[0])
    fresh.close()


def test_an_unknown_move_is_refused(creditor: Creditor) -> None:
    sender = creditor.sender(ME)
    with pytest.raises(PartLost, match="no move 404"):
        sender.send_block(MoveId(404), 0, blocks_of(creditor.pool)[0])
    assert creditor.count("data_plane_failures", "debtor") == 1
    assert creditor.count("data_plane_failures", "creditor") == 1


def test_a_block_of_another_size_is_not_sent(creditor: Creditor) -> None:
    creditor.lender.moves[MOVE] = [3]
    sender = creditor.sender(ME)
    blocks = blocks_of(new_pool(seed=8))
    with pytest.raises(InternalError, match="a block of"):
        sender.send_block(MOVE, 0, blocks[0][:-4])
    sender.send_block(MOVE, 0, blocks[0])
    sender.close()
    fetcher = creditor.fetcher(ME)
    with pytest.raises(InternalError, match="a block of"):
        fetcher.fetch_blocks(MOVE, [blocks[0], blocks[1][:-4]])
    fetcher.close()


def test_a_block_cut_off_midway_is_not_taken(creditor: Creditor) -> None:
    creditor.lender.moves[MOVE] = [3]
    owner = RawOwner(creditor)
    head = Head(Kind.COPY, 0, 0, MOVE, creditor.geometry.block_bytes)
    owner.sock.sendall(head.pack() + bytes(1000))
    owner.hang_up()
    assert creditor.lender.received.get(timeout=5) == (MOVE, 0, False)


def test_two_sources_at_once(creditor: Creditor) -> None:
    creditor.lender.moves = {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8, 9, 10, 11]}
    source = new_pool(seed=11)
    blocks = blocks_of(source)

    def send(move_id: int) -> None:
        sender = creditor.sender(owner_peer(move_id))
        sender.send_blocks(MoveId(move_id), blocks[6 * (move_id - 1) : 6 * move_id])
        sender.close()

    threads = [threading.Thread(target=send, args=(move_id,)) for move_id in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(source, creditor.pool)
