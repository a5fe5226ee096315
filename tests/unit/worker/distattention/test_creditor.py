import threading
from pathlib import Path

import pytest

from services.common.errors import ConfigError, PartLost
from services.common.ids import ReqId
from services.worker.distattention.debtor import RemotePart
from services.worker.distattention.wire import Head, Kind
from tests.unit.worker.distattention.pieces import (
    MOVE,
    Creditor,
    RawOwner,
    new_pool,
    new_query,
    owner_peer,
)

ME = owner_peer()


def test_stop_ends_every_thread_at_once(creditor: Creditor) -> None:
    creditor.lender.lend(ME, 1, [3])
    creditor.lender.moves[MOVE] = [3]
    idle = creditor.channel(ME)
    busy = RawOwner(creditor)
    head = Head(Kind.COPY, 0, 0, MOVE, creditor.geometry.block_bytes)
    busy.sock.sendall(head.pack() + bytes(10))
    creditor.server.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("creditor")]
    assert creditor.server.num_connections == 0
    with pytest.raises(PartLost):
        idle.begin_step([RemotePart(ReqId(1), (MOVE,), 1)])
        idle.send_query(0, new_query(1))
        idle.receive_partial(0)
    with pytest.raises(PartLost):
        creditor.channel(ME)
    busy.sock.close()


def test_stop_removes_the_socket_file(socket_folder: Path) -> None:
    creditor = Creditor(f"unix:{socket_folder}/data", new_pool())
    creditor.server.stop()
    assert not list(socket_folder.iterdir())
    Creditor(f"unix:{socket_folder}/data", new_pool()).server.stop()


def test_the_number_of_connections_is_bounded(address: str) -> None:
    creditor = Creditor(address, new_pool(), max_connections=2)
    first, second = RawOwner(creditor), creditor.channel(ME)
    with pytest.raises(PartLost):
        creditor.channel(ME)
    first.hang_up()
    second.close()
    creditor.server.stop()


def test_a_finished_connection_makes_room(address: str) -> None:
    creditor = Creditor(address, new_pool(), max_connections=1)
    for _ in range(3):
        owner = RawOwner(creditor)
        owner.say(Head(Kind.ACK))
        owner.hear_error()
        # The peer sees the end a moment before the thread is counted out.
        for thread in threading.enumerate():
            if thread.name == "creditor-connection":
                thread.join()
    creditor.server.stop()


def test_an_address_in_use_is_a_config_error(creditor: Creditor) -> None:
    with pytest.raises(ConfigError, match="in use"):
        Creditor(creditor.peer.data_address, new_pool())
