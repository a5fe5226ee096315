"""Draws tokens from logits, each row by its own seed. Called by the sampler.

The draw of a token depends only on (seed, index of the token in the answer). It is a race: token i
arrives after a time that is exponential with its weight as the rate, and the first one is drawn,
which is token i as often as its weight says. Rounding, which differs with how a context was
computed (in chunks or token by token, here or elsewhere), then changes what is drawn only where two
arrive all but together: as rarely as two distributions that close allow at all. Looking a number
up in the running sums of the weights would hit upon it a thousand times as often where thousands
of tokens are possible, since there every border moves by all the rounding before it.

In numpy, whose selection and comparisons on a CPU are several times as fast as torch's.
"""

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from services.common.sampling import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

#: The likeliest tokens, among which the cut of top_k and top_p nearly always lies.
NUM_CANDIDATES = 512
#: Of the weights that tell whether most tokens of a row may come.
SAMPLE_STRIDE = 64

#: Below it there is but one token anyway, and the division overflows.
LEAST_TEMPERATURE = 1e-30

#: Tokens that race as one first, and then among each other: one number for each would take longest.
SPAN = 64

#: A time to arrive that is 0 would make a token without weight come, too.
LEAST_TIME = 1e-300


def draw(logits: Floats, params: Seq[SamplingParams], indices: Seq[int]) -> list[int]:
    """One token per row; row i draws output token `indices[i]` of its sequence."""
    weights = weights_of(logits, params)
    num_rows, vocab_size = weights.shape
    if vocab_size % SPAN:
        weights = np.pad(weights, ((0, 0), (0, -vocab_size % SPAN)))
    spans = weights.reshape(num_rows, -1, SPAN)
    num_spans = spans.shape[1]
    times = _times([p.seed for p in params], indices, num_spans + SPAN)
    span = (spans.sum(-1) / times[:, :num_spans]).argmax(-1)
    token = (spans[np.arange(num_rows), span] / times[:, num_spans:]).argmax(-1)
    tokens: list[int] = (span * SPAN + token).tolist()
    return tokens


def weights_of(logits: Floats, params: Seq[SamplingParams]) -> Floats:
    """How likely each token is, over the likeliest one; zero where it is cut off.

    Order: temperature, min_p, top_k, top_p. Each cut sees the distribution that the one before it
    left, as in vLLM; top_p keeps the smallest set whose mass reaches it. Of equally likely tokens
    at a cut the smaller ids stay.
    """
    weights: Floats = logits - logits.max(-1, keepdims=True)
    weights /= _column([max(p.temperature, LEAST_TEMPERATURE) for p in params]).astype(np.float32)
    np.exp(weights, out=weights)
    if any(p.min_p > 0.0 for p in params):
        weights[weights < _column([p.min_p for p in params]).astype(np.float32)] = 0.0
    rows = [row for row, p in enumerate(params) if p.truncates]
    if len(rows) == len(params):
        _truncate(weights, params)
    elif rows:
        some = weights[rows]
        _truncate(some, [params[row] for row in rows])
        weights[rows] = some
    return weights


def _truncate(weights: Floats, params: Seq[SamplingParams]) -> None:
    """Zeros in place for all that top_k and top_p drop."""
    least, num_kept, is_certain = _cut(_largest(weights, NUM_CANDIDATES), weights, params)
    for row in np.flatnonzero(~is_certain).tolist():
        only = weights[row : row + 1]
        (least[row],), (num_kept[row],), _ = _cut(_largest(only, only.size), only, [params[row]])
    is_kept = weights >= least[:, None]
    for row in np.flatnonzero(np.count_nonzero(is_kept, axis=-1) > num_kept).tolist():
        _drop_ties(is_kept[row], weights[row], int(num_kept[row]))
    weights *= is_kept


def _cut(
    candidates: Floats, weights: Floats, params: Seq[SamplingParams]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Per row: the least weight that is kept, how many are kept, and whether this is certain.

    `candidates` are the largest weights of each row, in descending order; they may be too few.
    """
    num_candidates, vocab_size = candidates.shape[-1], weights.shape[-1]
    top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params])
    top_p = np.array([p.top_p for p in params])
    rows = np.arange(len(params))
    mass = candidates.cumsum(-1, dtype=np.float64)
    within_k = mass[rows, np.minimum(top_k, num_candidates) - 1]
    total = np.where(top_k <= num_candidates, within_k, weights.sum(-1))
    # A token stays while what precedes it has not reached top_p; the first one always does.
    num_kept = np.count_nonzero(mass < (top_p * total)[:, None], axis=-1) + 1
    # Without top_p rounding alone could drop the last ones.
    num_kept = np.where(top_p < 1.0, np.minimum(num_kept, top_k), top_k)
    knows_total = (top_k <= num_candidates) | (top_k == vocab_size)
    is_certain = (num_kept <= num_candidates) & knows_total
    least = candidates[rows, np.minimum(num_kept, num_candidates) - 1]
    return least, num_kept, is_certain


def _drop_ties(is_kept: NDArray[np.bool_], weights: Floats, num_kept: int) -> None:
    """More tokens are as likely as the last one kept than there are places: the first ones stay."""
    least = weights[is_kept].min(initial=np.inf)
    ties = np.flatnonzero(weights == least)
    num_ties_kept = num_kept - (np.count_nonzero(is_kept) - len(ties))
    is_kept[ties[num_ties_kept:]] = False


def _largest(weights: Floats, count: int) -> Floats:
    """Of each row, in descending order."""
    if count < weights.shape[-1] and _are_mostly_possible(weights):
        weights = np.partition(weights, -count, axis=-1)[:, -count:]
    return np.sort(weights, axis=-1)[:, -count:][:, ::-1]


def _are_mostly_possible(weights: Floats) -> bool:
    """Of each row: among many zeros, as a grammar leaves them, to partition takes ten times as long
    as to sort. A sample is enough to tell."""
    sample = weights[:, ::SAMPLE_STRIDE]
    return bool(np.count_nonzero(sample, axis=-1).min() > 0.6 * sample.shape[-1])


def _column(values: Seq[float]) -> Doubles:
    return np.array(values)[:, None]


def _times(seeds: Seq[int], indices: Seq[int], count: int) -> Doubles:
    """Of each row `count` exponential times, which follow from its seed and index alone.

    From a counter-based generator: no state to keep or to lose. The low half of the counter runs
    within a draw, the index is its high half.
    """
    uniform = [
        np.random.Generator(np.random.Philox(key=seed, counter=index << 128)).random(count)
        for seed, index in zip(seeds, indices, strict=True)
    ]
    return np.maximum(-np.log1p(-np.array(uniform)), LEAST_TIME)
