"""OpenAI request bodies: what is understood, what is ignored, and what is refused by name.

Types are checked here (strictly: no "0.5" for a number), ranges by TextRequest, which the gRPC
front door shares. A field that would change the output is supported or refused, never dropped.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.router.http.formats import ResponseFormat
from services.router.http.request_body import RequestBody
from services.router.http.strict import Items, Strict
from services.router.request import (
    COMPLETION_MAX_TOKENS,
    Prompt,
    TextRequest,
)

#: Fields that never change what is generated.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options", "prediction"}
)

#: Fields that are not supported, with the values that mean what we do anyway (as null always does).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


class StreamOptions(Strict):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    #: Padding against eavesdroppers by size; accepted, never sent.
    include_obfuscation: bool | None = None


class OpenAiBody(RequestBody):
    """What both routes have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to tell for each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_fields(self) -> None:
        """Raises InvalidRequest naming a field that is unknown or asks for what is not there."""
        check_extra(self.model_extra or {}, "")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs is only there without stream", param="prompt_logprobs"
            )

    def common(self) -> dict[str, Any]:
        """The fields of a TextRequest that both routes fill alike."""
        return {
            "model": self.model,
            "sampling": self._sampling(),
            "seed": self.seed,
            "n": 1 if self.n is None else self.n,
            "stop": self._stop_strings(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "grammar": self.response_format.grammar() if self.response_format else None,
        }

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # Both spellings of "all".
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(),
            min_tokens=self.min_tokens or 0,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _logit_bias(self) -> dict[int, float]:
        """JSON has the token ids as strings."""
        bias = self.logit_bias or {}
        if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        return {int(key): value for key, value in bias.items()}

    def _stop_strings(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


class CompletionBody(OpenAiBody):
    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check_fields(self) -> None:
        super().check_fields()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of must be n: nothing is ranked here", param="best_of")

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": ""})

    def to_request(self) -> TextRequest:
        return TextRequest(
            prompts=self._prompts(),
            max_tokens=self.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            echo=bool(self.echo),
            **self.common(),
        )

    def _prompts(self) -> tuple[Prompt, ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        token_ids = tuple(item for item in self.prompt if isinstance(item, int))
        if token_ids:
            return (token_ids,)
        return tuple(
            item if isinstance(item, str) else tuple(item)
            for item in self.prompt
            if not isinstance(item, int)
        )


def check_extra(extra: Mapping[str, Any], prefix: str) -> None:
    """Raises InvalidRequest for a field that would change the answer and is not understood."""
    for name, value in extra.items():
        if value is None or name in _IGNORED:
            continue
        # True equals 1 in Python, but not here.
        if any(value == good and type(value) in _alike(good) for good in _NEUTRAL.get(name, ())):
            continue
        raise InvalidRequest(
            f"{prefix}{name} is not supported with this value"
            if name in _NEUTRAL
            else f"{prefix}{name} is not a known parameter",
            param=f"{prefix}{name}",
        )


def _alike(value: object) -> tuple[type, ...]:
    return (int, float) if type(value) is int else (type(value),)
