"""The creditor's side of the data plane: one listening socket, one thread per connection.

Started by the worker's server; answers beside the instance's own step, which goes on meanwhile.
"""

import logging
import threading

from services.worker.distattention.connection import Connection
from services.worker.distattention.session import MESSAGE_TIMEOUT_S, Serving
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.transport.opening import Transport

__all__ = ["CreditorServer", "Serving"]

_RETRY_ACCEPT_S = 0.1

_log = logging.getLogger(__name__)


class CreditorServer:
    """Owns the listener and the connections' threads. `start` once."""

    def __init__(
        self, address: str, serving: Serving, transport: Transport, max_connections: int = 256
    ) -> None:
        """Listens at once, so that `address` can be told to others before `start`."""
        self._serving = serving
        self._max_connections = max_connections
        self._listener = transport.listen(address, MESSAGE_TIMEOUT_S)
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="creditor-accept")

    @property
    def address(self) -> str:
        """Where others connect; the real port where port 0 was asked for."""
        return self._listener.address

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        """Cuts every connection and returns when all threads have ended. Idempotent."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        self._listener.stop()
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.shutdown()
        for thread in connections.values():
            thread.join()

    def _accept(self) -> None:
        while not self._is_stopping.is_set():
            try:
                stream = self._listener.accept()
            except OSError as error:
                if not self._is_stopping.is_set():
                    _log.warning("cannot accept: %s", error)
                    self._is_stopping.wait(_RETRY_ACCEPT_S)
                continue
            try:
                self._admit(stream)
            except OSError as error:
                _log.debug("connection gone before it was admitted: %s", error)
                stream.close()

    def _admit(self, stream: Stream) -> None:
        if self.num_connections >= self._max_connections:
            _log.warning("refused a connection beyond %d", self._max_connections)
            stream.close()  # saying why could keep this thread from accepting others
            return
        connection = Connection(self._serving, stream)
        thread = threading.Thread(target=self._run, args=(connection,), name="creditor-connection")
        with self._lock:
            self._connections[connection] = thread
        thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                del self._connections[connection]
