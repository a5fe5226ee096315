"""Turns a schedule into tensors and runs the model on it. Called by the engine once per step."""

import torch

from kernels.partial import PagedRows
from services.common.ids import MoveId
from services.worker.distattention.debtor import RemotePart
from services.worker.engine.attention import Creditor, DistAttention, StepAttention, lent_rows
from services.worker.engine.sampler import sample
from services.worker.engine.sequence import Schedule, ScheduledSequence, Sequence
from services.worker.models.llama import LlamaFamilyModel


class Runner:
    """The model and its attention; knows no queue and no time."""

    def __init__(self, model: LlamaFamilyModel, attention: DistAttention) -> None:
        self._model = model
        self._attention = attention

    def run(self, plan: Schedule) -> dict[int, int]:
        """Compute the step; returns the sampled token of each request that reached its end.

        Raises PartLost when a creditor fails; the step may then simply be run again, since writing
        the same KV twice is harmless and nothing was recorded.
        """
        self._attention.begin(_step_attention(plan.items))
        token_ids, positions, logits_rows = _tokens(plan.items)
        logits = self._model.forward(token_ids, positions, self._attention, logits_rows)
        sampling = [item.sequence for item in plan.items if item.samples]
        if not sampling:
            return {}
        tokens = sample(
            logits,
            [sequence.request.sampling for sequence in sampling],
            [sequence.num_output_tokens for sequence in sampling],
        )
        return {seq.req_id: token for seq, token in zip(sampling, tokens, strict=True)}


def _tokens(items: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed token ids and positions of all items, and the rows whose logits are sampled."""
    token_ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    for item in items:
        start, end = item.sequence.num_computed, item.sequence.num_computed + item.num_tokens
        token_ids.extend(item.sequence.token_ids[start:end])
        positions.extend(range(start, end))
        if item.samples:
            logits_rows.append(len(token_ids) - 1)
    return torch.tensor(token_ids), torch.tensor(positions), torch.tensor(logits_rows).long()


def _step_attention(items: list[ScheduledSequence]) -> StepAttention:
    slots: list[int] = []
    row_start, table_start, block_ids, kv_len = [0], [0], list[int](), list[int]()
    remote: list[tuple[RemotePart, Creditor, int]] = []
    for item in items:
        sequence, first_row = item.sequence, row_start[-1]
        start, end = sequence.num_computed, sequence.num_computed + item.num_tokens
        slots.extend(sequence.table.slot(position) for position in range(start, end))
        row_start.append(first_row + item.num_tokens)
        block_ids.extend(sequence.table.local)
        table_start.append(len(block_ids))
        kv_len.append(end - sequence.table.num_remote_tokens)
        remote.extend(
            (RemotePart(sequence.req_id, move_ids, item.num_tokens), creditor, first_row)
            for creditor, move_ids in _moves_by_creditor(sequence).items()
        )
    rows = PagedRows(*map(_int32, (row_start, table_start, block_ids, kv_len)), causal=True)
    return StepAttention(torch.tensor(slots), rows, lent_rows(remote))


def _moves_by_creditor(sequence: Sequence) -> dict[Creditor, tuple[MoveId, ...]]:
    moves: dict[Creditor, tuple[MoveId, ...]] = {}
    for span in sequence.table.remote:
        creditor = (span.inst_id, span.incarnation)
        moves[creditor] = (*moves.get(creditor, ()), span.move_id)
    return moves


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
