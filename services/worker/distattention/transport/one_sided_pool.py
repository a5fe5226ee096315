"""KV memory that other instances may read by themselves, through NIXL. Used by `one_sided_stream`.

One agent for each process. What is read lands in a buffer that is registered, too, and is copied
from there: a read that outlives its deadline must not write into a block that has a new owner.
"""

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from services.common.errors import ConfigError

_POLL_S = 20e-6


class LandingBuffer:
    """Memory that one stream's reads go to. Given up, never reused, once a read has failed."""

    def __init__(self, registration: Any, memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.registration = registration
        self.memory = memory

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


class OneSidedPool:
    """The only place that knows NIXL. Thread-safe."""

    def __init__(self, pool: memoryview) -> None:
        """Registers the pool, which must stay. ConfigError where NIXL is not installed."""
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError('"nixl:" addresses need the extra "nixl"') from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        # They have no base of their own.
        names = [name for name in dir(_bindings) if name.endswith("Error")]
        self._errors = tuple(getattr(_bindings, name) for name in names)
        self._lock = threading.Lock()
        self._agent: Any = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._pool = np.frombuffer(pool, dtype=np.uint8)
        self._registration = self._register(self._pool)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._unsafe: list[LandingBuffer] = []

    def address_of(self, payload: bytes | memoryview) -> int | None:
        """None where it does not lie in the pool."""
        address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
        offset = address - self._pool.ctypes.data
        return address if 0 <= offset <= self._pool.nbytes - len(payload) else None

    def learn(self, metadata: bytes) -> str:
        """The name of the other end's agent."""
        with self._translated(), self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def land(self, num_bytes: int) -> LandingBuffer:
        memory = np.empty(num_bytes, dtype=np.uint8)
        with self._translated(), self._lock:
            return LandingBuffer(self._register(memory), memory)

    def leave(self, buffer: LandingBuffer) -> None:
        with self._translated(), self._lock:
            self._agent.deregister_memory(buffer.registration)

    def read(
        self, peer: str, address: int, payload: memoryview, buffer: LandingBuffer, timeout_s: float
    ) -> None:
        """From the other end's pool. Raises OSError, after which the buffer must not be used."""
        num_bytes = len(payload)
        # Until the read has ended well: memory that may be written to must neither move nor go.
        self._unsafe.append(buffer)
        with self._translated():
            state = self._read(peer, address, buffer, num_bytes, timeout_s)
        if state != "DONE":
            raise OSError(f"a one-sided read of {num_bytes} bytes did not complete: {state}")
        self._unsafe.remove(buffer)
        payload[:] = buffer.memory[:num_bytes].data

    def _read(
        self, peer: str, address: int, buffer: LandingBuffer, num_bytes: int, timeout_s: float
    ) -> str:
        """The state in which it ended, or was given up."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            here = self._descriptors(buffer.memory.ctypes.data, num_bytes)
            there = self._descriptors(address, num_bytes)
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            state: str = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
        return state

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise OSError(f"NIXL: {error}") from error

    def _register(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        whole = [(memory.ctypes.data, memory.nbytes, 0, "")]
        return self._agent.register_memory(whole, "DRAM")

    def _descriptors(self, address: int, num_bytes: int) -> Any:
        return self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
