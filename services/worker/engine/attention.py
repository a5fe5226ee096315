"""DistAttention of one step: local part and remote parts, merged exactly (paper section 4).

Implements the `Attention` protocol of the models. Per layer: write KV, send the queries of every
borrowing request (one message per creditor), compute the local part meanwhile, merge the answers.
Used by the runner, on the engine thread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
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


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Where the rows of one step read and write KV."""

    slots: torch.Tensor
    rows: PagedRows
    remote: tuple[RemoteRows, ...]


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
                raise PartLost(creditor[0], "its address is not known")
            channel = self._channels[creditor] = self._open_channel(peer)
        return channel

    def drop(self, inst_id: InstId) -> None:
        for creditor in [key for key in self._channels if key[0] == inst_id]:
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


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a layer's partial and output go."""

    partial: AttentionPartial
    out: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_heads: int, head_dim: int) -> Self:
        return cls(
            AttentionPartial.allocate(num_rows, num_heads, head_dim),
            torch.empty(num_rows, num_heads * head_dim),
        )

    @property
    def num_rows(self) -> int:
        return self.out.shape[0]

    def first(self, num_rows: int) -> Self:
        acc, maximum, total = self.partial.acc, self.partial.max, self.partial.sum
        return type(self)(
            AttentionPartial(acc[:num_rows], maximum[:num_rows], total[:num_rows]),
            self.out[:num_rows],
        )


class DistAttention:
    """The attention of every layer of one instance; `begin` is called once per step."""

    def __init__(
        self,
        kernels: Kernels,
        pool: torch.Tensor,
        channels: ChannelPool,
        max_rows: int,
        num_heads: int,
    ) -> None:
        head_dim = pool.shape[-1]
        self._kernels = kernels
        self._pool = pool
        self._channels = channels
        self._scale = head_dim**-0.5
        self._room = _Room.allocate(max_rows, num_heads, head_dim)
        self._rows = self._room
        self._step: StepAttention | None = None
        self._open: list[tuple[CreditorChannel, RemoteRows]] = []

    def begin(self, step: StepAttention) -> None:
        """Announce the step to every creditor it reads from. Raises PartLost."""
        self._step = step
        if self._rows.num_rows != step.slots.shape[0]:
            self._rows = self._room.first(step.slots.shape[0])
        self._open = [(self._channels.get(remote.creditor), remote) for remote in step.remote]
        for channel, remote in self._open:
            channel.begin_step(remote.parts)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads * head_dim]."""
        if self._step is None:
            raise RuntimeError("begin() was not called for this step")
        step, partial, out = self._step, self._rows.partial, self._rows.out
        self._kernels.write_kv(self._pool, layer, k.contiguous(), v.contiguous(), step.slots)
        query = q * self._scale
        for channel, remote in self._open:
            channel.send_query(layer, query.index_select(0, remote.row_ids))
        self._kernels.micro_attention(query, self._pool, layer, step.rows, partial)
        for channel, remote in self._open:
            self._kernels.merge_rows(partial, remote.row_ids, channel.receive_partial(layer))
        self._kernels.finalize(partial, out)
        return out


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
