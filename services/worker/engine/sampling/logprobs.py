"""Log probabilities as the model itself has them: before bias, penalties and temperature.

Called by the sampler for output tokens and by the runner for those of prompts.
"""

from collections.abc import Sequence as Seq

import torch

from services.worker.engine.sampling.state import TokenLogprobs


def logprobs_of(
    logits: torch.Tensor, token_ids: Seq[int], num_top: Seq[int]
) -> list[TokenLogprobs]:
    """For row i of `logits`, of `token_ids[i]` and of the `num_top[i]` likeliest tokens."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    wanted = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = (logits.gather(-1, wanted) - normaliser).squeeze(-1).tolist()
    top, top_ids = logits.topk(min(max(num_top), logits.shape[-1]), -1)
    top -= normaliser
    return [
        TokenLogprobs(own, tuple(ids[:count]), tuple(values[:count]))
        for own, ids, values, count in zip(
            chosen, top_ids.tolist(), top.tolist(), num_top, strict=True
        )
    ]
