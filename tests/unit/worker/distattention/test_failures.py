"""Whatever the other side does, it costs one connection: an error or PartLost, never a hang."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId, ReqId
from services.worker.distattention.connection import MAX_ROWS
from services.worker.distattention.debtor import CreditorChannel, Peer, RemotePart
from services.worker.distattention.link import Borrowing
from services.worker.distattention.memory import geometry_of
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.wire import ErrorCode, Head, Kind, KvDtype, pack_parts
from tests.unit.worker.distattention.pieces import (
    DEADLINE_S,
    MOVE,
    NUM_HEADS,
    Creditor,
    RawOwner,
    ScriptedCreditor,
    assert_same,
    borrowing_from,
    computed,
    greeting,
    message,
    new_pool,
    new_query,
    owner_peer,
    take,
    transport_for,
)

ME = owner_peer()
PARTS = [RemotePart(ReqId(1), (MOVE,), 2)]
GEOMETRY = geometry_of(new_pool(), NUM_HEADS)
BLOCK = memoryview(bytes(GEOMETRY.block_bytes))


def borrowing(creditor: Peer, deadline_s: float = DEADLINE_S) -> Borrowing:
    return borrowing_from(creditor, ME, GEOMETRY, deadline_s)


def still_serves(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    channel = creditor.channel(ME)
    channel.begin_step(PARTS)
    q = new_query(2)
    channel.send_query(0, q)
    assert_same(channel.receive_partial(0), computed(q, creditor.pool, 0, [(2, [3])]))
    channel.close()


# -- a wrong owner ---------------------------------------------------------------------------------


def test_another_incarnation_is_not_served(creditor: Creditor) -> None:
    for stale in (
        dataclasses.replace(creditor.peer, incarnation=Incarnation(1)),
        dataclasses.replace(creditor.peer, inst_id=InstId(3)),
    ):
        with pytest.raises(PartLost, match="MISMATCH: in"):
            creditor.channel(ME, stale)
    still_serves(creditor)


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 3}, {"num_kv_heads": 3}, {"block_size": 32}, {"kv_dtype": KvDtype.FLOAT16}],
)
def test_another_geometry_is_not_served(creditor: Creditor, change: dict[str, Any]) -> None:
    other = dataclasses.replace(GEOMETRY, **change)
    with pytest.raises(PartLost, match="MISMATCH: geometry"):
        BlockSender(borrowing_from(creditor.peer, ME, other), creditor.peer)
    still_serves(creditor)


def test_more_rows_than_the_creditor_takes_are_refused_at_once(creditor: Creditor) -> None:
    with pytest.raises(PartLost, match=f"takes {MAX_ROWS} rows"):
        CreditorChannel(borrowing(creditor.peer), creditor.peer, MAX_ROWS + 1)


def plan(num_rows: int) -> bytes:
    parts = pack_parts([RemotePart(ReqId(1), (MOVE,), num_rows)])
    return message(Head(Kind.PLAN, 1, num_rows, 1), parts)


QUERY = bytes(GEOMETRY.query_bytes(2))
WRONG = {
    "query without plan": message(Head(Kind.QUERY, 0, 2, 1), QUERY),
    "wrong layer": plan(2) + message(Head(Kind.QUERY, 2, 2, 1), QUERY),
    "wrong step": plan(2) + message(Head(Kind.QUERY, 0, 2, 9), QUERY),
    "more rows": plan(2) + message(Head(Kind.QUERY, 0, 3, 1), bytes(GEOMETRY.query_bytes(3))),
    "fewer bytes": plan(2) + message(Head(Kind.QUERY, 0, 2, 1), QUERY[:-4]),
    "plan with too many rows": plan(9),
    "plan of nothing": message(Head(Kind.PLAN, 0, 0, 1)),
    "plan that contradicts itself": message(Head(Kind.PLAN, 1, 3, 1), pack_parts(PARTS)),
    "plan cut short": message(Head(Kind.PLAN, 1, 2, 1), pack_parts(PARTS)[:-1]),
    "short block": message(Head(Kind.COPY, 0, 0, MOVE), bytes(100)),
    "block beyond the move": message(Head(Kind.FETCH, 1, 0, MOVE)),
    "block unasked": message(Head(Kind.BLOCK, 0, 0, MOVE), bytes(BLOCK)),
    "second greeting": message(Head(Kind.HELLO), bytes(8)),
    "an answer": message(Head(Kind.ACK, 0, 0, MOVE)),
    "garbage": bytes(range(256)),
    "oversized": Head(Kind.PLAN, 1, 1, 1, 1 << 40).pack(),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_message_is_refused_and_others_are_served(creditor: Creditor, wrong: bytes) -> None:
    creditor.lender.lend(ME, 1, [3])
    creditor.lender.moves[MOVE] = [4]
    owner = RawOwner(creditor)
    owner.sock.sendall(wrong)
    code, text = owner.hear_error()
    assert code == ErrorCode.BAD_MESSAGE
    assert text
    still_serves(creditor)


def test_a_stranger_is_refused(creditor: Creditor) -> None:
    for first in (b"GET / HTTP/1.1\r\nHost: creditor\r\n\r\n", Head(Kind.ACK).pack()):
        owner = RawOwner(creditor, is_greeting=False)
        owner.sock.sendall(first)
        assert owner.hear_error()[0] == ErrorCode.BAD_MESSAGE
    still_serves(creditor)


def test_a_failing_kernel_is_told(creditor: Creditor, caplog: pytest.LogCaptureFixture) -> None:
    creditor.lender.lend(ME, 1, [999])
    channel = creditor.channel(ME)
    channel.begin_step(PARTS)
    with pytest.raises(PartLost, match="INTERNAL"):
        channel.send_query(0, new_query(2))
        channel.receive_partial(0)
    assert "connection failed" in caplog.text
    assert creditor.count("data_plane_failures", "creditor") == 1
    still_serves(creditor)


def cut_greeting(creditor: Creditor) -> RawOwner:
    owner = RawOwner(creditor, is_greeting=False)
    owner.sock.sendall(message(Head(Kind.HELLO), greeting(creditor))[:50])
    return owner


def cut_plan(creditor: Creditor) -> RawOwner:
    owner = RawOwner(creditor)
    owner.sock.sendall(plan(2)[:20])
    return owner


def cut_query(creditor: Creditor) -> RawOwner:
    owner = RawOwner(creditor)
    owner.sock.sendall(plan(2) + message(Head(Kind.QUERY, 0, 2, 1), QUERY)[:100])
    return owner


@pytest.mark.parametrize("cut", [cut_greeting, cut_plan, cut_query])
def test_an_owner_killed_within_a_message_is_forgotten(
    creditor: Creditor, cut: Callable[[Creditor], RawOwner]
) -> None:
    creditor.lender.lend(ME, 1, [3])
    cut(creditor).hang_up()
    assert not creditor.lender.pins.total()
    still_serves(creditor)


# -- a wrong creditor ------------------------------------------------------------------------------


PARTIAL = bytes(GEOMETRY.partial_bytes(2))
BAD_ANSWERS = {
    "hangs up before the query": (1, b"", ""),
    "hangs up instead of answering": (2, b"", "closed"),
    "dies within the answer": (2, message(Head(Kind.PARTIAL, 0, 2, 1), PARTIAL)[:99], "closed"),
    "wrong layer": (2, message(Head(Kind.PARTIAL, 1, 2, 1), PARTIAL), "layer 0"),
    "wrong step": (2, message(Head(Kind.PARTIAL, 0, 2, 7), PARTIAL), "step 1"),
    "wrong rows": (2, message(Head(Kind.PARTIAL, 0, 3, 1), PARTIAL), "2 rows"),
    "wrong size": (2, message(Head(Kind.PARTIAL, 0, 2, 1), PARTIAL[:-4]), "2 rows"),
    "wrong kind": (2, message(Head(Kind.ACK)), "ACK instead of PARTIAL"),
    "unknown error": (2, message(Head(Kind.ERROR, 999), b"odd"), "INTERNAL: odd"),
    "garbage": (2, b"x" * 64, "not a message"),
}


@pytest.mark.parametrize(("num_read", "said", "text"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_creditor_that_answers_wrong_is_lost(
    address: str, num_read: int, said: bytes, text: str
) -> None:
    def script(sock: socket.socket) -> None:
        take(sock, num_read)
        sock.sendall(said)

    creditor = ScriptedCreditor(address, script)
    channel = CreditorChannel(borrowing(creditor.peer), creditor.peer, 8)
    with pytest.raises(PartLost, match=f"instance 2: .*{text}"):
        channel.begin_step(PARTS)
        channel.send_query(0, new_query(2))
        channel.receive_partial(0)
    creditor.join()
    with pytest.raises(PartLost, match="closed"):
        channel.begin_step(PARTS)
    channel.close()


def test_a_wrong_acknowledgement_is_not_taken(address: str) -> None:
    def script(sock: socket.socket) -> None:
        take(sock, 1)
        sock.sendall(message(Head(Kind.ACK, 5, 0, MOVE)))

    creditor = ScriptedCreditor(address, script)
    sender = BlockSender(borrowing(creditor.peer), creditor.peer)
    with pytest.raises(PartLost, match="block 5"):
        sender.send_block(MOVE, 0, BLOCK)
    creditor.join()


FETCHED = {
    "another block": (message(Head(Kind.BLOCK, 5, 0, MOVE), bytes(BLOCK)), "block 0"),
    "another move": (message(Head(Kind.BLOCK, 0, 0, MOVE + 1), bytes(BLOCK)), "block 0"),
    "another size": (message(Head(Kind.BLOCK, 0, 0, MOVE), bytes(BLOCK[:-4])), "block 0"),
    "a changed block": (message(Head(Kind.BLOCK, 0, 12345, MOVE), bytes(BLOCK)), "BAD_CHECKSUM"),
    "half a block": (message(Head(Kind.BLOCK, 0, 0, MOVE), bytes(BLOCK))[:-99], "closed"),
    "nothing": (b"", "closed"),
}


@pytest.mark.parametrize(("said", "text"), FETCHED.values(), ids=FETCHED)
def test_a_block_that_comes_back_wrong_is_not_taken(address: str, said: bytes, text: str) -> None:
    def script(sock: socket.socket) -> None:
        take(sock, 1)
        sock.sendall(said)

    creditor = ScriptedCreditor(address, script)
    fetcher = BlockFetcher(borrowing(creditor.peer), creditor.peer)
    with pytest.raises(PartLost, match=f"instance 2: .*{text}"):
        fetcher.fetch_blocks(MOVE, [memoryview(bytearray(GEOMETRY.block_bytes))])
    creditor.join()
    with pytest.raises(PartLost, match="closed"):
        fetcher.fetch_blocks(MOVE, [memoryview(bytearray(GEOMETRY.block_bytes))])
    fetcher.close()


def test_nobody_there_is_lost() -> None:
    listener = Transport().listen("tcp:127.0.0.1:0", DEADLINE_S)
    gone = Peer(InstId(2), Incarnation(2002), listener.address)
    listener.close()
    with pytest.raises(PartLost, match=r"instance 2: .*refused"):
        CreditorChannel(borrowing(gone), gone, 8)


def test_a_creditor_that_never_greets_is_given_up(address: str) -> None:
    listener = transport_for(address).listen(address, DEADLINE_S)
    silent = Peer(InstId(2), Incarnation(2002), listener.address)
    started = time.monotonic()
    with pytest.raises(PartLost, match=r"within 0\.2 s"):
        CreditorChannel(borrowing(silent, 0.2), silent, 8)
    assert time.monotonic() - started < 2
    listener.close()


@pytest.fixture
def hanging(address: str) -> Iterator[ScriptedCreditor]:
    """Welcomes, and neither reads nor writes any more."""
    is_over = threading.Event()
    creditor = ScriptedCreditor(address, lambda sock: wait_for(is_over))
    yield creditor
    is_over.set()
    creditor.join()


def wait_for(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_a_creditor_that_never_answers_is_given_up(hanging: ScriptedCreditor) -> None:
    channel = CreditorChannel(borrowing(hanging.peer, 0.2), hanging.peer, 8)
    channel.begin_step(PARTS)
    channel.send_query(0, new_query(2))
    started = time.monotonic()
    with pytest.raises(PartLost, match=r"within 0\.2 s"):
        channel.receive_partial(0)
    assert time.monotonic() - started < 2


def test_a_creditor_that_gives_nothing_back_is_given_up(hanging: ScriptedCreditor) -> None:
    fetcher = BlockFetcher(borrowing(hanging.peer, 0.2), hanging.peer)
    with pytest.raises(PartLost, match=r"within 0\.2 s"):
        fetcher.fetch_blocks(MOVE, [memoryview(bytearray(GEOMETRY.block_bytes))])


def test_a_creditor_that_never_reads_is_given_up(hanging: ScriptedCreditor) -> None:
    sender = BlockSender(borrowing(hanging.peer, 0.2), hanging.peer)
    with pytest.raises(PartLost, match=r"within 0\.2 s"):
        sender.send_blocks(MOVE, [BLOCK] * 100)
