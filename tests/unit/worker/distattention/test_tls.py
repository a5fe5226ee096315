"""Who is refused, and what both ends are told."""

import ssl
from dataclasses import astuple
from pathlib import Path

import pytest
import trustme

from benchmarks.certificates import issue
from services.common.errors import ConfigError, PartLost
from services.common.ids import MoveId
from services.worker.distattention.link import Borrowing
from services.worker.distattention.transfer import BlockSender
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.transport.tls import TlsFiles
from services.worker.distattention.wire import Peer
from tests.unit.worker.distattention.pieces import (
    DEADLINE_S,
    Creditor,
    certificates,
    new_pool,
    owner_peer,
)


def strangers(folder: Path) -> TlsFiles:
    """Another cluster's files."""
    folder.mkdir()
    return issue(trustme.CA(), folder)


def open_link(creditor: Creditor, transport: Transport, peer: Peer | None = None) -> None:
    borrowing = Borrowing(owner_peer(), creditor.geometry, transport, DEADLINE_S)
    BlockSender(borrowing, peer or creditor.peer).close()


@pytest.fixture
def creditor() -> Creditor:
    return Creditor("tls:127.0.0.1:0", new_pool())


def test_a_creditor_refuses_an_owner_of_another_cluster(
    creditor: Creditor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = certificates()[1]
    theirs = strangers(tmp_path / "theirs")
    with pytest.raises(PartLost, match="no mutual TLS with the peer"):
        open_link(creditor, Transport(TlsFiles(theirs.certificate, theirs.key, ours.ca)))
    creditor.server.stop()
    assert "certificate is not valid here" in caplog.text
    assert creditor.count("data_plane_failures", "creditor") == 1


def test_an_owner_refuses_a_creditor_of_another_cluster(creditor: Creditor, tmp_path: Path) -> None:
    with pytest.raises(PartLost, match="certificate is not valid here"):
        open_link(creditor, Transport(strangers(tmp_path / "theirs")))
    open_link(creditor, Transport(certificates()[1]))
    creditor.server.stop()


def test_an_owner_without_tls_is_refused(
    creditor: Creditor, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Peer(
        creditor.peer.inst_id,
        creditor.peer.incarnation,
        creditor.peer.data_address.replace("tls:", "tcp:"),
    )
    with pytest.raises(PartLost, match="needs a certificate"):
        open_link(creditor, Transport())
    with pytest.raises(PartLost):
        open_link(creditor, Transport(), plain)
    with pytest.raises(PartLost, match="not encrypted"):
        open_link(creditor, Transport(certificates()[1]), plain)
    creditor.server.stop()
    assert "no mutual TLS with the peer" in caplog.text


def test_a_peer_that_never_greets_holds_up_nobody(creditor: Creditor) -> None:
    plain = creditor.peer.data_address.replace("tls:", "tcp:")
    silent = Transport().connect(plain, DEADLINE_S)
    open_link(creditor, Transport(certificates()[1]))
    silent.close()
    creditor.server.stop()


def test_a_renewed_certificate_counts_from_the_next_connection(
    creditor: Creditor, tmp_path: Path
) -> None:
    ours = certificates()[1]
    mine = strangers(tmp_path / "mine")
    transport = Transport(mine)
    with pytest.raises(PartLost):
        open_link(creditor, transport)
    for renewed, old in zip(astuple(ours), astuple(mine), strict=True):
        old.write_bytes(renewed.read_bytes())
    open_link(creditor, transport)
    creditor.server.stop()


def test_a_trusted_peer_that_breaks_off_is_not_taken_for_a_stranger(
    creditor: Creditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        error = ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")
        error.reason = "UNEXPECTED_EOF_WHILE_READING"
        raise error

    borrowing = Borrowing(owner_peer(), creditor.geometry, Transport(certificates()[1]), DEADLINE_S)
    sender = BlockSender(borrowing, creditor.peer)
    monkeypatch.setattr(ssl.SSLSocket, "sendall", end)
    block = memoryview(bytes(creditor.geometry.block_bytes))
    with pytest.raises(PartLost, match="the connection broke"):
        sender.send_block(MoveId(1), 0, block)
    monkeypatch.undo()
    sender.close()
    creditor.server.stop()


def test_files_that_cannot_be_used_are_a_config_error(tmp_path: Path) -> None:
    files = issue(trustme.CA(), tmp_path)
    files.check()
    files.key.write_text("not a key")
    with pytest.raises(ConfigError, match="certificate, key or CA"):
        files.check()
    with pytest.raises(ConfigError, match="needs a certificate"):
        Transport().listen("tls:127.0.0.1:0", 1.0)
