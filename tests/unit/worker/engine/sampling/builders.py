"""Sequences in the middle of their lives, without blocks or a scheduler."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from services.common.ids import ReqId
from services.common.sampling import SamplingParams
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sequence import Request, Sequence


def sequence_of(
    prompt: Seq[int] = (1,), output: Seq[int] = (), ends: Iterable[int] = (), **params: Any
) -> Sequence:
    sampling = SamplingParams(**params)
    request = Request(ReqId(1), tuple(prompt), 1000, sampling, stop_token_ids=frozenset(ends))
    sequence = Sequence.of(request, block_size=4, now_s=0.0)
    sequence.token_ids.extend(output)
    return sequence


def sequences_of(count: int, first_output: int = 0, **params: Any) -> list[Sequence]:
    """Each one token longer than the one before: so many draws of one seed."""
    return [sequence_of(output=[0] * (first_output + index), **params) for index in range(count)]


def next_tokens(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """What the runner makes of the logits of a step."""
    return sample(logits, logits.argmax(-1).tolist(), sequences)
