"""What a client asks for, whichever door it came through, and the checks that need no model.

Built by the HTTP schemas and the gRPC front door; run by generation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from services.common.errors import InvalidRequest

MAX_PROMPTS = 64
MAX_STOP_STRINGS = 4
MAX_TEMPERATURE = 2.0
#: Default of chat requests, as far as the context and the cluster allow.
CHAT_MAX_TOKENS = 1024
#: Default of plain completions, as OpenAI has it.
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, still without the model's template."""

    messages: tuple[Mapping[str, str], ...]


Prompt: TypeAlias = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    model: str
    prompts: tuple[Prompt, ...]
    """Each becomes one choice of the answer."""
    max_tokens: int | None
    default_max_tokens: int
    """Used where max_tokens is None; shrinks to what fits instead of failing."""
    sampling: Sampling
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(0 < len(self.prompts) <= MAX_PROMPTS, "prompt", f"1 to {MAX_PROMPTS} prompts")
        _check(self.max_tokens is None or self.max_tokens > 0, "max_tokens", "at least 1")
        sampling = self.sampling
        in_range = 0 <= sampling.temperature <= MAX_TEMPERATURE
        _check(in_range, "temperature", f"between 0 and {MAX_TEMPERATURE:g}")
        _check(0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1")
        _check(0 <= sampling.top_k < 2**32, "top_k", "0 or -1 (all) or a number of tokens")
        seed = sampling.seed
        _check(seed is None or -(2**63) <= seed < 2**64, "seed", "a number of 64 bits")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _check(all(self.stop), "stop", "strings that are not empty")

    @property
    def prompt_param(self) -> str:
        """The name of the prompt's field in the client's request."""
        return "messages" if isinstance(self.prompts[0], ChatPrompt) else "prompt"


def _check(is_good: bool, param: str, wanted: str) -> None:
    if not is_good:
        raise InvalidRequest(f"{param} must be {wanted}", param=param)
