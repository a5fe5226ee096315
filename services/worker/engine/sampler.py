"""Next tokens from logits. A greedy batch is one argmax; sampled rows draw by their own seed.

The draw of a token depends only on (seed, index of the token in the answer), so the same seed gives
the same tokens whatever else is in the batch, after preemption, and wherever the blocks lie.
Called by the engine once per step.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from services.worker.engine.sequence import SamplingParams


def sample(logits: torch.Tensor, params: Seq[SamplingParams], indices: Seq[int]) -> list[int]:
    """One token id per row of `logits` [rows, vocab]; row i draws output token `indices[i]`."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0.0]
    if random_rows:
        chosen = [params[row] for row in random_rows]
        drawn = _draw(logits[random_rows], chosen, [indices[row] for row in random_rows])
        for row, token in zip(random_rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: torch.Tensor, params: Seq[SamplingParams], indices: Seq[int]) -> list[int]:
    """Inverse-CDF sampling over the sorted, truncated distribution, in float64."""
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    probs, order = torch.softmax(logits.double() / temperature, dim=-1).sort(-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    top_k = torch.tensor([[p.top_k or probs.shape[-1]] for p in params])
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64)
    # Keep the smallest set whose mass reaches top_p: a token stays while what precedes it is less.
    mass_before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((rank >= top_k) | ((mass_before >= top_p) & (rank > 0)), 0.0)
    cumulative = probs.cumsum(-1)
    uniform = torch.tensor([[_uniform(p.seed, i)] for p, i in zip(params, indices, strict=True)])
    picked = torch.searchsorted(cumulative, uniform.double() * cumulative[:, -1:], right=True)
    last_kept = (probs > 0).sum(-1, keepdim=True) - 1
    tokens: list[int] = order.gather(-1, torch.minimum(picked, last_kept)).squeeze(-1).tolist()
    return tokens


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state to keep or to lose."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
