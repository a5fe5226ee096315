"""The tensors that describe a step, in memory that is used again from step to step.

Made and filled by the runner. What a step computes is written anew, a few numbers for each row; the
block tables, which are long and hardly change, are kept.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import PagedRows, StepKv
from services.worker.engine.sequence import ScheduledSequence
from services.worker.kvcache.block_table import Context
from services.worker.models.llama import PackedTokens

#: Ids that each table may grow by before those behind it have to make room.
SPARE_IDS = 32


class KeptTables:
    """The local blocks of a step's sequences, table after table, as the last step left them.

    Invariant: table i begins with the blocks of sequence i. Up to where the next table begins there
    may be more: ids of the pool that no kernel looks at, since they lie beyond what is to be seen.
    """

    def __init__(self, max_seqs: int) -> None:
        self.ids: NDArray[np.int32] = np.zeros(max_seqs * SPARE_IDS, np.int32)
        self.starts: NDArray[np.int32] = np.zeros(max_seqs + 1, np.int32)
        # What is written there. A sequence's list only ever grows: what changes is a new list.
        self._tables: list[Seq[int]] = []
        self._num_written: list[int] = []
        self._stops: list[int] = []

    @property
    def num_ids(self) -> int:
        return self._stops[-1] if self._stops else 0

    def update(self, tables: Seq[Seq[int]]) -> None:
        """Write what has changed since the last step, and all that lies behind it."""
        del (
            self._tables[len(tables) :],
            self._num_written[len(tables) :],
            self._stops[len(tables) :],
        )
        for index, table in enumerate(tables):
            if not self._is_kept(index, table):
                self._write_from(index, tables)
                return
            if len(table) > self._num_written[index]:
                self._append(index, table)

    def _is_kept(self, index: int, table: Seq[int]) -> bool:
        if index >= len(self._tables) or self._tables[index] is not table:
            return False
        return self._start(index) + len(table) <= self._stops[index]

    def _append(self, index: int, table: Seq[int]) -> None:
        first, start = self._num_written[index], self._start(index)
        self.ids[start + first : start + len(table)] = table[first:]
        self._num_written[index] = len(table)

    def _write_from(self, index: int, tables: Seq[Seq[int]]) -> None:
        del self._tables[index:], self._num_written[index:], self._stops[index:]
        rooms = (len(table) + SPARE_IDS for table in tables[index:])
        self._stops.extend(list(accumulate(rooms, initial=self.num_ids))[1:])
        if self.num_ids > len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros(self.num_ids, np.int32)])
        self.starts[1 : len(tables) + 1] = self._stops
        for table in tables[index:]:
            self._tables.append(table)
            self._num_written.append(0)
            self._append(len(self._tables) - 1, table)

    def _start(self, index: int) -> int:
        return self._stops[index - 1] if index else 0


@dataclass(frozen=True, slots=True)
class _Views:
    """What the kernels see of the memory, for steps of one size."""

    size: tuple[int, ...]
    tokens: PackedTokens
    kv: StepKv


class StepTensors:
    """One step at a time: the next one overwrites it."""

    def __init__(self, pool: torch.Tensor, max_rows: int, max_seqs: int) -> None:
        self._pool = pool
        self._token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._positions: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._slots: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._logits_rows: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._row_start: NDArray[np.int32] = np.zeros(max_seqs + 1, np.int32)
        self._kv_len: NDArray[np.int32] = np.zeros(max_seqs, np.int32)
        self._tables = KeptTables(max_seqs)
        self._views: _Views | None = None

    def fill(
        self, items: Seq[ScheduledSequence], contexts: Seq[Context], logits_rows: Seq[int]
    ) -> tuple[PackedTokens, StepKv]:
        """Of all items, one after the other. `contexts`: what each attends to; `logits_rows`: the
        rows of the step whose logits are wanted."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for item in items:
            start, end, sequence = item.start, item.end, item.sequence
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += sequence.table.slots(start, end)
        num_rows, num_seqs = len(token_ids), len(items)
        self._token_ids[:num_rows] = token_ids
        self._positions[:num_rows] = positions
        self._slots[:num_rows] = slots
        self._logits_rows[: len(logits_rows)] = logits_rows
        self._row_start[1 : num_seqs + 1] = list(accumulate(item.num_tokens for item in items))
        self._kv_len[:num_seqs] = [
            item.end - context.num_remote_tokens
            for item, context in zip(items, contexts, strict=True)
        ]
        self._tables.update([context.local for context in contexts])
        views = self._views_of(num_rows, num_seqs, len(logits_rows))
        return views.tokens, views.kv

    def _views_of(self, num_rows: int, num_seqs: int, num_logits: int) -> _Views:
        """Made anew only where a step is not of the size of the last one."""
        tables = self._tables
        size = (num_rows, num_seqs, num_logits, tables.num_ids, len(tables.ids))
        if self._views is None or self._views.size != size:
            tokens = PackedTokens(
                _tensor(self._token_ids, num_rows),
                _tensor(self._positions, num_rows),
                _tensor(self._logits_rows, num_logits),
            )
            rows = PagedRows(
                row_start=_tensor(self._row_start, num_seqs + 1),
                table_start=_tensor(tables.starts, num_seqs + 1),
                block_ids=_tensor(tables.ids, tables.num_ids),
                kv_len=_tensor(self._kv_len, num_seqs),
                causal=True,
            )
            kv = StepKv(self._pool, _tensor(self._slots, num_rows), rows)
            self._views = _Views(size, tokens, kv)
        return self._views


def _tensor(memory: NDArray[np.int32] | NDArray[np.int64], count: int) -> torch.Tensor:
    """The first elements, not a copy of them."""
    return torch.from_numpy(memory[:count])
