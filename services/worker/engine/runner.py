"""Turns a schedule into tensors and runs the model on it. Called by the engine once per step."""

import torch

from kernels.partial import PagedRows
from services.common.ids import MoveId, ReqId
from services.worker.distattention.debtor import RemotePart
from services.worker.engine.attention import Creditor, DistAttention, StepAttention, lent_rows
from services.worker.engine.sampler import sample
from services.worker.engine.sequence import Schedule, ScheduledSequence, Sequence
from services.worker.models.llama import LlamaFamilyModel


class Runner:
    """The model and its attention; knows no queue and no time."""

    def __init__(self, model: LlamaFamilyModel, attention: DistAttention, num_blocks: int) -> None:
        self._model = model
        self._attention = attention
        self._num_blocks = num_blocks

    def run(self, plan: Schedule) -> dict[ReqId, int]:
        """Compute the step; returns the sampled token of each request that reached its end.

        Raises PartLost when a creditor fails; the step may then simply be run again, since writing
        the same KV twice is harmless and nothing was recorded.
        """
        self._attention.begin(_step_attention(plan.items, self._num_blocks))
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


def _step_attention(items: list[ScheduledSequence], num_blocks: int) -> StepAttention:
    slots: list[int] = []
    remote: list[tuple[RemotePart, Creditor, int]] = []
    first_row = 0
    for item in items:
        sequence = item.sequence
        start, end = sequence.num_computed, sequence.num_computed + item.num_tokens
        slots.extend(sequence.table.slot(position) for position in range(start, end))
        remote.extend(
            (RemotePart(sequence.req_id, move_ids, item.num_tokens), creditor, first_row)
            for creditor, move_ids in _moves_by_creditor(sequence).items()
        )
        first_row += item.num_tokens
    tables = [item.sequence.table for item in items]
    ends = [item.sequence.num_computed + item.num_tokens for item in items]
    rows = PagedRows.build(
        [item.num_tokens for item in items],
        [table.local for table in tables],
        [end - table.num_remote_tokens for end, table in zip(ends, tables, strict=True)],
        causal=True,
        num_blocks=num_blocks,
        block_size=tables[0].block_size,
    )
    return StepAttention(torch.tensor(slots), rows, lent_rows(remote))


def _moves_by_creditor(sequence: Sequence) -> dict[Creditor, tuple[MoveId, ...]]:
    moves: dict[Creditor, tuple[MoveId, ...]] = {}
    for span in sequence.table.remote:
        creditor = (span.inst_id, span.incarnation)
        moves[creditor] = (*moves.get(creditor, ()), span.move_id)
    return moves
