"""What a request wants of its tokens, with the range of every parameter. Pure.

Built by the router from a client's words and by the worker from the wire; a value out of range
never gets past the constructor, so that nothing behind it has to check again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0 means all; one seed, the same tokens in any batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    """Drops tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, below zero) the logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """The same, as many times as the token is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """Tokens before which the sequence does not stop."""
    logprobs: int | None = None
    """How many of the likeliest tokens to tell for each output token, besides the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        _check(self.top_k >= 0, "top_k", "0 (all) or a number of tokens")
        _check(0 <= self.seed < 2**64, "seed", "a number of 64 bits")
        _between("min_p", self.min_p, 0.0, 1.0)
        low = 1.0 / MAX_REPETITION_PENALTY
        _between("repetition_penalty", self.repetition_penalty, low, MAX_REPETITION_PENALTY)
        _between("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _between("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        num_biased = len(self.logit_bias)
        _check(num_biased <= MAX_BIASED_TOKENS, "logit_bias", f"at most {MAX_BIASED_TOKENS} tokens")
        for bias in self.logit_bias.values():
            _between("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        _check(self.min_tokens >= 0, "min_tokens", "at least 0")
        _between("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS)
        _between("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS)

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the likeliest one and nothing else is asked for."""
        return (
            self.temperature == 0.0
            and self.logprobs is None
            and not self.min_tokens
            and not self.logit_bias
            and not self.has_penalties
        )


def _between(param: str, value: float, low: float, high: float) -> None:
    # Not a number compares as false, so it is refused here, too.
    _check(low <= value <= high, param, f"between {low:g} and {high:g}")


def _check(is_good: bool, param: str, wanted: str) -> None:
    if not is_good:
        raise InvalidRequest(f"{param} must be {wanted}", param)


GREEDY = SamplingParams()
