"""OpenAI request bodies: what is understood, what is ignored, and what is refused by name.

Types are checked here (strictly: no "0.5" for a number), ranges by TextRequest, which the gRPC
front door shares. A field that would change the output is supported or refused, never dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

from services.common.errors import InvalidRequest
from services.common.sampling import MAX_LOGPROBS, SamplingParams
from services.router.http.request_body import RequestBody
from services.router.request import (
    CHAT_MAX_TOKENS,
    COMPLETION_MAX_TOKENS,
    ChatPrompt,
    Prompt,
    TextRequest,
)

T = TypeVar("T")


class _FailFast(FailFast):
    """Python 3.11 wants parts of unions hashable."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


#: One error is enough: millions of wrong items would cost far more than the body itself.
Items: TypeAlias = Annotated[list[T], _FailFast()]

MAX_MESSAGES = 16_384

#: Fields that never change what is generated.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "prediction"}
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
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
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

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to tell for each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_fields(self) -> None:
        """Raises InvalidRequest naming a field that is unknown or asks for what is not there."""
        _check_extra(self.model_extra or {}, "")
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


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates of open models know the older of the two words.
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


def chat_prompt(messages: Sequence[Message]) -> ChatPrompt:
    """Raises InvalidRequest naming a field of a message that is not known."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must be 1 to {MAX_MESSAGES}", param="messages")
    for index, message in enumerate(messages):
        _check_extra(message.model_extra or {}, f"messages[{index}].")
    return ChatPrompt(tuple(message.for_template() for message in messages))


class ChatBody(OpenAiBody):
    messages: Items[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_fields(self) -> None:
        super().check_fields()
        _check_top_logprobs(self.top_logprobs, bool(self.logprobs))

    def without_prompt(self) -> Self:
        return self.model_copy(update={"messages": []})

    def to_request(self) -> TextRequest:
        max_tokens = self.max_completion_tokens
        return TextRequest(
            prompts=(chat_prompt(self.messages),),
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            default_max_tokens=CHAT_MAX_TOKENS,
            **self.common(),
        )


def _check_top_logprobs(top_logprobs: int | None, has_logprobs: bool) -> None:
    """Under its own name: the parameters further in know it as logprobs."""
    if top_logprobs is None:
        return
    if not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param="top_logprobs"
        )
    if top_logprobs and not has_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def _check_extra(extra: Mapping[str, Any], prefix: str) -> None:
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
