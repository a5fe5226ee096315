"""Asks one peer after the other how far away it is, rarely. Run by the rManager."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from services.common.errors import PartLost
from services.worker.distattention.debtor import Peer
from services.worker.distattention.link_terms import LinkBook, LinkTerms
from services.worker.rmanager.peers import Peers

logger = logging.getLogger(__name__)

#: At most one peer is asked in such a time,
_PERIOD_S = 2.0
#: and each again after this one. A probe takes the time of a few blocks.
_REPEAT_S = 120.0


class LinkSurvey:
    def __init__(self, peers: Peers, book: LinkBook, measure: Callable[[Peer], LinkTerms]) -> None:
        """`measure` blocks, within the data plane's deadlines."""
        self._peers = peers
        self._book = book
        self._measure = measure
        self._asked_s: dict[Peer, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.ask_next(asyncio.get_running_loop().time())
            await asyncio.sleep(_PERIOD_S)

    async def ask_next(self, now_s: float) -> None:
        """Whoever was not asked for longest, if that is long enough ago."""
        peers = self._peers.as_data_peers()
        self._forget(peers, now_s)
        never = -math.inf
        peer = min(peers, key=lambda p: (self._asked_s.get(p, never), p.inst_id), default=None)
        if peer is None or now_s - self._asked_s.get(peer, never) < _REPEAT_S:
            return
        self._asked_s[peer] = now_s
        try:
            self._book.put(peer, await asyncio.to_thread(self._measure, peer))
        except PartLost as error:
            logger.debug("link not measured: %s", error)

    def _forget(self, peers: Sequence[Peer], now_s: float) -> None:
        """Who is gone. A large cluster's view lists other peers every time, so that not being in it
        means little."""
        current, listed = set(peers), {peer.inst_id for peer in peers}
        self._asked_s = {
            peer: asked_s
            for peer, asked_s in self._asked_s.items()
            if peer in current or (peer.inst_id not in listed and now_s - asked_s < _REPEAT_S)
        }
        self._book.retain(current | self._asked_s.keys())
