"""Next tokens from logits, for all sequences of a step at once. Called by the runner.

The order is: logit_bias, penalties (repetition, then frequency and presence), min_tokens,
temperature, min_p, top_k, top_p, draw. A batch that only wants its likeliest tokens is one argmax;
otherwise only the rows that want more are copied.
"""

from collections.abc import Sequence as Seq

import torch

from services.worker.engine.sampling.draw import draw
from services.worker.engine.sampling.logits import edit, edits
from services.worker.engine.sampling.logprobs import logprobs_of
from services.worker.engine.sequence import Sequence


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """The next token of each sequence; row i of `logits` [rows, vocab] is of `sequences[i]`.

    Leaves `logits` as they are, and log probabilities with the sequences that want them.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    if all(sequence.request.sampling.is_plain for sequence in sequences):
        return tokens
    busy = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.temperature > 0.0 or edits(sequence)
    ]
    if busy:
        _set(tokens, busy, _choose(logits[busy], [sequences[row] for row in busy]))
    _keep_logprobs(logits, sequences, tokens)
    return tokens


def _choose(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """Of rows that are more than a plain argmax; changes `logits`."""
    edit(logits, sequences)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random = [row for row, seq in enumerate(sequences) if seq.request.sampling.temperature > 0.0]
    if random:
        params = [sequences[row].request.sampling for row in random]
        indices = [sequences[row].num_output_tokens for row in random]
        _set(tokens, random, draw(logits[random], params, indices))
    return tokens


def _set(tokens: list[int], rows: Seq[int], values: Seq[int]) -> None:
    for row, value in zip(rows, values, strict=True):
        tokens[row] = value


def _keep_logprobs(logits: torch.Tensor, sequences: Seq[Sequence], tokens: Seq[int]) -> None:
    wanted = [
        (row, num_top)
        for row, sequence in enumerate(sequences)
        if (num_top := sequence.request.sampling.logprobs) is not None
    ]
    if not wanted:
        return
    rows = [row for row, _ in wanted]
    found = logprobs_of(logits[rows], [tokens[row] for row in rows], [num for _, num in wanted])
    for row, logprobs in zip(rows, found, strict=True):
        sequences[row].sampling.last_logprobs = logprobs
