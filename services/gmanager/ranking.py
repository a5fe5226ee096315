"""Who could lend, the emptiest first: Algorithm 1's list of creditors, kept in order as it changes.

Pure; used by `board`. Sorting all instances anew for every debtor would be most of a plan's work.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.common.ids import InstId
from services.gmanager.cluster import BlockFormat, InstanceInfo


class Ranking:
    def __init__(self) -> None:
        self._node_of: dict[InstId, str] = {}
        #: Share of memory in use and inst_id, ascending: all of a format, and those of one node.
        self._by_format: dict[BlockFormat, list[tuple[float, InstId]]] = {}
        self._by_node: dict[tuple[BlockFormat, str], list[tuple[float, InstId]]] = {}

    def add(self, info: InstanceInfo, used_share: float) -> None:
        self._node_of[info.inst_id] = info.node
        for ranked in self._lists(info):
            insort(ranked, (used_share, info.inst_id))

    def remove(self, info: InstanceInfo, used_share: float) -> None:
        for ranked in self._lists(info):
            at = bisect_left(ranked, (used_share, info.inst_id))
            if ranked[at : at + 1] == [(used_share, info.inst_id)]:
                del ranked[at]

    def best_for(self, debtor: InstanceInfo) -> Iterator[InstId]:
        """Its own node first, since links are shorter there; not to be changed meanwhile."""
        everywhere, here = self._lists(debtor)
        for _, inst_id in here:
            yield inst_id
        for _, inst_id in everywhere:
            if self._node_of[inst_id] != debtor.node:
                yield inst_id

    def _lists(self, info: InstanceInfo) -> tuple[list[tuple[float, InstId]], ...]:
        block_format = info.block_format
        return (
            self._by_format.setdefault(block_format, []),
            self._by_node.setdefault((block_format, info.node), []),
        )
