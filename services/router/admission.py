"""The bound on what the router takes in at once. Owner of the count of sequences in flight."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import Overloaded, Unavailable


class Admission:
    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._closed = False
        self.num_sequences = 0

    def close(self) -> None:
        """From now on only what is already in flight goes on."""
        self._closed = True

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[None]:
        if self._closed:
            raise Unavailable("the router is shutting down")
        if self.num_sequences + num_sequences > self._max_sequences:
            raise Overloaded(f"more than {self._max_sequences} requests at once")
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences
