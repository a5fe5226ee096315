from dataclasses import replace

import pytest

from services.common.errors import PartLost
from services.common.ids import InstId
from services.worker.distattention.link_terms import LinkBook, LinkTerms, measure
from services.worker.distattention.memory import tensor_bytes
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.wire import Head, Kind, Peer
from tests.unit.worker.distattention.pieces import (
    DEADLINE_S,
    MOVE,
    Creditor,
    RawOwner,
    borrowing_from,
    owner_peer,
)

ME = owner_peer()


def test_a_link_is_measured_without_borrowing_anything(creditor: Creditor) -> None:
    terms = measure(borrowing_from(creditor.peer, ME, creditor.geometry), creditor.peer)
    assert 0 < terms.round_trip_s < DEADLINE_S
    assert terms.bytes_per_s > 0
    assert not creditor.lender.pins


def test_a_ping_changes_nothing_else_on_its_connection(creditor: Creditor) -> None:
    owner = RawOwner(creditor)
    for payload in (b"", b"x" * 100_000, b""):
        owner.say(Head(Kind.PING), payload)
        assert owner.stream.receive_head().kind is Kind.PONG
    owner.hang_up()


def test_a_link_to_nobody_is_lost(creditor: Creditor) -> None:
    creditor.server.stop()
    with pytest.raises(PartLost):
        measure(borrowing_from(creditor.peer, ME, creditor.geometry), creditor.peer)


def test_blocks_that_cross_are_told_to_whoever_keeps_the_terms(creditor: Creditor) -> None:
    told: list[tuple[Peer, int]] = []
    plain = borrowing_from(creditor.peer, ME, creditor.geometry)
    borrowing = replace(plain, on_blocks=lambda peer, size, _: told.append((peer, size)))
    size = creditor.geometry.block_bytes
    blocks = [tensor_bytes(creditor.pool)[i * size : (i + 1) * size] for i in (0, 1, 2)]
    creditor.lender.moves[MOVE] = [3, 4]
    creditor.lender.lend(ME, 1, [3])
    sender = BlockSender(borrowing, creditor.peer)
    fetcher = BlockFetcher(borrowing, creditor.peer)
    sender.send_blocks(MOVE, blocks[:2])
    fetcher.fetch_blocks(MOVE, blocks[2:])
    sender.send_blocks(MOVE, [])
    assert told == [(creditor.peer, 2 * size), (creditor.peer, size)]
    sender.close()
    fetcher.close()


def test_real_traffic_moves_the_rate_and_never_the_round_trip() -> None:
    book, peer = LinkBook(), owner_peer(2)
    book.record_blocks(peer, 100, 1.0)
    assert book.terms() == {}
    book.put(peer, LinkTerms(1e-4, 1000.0))
    book.record_blocks(peer, 100, 1.0)
    assert book.terms()[peer].bytes_per_s == pytest.approx(820)
    assert book.terms()[peer].round_trip_s == 1e-4
    for _ in range(60):
        book.record_blocks(peer, 100, 1.0)
    assert book.terms()[peer].bytes_per_s == pytest.approx(100, rel=0.01)


def test_who_is_gone_is_forgotten() -> None:
    book, stays = LinkBook(), owner_peer(2)
    for peer in (stays, owner_peer(3)):
        book.put(peer, LinkTerms(1e-4, 1000.0))
    book.retain([stays])
    assert [peer.inst_id for peer in book.terms()] == [InstId(2)]
