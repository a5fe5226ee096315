"""Next tokens from logits, for all sequences of a step at once. Called by the runner.

The order is: logit_bias, penalties (repetition, then frequency and presence), min_tokens,
grammar, temperature, min_p, top_k, top_p, draw. A batch that only wants its likeliest tokens is one
argmax; otherwise only the rows that want more are copied: not those whose grammar allows the
likeliest token.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.sampling.draw import draw
from services.worker.engine.sampling.grammar import Grammar
from services.worker.engine.sampling.logits import edit, edits
from services.worker.engine.sampling.logprobs import logprobs_of
from services.worker.engine.sequence import Request, Sequence


def sample(logits: torch.Tensor, likeliest: Seq[int], sequences: Seq[Sequence]) -> list[int]:
    """The next token of each sequence; row i of `logits` [rows, vocab] is of `sequences[i]`.

    `likeliest` are the tokens of the rows' greatest logits. Leaves `logits` as they are, and log
    probabilities with the sequences that want them.
    """
    tokens = list(likeliest)
    if all(_is_plain(sequence.request) for sequence in sequences):
        return tokens
    _follow(sequences)
    busy = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.temperature > 0.0
        or edits(sequence)
        or _forbids(sequence.request.grammar, tokens[row])
    ]
    if busy:
        rows = _rows(logits, busy).cpu().numpy()
        _set(tokens, busy, _choose(rows, [sequences[row] for row in busy]))
    _keep_logprobs(logits, sequences, tokens)
    return tokens


def _choose(logits: NDArray[np.float32], sequences: Seq[Sequence]) -> list[int]:
    """Of rows that are more than a plain argmax; changes `logits`."""
    # Whatever a broken model says, infinities included, a token comes out.
    with np.errstate(all="ignore"):
        edit(logits, sequences)
        for row, sequence in zip(logits, sequences, strict=True):
            if sequence.request.grammar is not None:
                sequence.request.grammar.restrict(row)
        random = [r for r, seq in enumerate(sequences) if seq.request.sampling.temperature > 0.0]
        params = [sequences[row].request.sampling for row in random]
        indices = [sequences[row].num_output_tokens for row in random]
        if len(random) == len(sequences):
            return draw(logits, params, indices)
        tokens: list[int] = logits.argmax(-1).tolist()
        if random:
            _set(tokens, random, draw(logits[random], params, indices))
    return tokens


def _is_plain(request: Request) -> bool:
    return request.sampling.is_plain and request.grammar is None


def _follow(sequences: Seq[Sequence]) -> None:
    for sequence in sequences:
        if sequence.request.grammar is not None:
            num_prompt = len(sequence.request.prompt_token_ids)
            sequence.request.grammar.follow(sequence.token_ids, num_prompt)


def _forbids(grammar: Grammar | None, token_id: int) -> bool:
    return grammar is not None and not grammar.allows(token_id)


def _rows(logits: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """A copy; indexing with a list would take several times as long."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


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
    chosen = [tokens[row] for row in rows]
    found = logprobs_of(_rows(logits, rows), chosen, [count for _, count in wanted])
    for row, logprobs in zip(rows, found, strict=True):
        sequences[row].sampling.last_logprobs = logprobs
