"""Draws tokens from logits, each row by its own seed. Called by the sampler.

The draw of a token depends only on (seed, index of the token in the answer), and runs through the
vocabulary in the order of token ids, not of probabilities: rounding, which differs with what else
is in the batch, may swap two equally likely tokens, and must not change the draw.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from services.common.sampling import SamplingParams

#: The likeliest tokens, among which the cut of top_k and top_p nearly always lies.
NUM_CANDIDATES = 512


def draw(logits: torch.Tensor, params: Seq[SamplingParams], indices: Seq[int]) -> list[int]:
    """One token per row; row i draws output token `indices[i]` of its sequence."""
    weights = weights_of(logits, params)
    cumulative = weights.cumsum(-1)
    uniform = [_uniform(p.seed, index) for p, index in zip(params, indices, strict=True)]
    at = _column(uniform, logits) * cumulative[:, -1:]
    # Rounding must not push the draw to the very end, beyond the last weight.
    at = torch.minimum(at, cumulative[:, -1:].nextafter(torch.zeros_like(at)))
    picked = torch.searchsorted(cumulative, at, right=True).squeeze(-1)
    tokens: list[int] = picked.clamp(max=weights.shape[-1] - 1).tolist()
    return tokens


def weights_of(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """How likely each token is, over the likeliest one; zero where it is cut off. Float64.

    Order: temperature, min_p, top_k, top_p. Each cut sees the distribution that the one before it
    left, as in vLLM; top_p keeps the smallest set whose mass reaches it. Of equally likely tokens
    at a cut the smaller ids stay.
    """
    temperature = _column([p.temperature for p in params], logits)
    weights = logits.double()
    weights -= weights.amax(-1, keepdim=True)
    weights.div_(temperature).exp_()
    if any(p.min_p > 0.0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits), 0.0)
    rows = [row for row, p in enumerate(params) if p.truncates]
    if rows:
        weights[rows] = _truncated(weights[rows], [params[row] for row in rows])
    return weights


def _truncated(weights: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """`weights` with zeros for all that top_k and top_p drop."""
    vocab_size = weights.shape[-1]
    candidates = weights.topk(min(NUM_CANDIDATES, vocab_size), -1).values
    num_kept, is_certain = _num_kept(candidates, weights, params)
    if not is_certain:
        candidates = weights.sort(-1, descending=True).values
        num_kept, _ = _num_kept(candidates, weights, params)
    least = candidates.gather(-1, num_kept - 1)
    num_ties_kept = num_kept - (candidates > least).sum(-1, keepdim=True)
    is_kept = weights >= least
    is_tie = weights == least
    if bool((is_tie.sum(-1, keepdim=True) > num_ties_kept).any()):
        is_kept &= ~is_tie | (is_tie.cumsum(-1) <= num_ties_kept)
    return weights.masked_fill(~is_kept, 0.0)


def _num_kept(
    candidates: torch.Tensor, weights: torch.Tensor, params: Seq[SamplingParams]
) -> tuple[torch.Tensor, bool]:
    """How many of the likeliest tokens each row keeps, and whether the candidates suffice to say.

    `candidates` are the largest weights of each row, in descending order.
    """
    num_candidates, vocab_size = candidates.shape[-1], weights.shape[-1]
    kept_by_k = [[min(p.top_k or vocab_size, vocab_size)] for p in params]
    top_k = torch.tensor(kept_by_k, device=weights.device)
    top_p = _column([p.top_p for p in params], weights)
    mass = candidates.cumsum(-1)
    has_all = top_k <= num_candidates
    within_k = mass.gather(-1, top_k.clamp(max=num_candidates) - 1)
    total = torch.where(has_all, within_k, weights.sum(-1, keepdim=True))
    # A token stays while what precedes it has not reached top_p; the first one always does.
    num_kept = (mass < top_p * total).sum(-1, keepdim=True) + 1
    # Without top_p rounding alone could drop the last ones.
    num_kept = torch.where(top_p < 1.0, torch.minimum(num_kept, top_k), top_k)
    is_certain = (num_kept <= num_candidates) & (has_all | (top_k == vocab_size))
    return num_kept.clamp(max=num_candidates), bool(is_certain.all())


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state to keep or to lose."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
