"""How far away each creditor is: measured by asking, and kept true by the blocks that go there.

`measure` runs on the survey's thread, `LinkBook` is written by the copy threads, too, and read by
the rManager, which reports it: the planner's link terms of a pair (paper section 5).
"""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from services.worker.distattention.link import Borrowing, PeerLink
from services.worker.distattention.wire import Head, Kind, Peer

_NUM_PINGS = 3
#: Enough for a rate, little enough to disturb nobody.
_PROBE_BYTES = 1 << 18
#: So much of what is known gives way to the next blocks.
_NEW_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class LinkTerms:
    round_trip_s: float
    bytes_per_s: float


class LinkBook:
    """What is known of each link. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: dict[Peer, LinkTerms] = {}

    def put(self, creditor: Peer, terms: LinkTerms) -> None:
        with self._lock:
            self._terms[creditor] = terms

    def record_blocks(self, creditor: Peer, num_bytes: int, duration_s: float) -> None:
        """Blocks went there or came back, checksums included."""
        with self._lock:
            known = self._terms.get(creditor)
            if known is None:
                return  # half of the terms are of no use
            rate = known.bytes_per_s + _NEW_SHARE * (num_bytes / duration_s - known.bytes_per_s)
            self._terms[creditor] = replace(known, bytes_per_s=rate)

    def retain(self, creditors: Collection[Peer]) -> None:
        with self._lock:
            self._terms = {key: terms for key, terms in self._terms.items() if key in creditors}

    def terms(self) -> dict[Peer, LinkTerms]:
        with self._lock:
            return dict(self._terms)


def measure(borrowing: Borrowing, creditor: Peer) -> LinkTerms:
    """The quickest of a few pings, and of a few that carry something. Raises PartLost."""
    link = PeerLink(borrowing, creditor, 0)
    try:
        round_trip_s = min(_ping_s(link, b"") for _ in range(_NUM_PINGS))
        payload = bytes(_PROBE_BYTES)
        loaded_s = min(_ping_s(link, payload) for _ in range(_NUM_PINGS))
    finally:
        link.close()
    # Where the payload takes no time that can be seen, its whole way is the bound that is known.
    way_s = loaded_s - round_trip_s if loaded_s > round_trip_s else loaded_s
    return LinkTerms(round_trip_s, _PROBE_BYTES / way_s)


def _ping_s(link: PeerLink, payload: bytes) -> float:
    started = time.perf_counter()
    with link:
        link.send(Head(Kind.PING), payload)
        link.expect(Kind.PONG)
    return time.perf_counter() - started
