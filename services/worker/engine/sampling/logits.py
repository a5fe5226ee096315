"""What requests change about their logits before the draw: bias, penalties, forbidden ends.

Called by the sampler with a copy of the rows that ask for it. Each function touches only the
tokens concerned, of all rows at once: a scatter, never a pass over the vocabulary.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from services.common.sampling import SamplingParams
from services.worker.engine.sampling.state import TokenCounts
from services.worker.engine.sequence import Sequence

Floats = NDArray[np.float32]


def edits(sequence: Sequence) -> bool:
    """Whether the next token of `sequence` needs its logits changed."""
    params = sequence.request.sampling
    return bool(params.logit_bias) or params.has_penalties or _must_go_on(sequence)


def edit(logits: Floats, sequences: Seq[Sequence]) -> None:
    """In place; row i of `logits` is of `sequences[i]`. Order: bias, penalties, minimum length."""
    flat, vocab_size = logits.reshape(-1), logits.shape[-1]
    _add_bias(flat, vocab_size, sequences)
    _penalize(flat, vocab_size, sequences)
    _forbid_ends(flat, vocab_size, sequences)


def _add_bias(flat: Floats, vocab_size: int, sequences: Seq[Sequence]) -> None:
    biases = [sequence.request.sampling.logit_bias for sequence in sequences]
    if any(biases):
        values = [value for bias in biases for value in bias.values()]
        flat[_positions(biases, vocab_size)] += np.array(values, dtype=np.float32)


def _penalize(flat: Floats, vocab_size: int, sequences: Seq[Sequence]) -> None:
    """Repetition counts over prompt and output, presence and frequency over the output alone."""
    penalized = [
        (row, sequence.request.sampling, _counted(sequence))
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.has_penalties
    ]
    if not penalized:
        return
    num_tokens = [len(counts.token_ids) for _, _, counts in penalized]

    def repeated(value: Callable[[SamplingParams], float]) -> Floats:
        per_row = [value(params) for _, params, _ in penalized]
        return np.repeat(np.array(per_row, dtype=np.float32), num_tokens)

    positions = np.concatenate([c.token_ids + row * vocab_size for row, _, c in penalized])
    output_counts = np.concatenate([c.output_counts for _, _, c in penalized])
    repetition = repeated(lambda params: params.repetition_penalty)
    values = flat[positions]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= repeated(lambda params: params.frequency_penalty) * output_counts
    values -= repeated(lambda params: params.presence_penalty) * (output_counts > 0)
    flat[positions] = values


def _forbid_ends(flat: Floats, vocab_size: int, sequences: Seq[Sequence]) -> None:
    ends = [seq.request.stop_token_ids if _must_go_on(seq) else () for seq in sequences]
    if any(ends):
        flat[_positions(ends, vocab_size)] = -np.inf


def _must_go_on(sequence: Sequence) -> bool:
    grammar = sequence.request.grammar
    if grammar is not None and grammar.has_ended:
        return False
    return sequence.num_output_tokens < sequence.request.sampling.min_tokens


def _counted(sequence: Sequence) -> TokenCounts:
    """The sequence's counts, up to its last token."""
    counts = sequence.sampling.counts
    num_prompt = len(sequence.request.prompt_token_ids)
    if counts is None:
        counts = sequence.sampling.counts = TokenCounts(sequence.token_ids[:num_prompt])
    counts.add(sequence.token_ids[num_prompt + counts.num_output_tokens :])
    return counts


def _positions(token_ids: Seq[Iterable[int]], vocab_size: int) -> list[int]:
    """Where the tokens of each row lie in the flattened logits."""
    return [row * vocab_size + token_id for row, ids in enumerate(token_ids) for token_id in ids]
