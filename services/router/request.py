"""What a client asks for, whichever door it came through, and the checks that need no model.

Built by the HTTP schemas and the gRPC front door; run by generation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.router.grammars.output_grammar import OutputGrammar
from services.router.tools.use import ToolUse

MAX_PROMPTS = 64
MAX_CHOICES = 128
MAX_STOP_TOKENS = 128
MAX_SALT_CHARS = 256
MAX_STOP_STRINGS = 4
MAX_TEMPERATURE = 2.0
#: Default of chat requests, as far as the context and the cluster allow.
CHAT_MAX_TOKENS = 1024
#: Default of plain completions, as OpenAI has it.
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, still without the model's template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Prompt: TypeAlias = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    model: str
    prompts: tuple[Prompt, ...]
    """Each becomes `n` choices of the answer."""
    max_tokens: int | None
    default_max_tokens: int
    """Used where max_tokens is None; shrinks to what fits instead of failing."""
    sampling: SamplingParams
    """All but the seed, of which every choice has its own."""
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    echo: bool = False
    """The text, and the log probabilities, begin with the prompt's."""
    priority: int = 0
    """Smaller goes first."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    grammar: OutputGrammar | None = None
    """What every choice must match."""
    tools: ToolUse | None = None
    """What every choice may call."""

    def __post_init__(self) -> None:
        _check(0 < len(self.prompts) <= MAX_PROMPTS, "prompt", f"1 to {MAX_PROMPTS} prompts")
        is_enough = self.max_tokens is None or self.max_tokens >= (0 if self.echo else 1)
        _check(is_enough, "max_tokens", "at least 1, or 0 with echo")
        max_choices = MAX_CHOICES // len(self.prompts)
        _check(1 <= self.n <= max_choices, "n", f"between 1 and {max_choices}, over all prompts")
        _check(-(2**31) <= self.priority < 2**31, "priority", "a number of 32 bits")
        is_short = len(self.cache_salt) <= MAX_SALT_CHARS
        _check(is_short, "cache_salt", f"at most {MAX_SALT_CHARS} characters long")
        self._check_sampling()
        self._check_stops()

    def _check_sampling(self) -> None:
        sampling, seed = self.sampling, self.seed
        is_cool = sampling.temperature <= MAX_TEMPERATURE
        _check(is_cool, "temperature", f"between 0 and {MAX_TEMPERATURE:g}")
        _check(sampling.top_k < 2**32, "top_k", "a number of tokens")
        _check(seed is None or -(2**63) <= seed < 2**64, "seed", "a number of 64 bits")
        _check(sampling.min_tokens < 2**32, "min_tokens", "a number of tokens")

    def _check_stops(self) -> None:
        num_ids = len(self.stop_token_ids)
        _check(num_ids <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} ids")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _check(all(self.stop), "stop", "strings that are not empty")
        has_format = self.grammar is not None or self.tools is not None
        is_endless = self.ignore_eos and has_format
        _check(not is_endless, "ignore_eos", "false where the output has a format: it ends by that")

    @property
    def prompt_param(self) -> str:
        """The name of the prompt's field in the client's request."""
        return "messages" if isinstance(self.prompts[0], ChatPrompt) else "prompt"


def _check(is_good: bool, param: str, wanted: str) -> None:
    if not is_good:
        raise InvalidRequest(f"{param} must be {wanted}", param=param)
