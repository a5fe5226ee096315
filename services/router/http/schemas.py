"""OpenAI request bodies: what is understood, what is ignored, and what is refused by name.

Types are checked here (strictly: no "0.5" for a number), ranges by TextRequest, which the gRPC
front door shares. A field that would change the output is supported or refused, never dropped.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

from services.common.errors import InvalidRequest
from services.router.request import (
    CHAT_MAX_TOKENS,
    COMPLETION_MAX_TOKENS,
    ChatPrompt,
    Prompt,
    Sampling,
    TextRequest,
)

T = TypeVar("T")


class _FailFast(FailFast):
    """Python 3.11 wants parts of unions hashable."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


#: One error is enough: millions of wrong items would cost far more than the body itself.
Items: TypeAlias = Annotated[list[T], _FailFast()]

#: Fields that never change what is generated.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "prediction"}
)

#: Fields that are not supported, with the values that mean what we do anyway (as null always does).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
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


class OpenAiBody(_Strict):
    """What both routes have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

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

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # Both spellings of "all".
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
        )

    def stop_strings(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


class CompletionBody(OpenAiBody):
    prompt: str | Items[int] | Items[str] | Items[Items[int]]

    def to_request(self) -> TextRequest:
        return TextRequest(
            model=self.model,
            prompts=self._prompts(),
            max_tokens=self.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            sampling=self.sampling(),
            stop=self.stop_strings(),
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
    content: str | Items[TextPart] | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates of open models know the older of the two words.
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


class ChatBody(OpenAiBody):
    messages: Items[Message]
    max_completion_tokens: int | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if not self.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        for index, message in enumerate(self.messages):
            _check_extra(message.model_extra or {}, f"messages[{index}].")

    def to_request(self) -> TextRequest:
        max_tokens = self.max_completion_tokens
        return TextRequest(
            model=self.model,
            prompts=(ChatPrompt(tuple(message.for_template() for message in self.messages)),),
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            default_max_tokens=CHAT_MAX_TOKENS,
            sampling=self.sampling(),
            stop=self.stop_strings(),
        )


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
