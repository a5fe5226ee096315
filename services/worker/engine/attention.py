"""The parts of a step's attention that creditors hold (paper section 4).

What the kernels call `Elsewhere`: per layer, one message with the queries of every borrowing
request to each creditor; the kernels compute the local part meanwhile; then the answers are merged.
Where every creditor is on a plain socket, the C++ kernels do all of that without coming back here.
Used by the runner, on the engine thread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from kernels import AttentionPartial, Exchanged, Kernels, WiredPart
from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId
from services.worker.distattention.debtor import CreditorChannel, Peer, RemotePart

Creditor = tuple[InstId, Incarnation]


@dataclass(frozen=True, slots=True)
class RemoteRows:
    """Rows of this step that also attend to what one creditor holds."""

    creditor: Creditor
    parts: tuple[RemotePart, ...]
    row_ids: torch.Tensor
    """int64, in the order of the parts: which rows of the step's queries they are."""


class ChannelPool:
    """Open connections to creditors; a failed one is opened anew at the next step that needs it."""

    def __init__(self, open_channel: Callable[[Peer], CreditorChannel]) -> None:
        self._open_channel = open_channel
        self._peers: dict[Creditor, Peer] = {}
        self._channels: dict[Creditor, CreditorChannel] = {}

    def learn(self, peer: Peer) -> None:
        """A move to this peer was committed: from now on steps may read there."""
        self._peers[(peer.inst_id, peer.incarnation)] = peer

    def get(self, creditor: Creditor) -> CreditorChannel:
        channel = self._channels.get(creditor)
        if channel is None:
            peer = self._peers.get(creditor)
            if peer is None:
                raise PartLost(creditor[0], "its address is not known", creditor[1])
            channel = self._channels[creditor] = self._open_channel(peer)
        return channel

    def drop(self, inst_id: InstId, incarnation: Incarnation | None) -> None:
        """To all starts of that instance where `incarnation` is not known."""
        starts = {(inst_id, incarnation)} if incarnation else self._channels.keys()
        for creditor in [key for key in self._channels if key in starts and key[0] == inst_id]:
            self._channels.pop(creditor).close()

    def retain(self, creditors: Collection[Creditor]) -> None:
        """Only these hold something of ours: connections to others are of no use any more."""
        for creditor in [key for key in self._channels if key not in creditors]:
            self._channels.pop(creditor).close()
        for creditor in [key for key in self._peers if key not in creditors]:
            del self._peers[creditor]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class RemoteAttention:
    """What creditors add to the attention of every layer; `begin` is called once per step."""

    def __init__(self, kernels: Kernels, channels: ChannelPool) -> None:
        self._kernels = kernels
        self._channels = channels
        self._open: list[tuple[CreditorChannel, RemoteRows]] = []

    def begin(self, remote: Sequence[RemoteRows]) -> None:
        """Announce the step to every creditor it reads from. Raises PartLost."""
        self._open = [(self._channels.get(rows.creditor), rows) for rows in remote]
        for channel, rows in self._open:
            channel.begin_step(rows.parts)

    def wired(self) -> list[WiredPart] | None:
        """The step for kernels that ask by themselves; None unless every creditor can be."""
        parts = [channel.wired(rows.row_ids) for channel, rows in self._open]
        wired = [part for part in parts if part is not None]
        return wired if len(wired) == len(parts) else None

    def finish(self, exchanged: Sequence[Exchanged]) -> None:
        """Raises PartLost, once every channel knows how far it came."""
        ends = zip(self._open, exchanged, strict=True)
        for (channel, _), end in sorted(ends, key=lambda pair: pair[1].has_failed):
            channel.finish(end)

    def ask(self, layer: int, query: torch.Tensor) -> None:
        """query [rows, num_heads, head_dim] of all rows of the step, scaled."""
        for channel, rows in self._open:
            channel.send_query(layer, query.index_select(0, rows.row_ids))

    def merge_into(self, layer: int, partial: AttentionPartial) -> None:
        for channel, rows in self._open:
            self._kernels.merge_rows(partial, rows.row_ids, channel.receive_partial(layer))


def lent_rows(items: Sequence[tuple[RemotePart, Creditor, int]]) -> tuple[RemoteRows, ...]:
    """Group parts by creditor. Each item: the part, who holds it, and its first row in the step."""
    by_creditor: dict[Creditor, list[tuple[RemotePart, int]]] = {}
    for part, creditor, first_row in items:
        by_creditor.setdefault(creditor, []).append((part, first_row))
    return tuple(
        RemoteRows(
            creditor,
            tuple(part for part, _ in parts),
            torch.cat([torch.arange(row, row + part.num_rows) for part, row in parts]),
        )
        for creditor, parts in by_creditor.items()
    )
