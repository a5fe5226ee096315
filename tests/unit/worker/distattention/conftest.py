import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.worker.distattention.pieces import Creditor, new_pool


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Short, since the path of a Unix socket must be."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        yield Path(folder)


@pytest.fixture(params=["unix", "tcp", "tls", "nixl"])
def address(request: pytest.FixtureRequest, socket_folder: Path) -> str:
    """Of each transport in turn: what is asked of one is asked of all."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    where = f"{socket_folder}/data" if request.param == "unix" else "127.0.0.1:0"
    return f"{request.param}:{where}"


@pytest.fixture
def creditor(address: str) -> Iterator[Creditor]:
    with ExitStack() as stack:
        running = Creditor(address, new_pool())
        stack.callback(running.server.stop)
        yield running


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
