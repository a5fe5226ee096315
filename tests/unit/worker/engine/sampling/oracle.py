"""The sampler's rules once more, in plain Python over one row: slow, short, independent."""

import math
from collections import Counter
from collections.abc import Sequence as Seq

from services.common.sampling import SamplingParams


def edited(
    logits: Seq[float], params: SamplingParams, prompt: Seq[int], output: Seq[int], ends: set[int]
) -> list[float]:
    counts = Counter(output)
    result = []
    for token, logit in enumerate(logits):
        value = logit + params.logit_bias.get(token, 0.0)
        if token in counts or token in prompt:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty if token in counts else 0.0
        result.append(-math.inf if len(output) < params.min_tokens and token in ends else value)
    return result


def distribution(logits: Seq[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min_p, top_k and top_p."""
    highest = max(logits)
    probs = normal([math.exp((logit - highest) / params.temperature) for logit in logits])
    probs = normal([p if p >= params.min_p * max(probs) else 0.0 for p in probs])
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = set(ranked[: params.top_k or len(probs)])
    probs = normal([p if token in kept else 0.0 for token, p in enumerate(probs)])
    mass = 0.0
    for token in ranked:
        if params.top_p < 1.0 and mass >= params.top_p:
            kept.discard(token)
        mass += probs[token]
    return normal([p if token in kept else 0.0 for token, p in enumerate(probs)])


def normal(weights: Seq[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
