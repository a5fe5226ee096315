"""Turns a schedule into tensors and runs the model on it. Called by the engine once per step."""

from collections.abc import Iterable

import torch

from services.common.ids import MoveId, ReqId
from services.worker.distattention.debtor import RemotePart
from services.worker.engine.attention import Creditor, RemoteAttention, RemoteRows, lent_rows
from services.worker.engine.sampling.logprobs import logprobs_of
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sequence import Schedule, ScheduledSequence
from services.worker.engine.step_tensors import StepTensors
from services.worker.kvcache.block_table import Context, RemoteSpan
from services.worker.models.llama import LlamaFamilyModel


class Runner:
    """The model and its attention; knows no queue and no time."""

    def __init__(
        self, model: LlamaFamilyModel, tensors: StepTensors, attention: RemoteAttention
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._attention = attention

    def run(self, plan: Schedule) -> dict[ReqId, int]:
        """Compute the step; returns the sampled token of each request that reached its end.

        Raises PartLost when a creditor fails; the step may then simply be run again, since writing
        the same KV twice is harmless and nothing was recorded.
        """
        contexts = [item.sequence.table.context(item.end) for item in plan.items]
        remote = _remote_rows(plan.items, contexts)
        self._attention.begin(remote)
        packed, kv = self._tensors.fill(plan.items, contexts, _logits_rows(plan.items))
        logits = self._model.forward(packed, kv, self._attention if remote else None)
        sampling = [item.sequence for item in plan.items if item.samples]
        _keep_prompt_logprobs(plan.items, logits[len(sampling) :])
        if not sampling:
            return {}
        rows = logits[: len(sampling)]
        tokens = sample(rows, self._model.likeliest(rows), sampling)
        return {seq.req_id: token for seq, token in zip(sampling, tokens, strict=True)}


def _logits_rows(items: list[ScheduledSequence]) -> list[int]:
    """The rows to sample from, then those of prompts whose log probabilities are asked."""
    sampled: list[int] = []
    of_prompts: list[int] = []
    first_row = 0
    for item in items:
        wanted = _wanted_positions(item)
        if wanted:
            of_prompts += range(
                first_row + wanted.start - item.start, first_row + wanted.stop - item.start
            )
        first_row += item.num_tokens
        if item.samples:
            sampled.append(first_row - 1)
    return sampled + of_prompts


def _wanted_positions(item: ScheduledSequence) -> range:
    """Positions of this step at which the model says how likely the prompt's next token is."""
    sequence = item.sequence
    if not sequence.wants_prompt_logprobs:
        return range(0)
    end = min(item.end, len(sequence.request.prompt_token_ids) - 1)
    # What is computed again was known before.
    return range(max(item.start, len(sequence.sampling.prompt_logprobs)), end)


def _keep_prompt_logprobs(items: list[ScheduledSequence], logits: torch.Tensor) -> None:
    """`logits`: a row for each wanted position of all items."""
    row = 0
    for item in items:
        at = _wanted_positions(item)
        if at:
            request, state = item.sequence.request, item.sequence.sampling
            next_tokens = request.prompt_token_ids[at.start + 1 : at.stop + 1]
            num_top = [request.sampling.prompt_logprobs or 0] * len(at)
            rows = logits[row : row + len(at)]
            state.prompt_logprobs.extend(logprobs_of(rows, next_tokens, num_top))
            row += len(at)


def _remote_rows(items: list[ScheduledSequence], contexts: list[Context]) -> tuple[RemoteRows, ...]:
    remote: list[tuple[RemotePart, Creditor, int]] = []
    first_row = 0
    for item, context in zip(items, contexts, strict=True):
        if context.remote:
            remote.extend(
                (RemotePart(item.sequence.req_id, move_ids, item.num_tokens), creditor, first_row)
                for creditor, move_ids in _moves_by_creditor(context.remote).items()
            )
        first_row += item.num_tokens
    return lent_rows(remote)


def _moves_by_creditor(spans: Iterable[RemoteSpan]) -> dict[Creditor, tuple[MoveId, ...]]:
    moves: dict[Creditor, tuple[MoveId, ...]] = {}
    for span in spans:
        creditor = (span.inst_id, span.incarnation)
        moves[creditor] = (*moves.get(creditor, ()), span.move_id)
    return moves
