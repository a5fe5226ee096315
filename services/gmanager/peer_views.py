"""Whom the answer to a heartbeat tells of: the view that a worker falls back to.

In a large cluster these are the nearest and emptiest instances, for an answer with all of them
would make heartbeats cost the square of their number. Used by `server` alone; like it, at the
border between values and protos.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from protos.infinite_llm.v1 import types_pb2
from services.common.ids import InstId
from services.gmanager import convert
from services.gmanager.cluster import BlockFormat, Instance

MAX_PEERS = 32


class Peer(NamedTuple):
    inst_id: InstId
    num_blocks: int
    view: types_pb2.InstanceView


class PeerViews(NamedTuple):
    views: list[types_pb2.InstanceView]
    #: How many others could lend to the caller, too, and all their blocks.
    num_unlisted: int
    unlisted_blocks: int


@dataclass(slots=True)
class _Group:
    """The instances of one block format, the emptiest first."""

    ranked: list[Instance] = field(default_factory=list)
    by_node: dict[str, list[Instance]] = field(default_factory=dict)
    num_blocks: int = 0
    #: One more than is listed, for the caller itself is among them.
    nearest: dict[str, list[Peer]] = field(default_factory=dict)


class PeerDirectory:
    """Ranks anew when a tenth of the instances have reported: always, where they are few."""

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self._instances = instances
        self._groups: dict[BlockFormat, _Group] = {}
        self._num_calls_left = 0

    def peers_of(self, caller: Instance) -> PeerViews:
        """Called once for each heartbeat."""
        if self._num_calls_left <= 0:
            self._rank()
        self._num_calls_left -= 1
        group = self._groups.get(caller.info.block_format, _Group())
        node = caller.info.node
        if node not in group.nearest:
            group.nearest[node] = _nearest(group, node)
        listed = [peer for peer in group.nearest[node] if peer.inst_id != caller.inst_id]
        del listed[MAX_PEERS:]
        listed_blocks = sum(peer.num_blocks for peer in listed)
        return PeerViews(
            [peer.view for peer in listed],
            max(0, len(group.ranked) - 1 - len(listed)),
            max(0, group.num_blocks - caller.info.num_blocks - listed_blocks),
        )

    def _rank(self) -> None:
        ranked = sorted(
            self._instances(),
            key=lambda i: (i.load.draining, -i.load.free_blocks, i.inst_id),
        )
        self._groups = {}
        for instance in ranked:
            group = self._groups.setdefault(instance.info.block_format, _Group())
            group.ranked.append(instance)
            group.by_node.setdefault(instance.info.node, []).append(instance)
            group.num_blocks += instance.info.num_blocks
        self._num_calls_left = len(ranked) // 10


def _nearest(group: _Group, node: str) -> list[Peer]:
    far = (instance for instance in group.ranked if instance.info.node != node)
    others = chain(group.by_node.get(node, []), far)
    return [
        Peer(instance.inst_id, instance.info.num_blocks, convert.peer_to_proto(instance))
        for instance in islice(others, MAX_PEERS + 1)
    ]
