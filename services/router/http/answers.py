"""OpenAI response bodies and stream chunks. Pure; the routes fill and send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.generation import TextEvent, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: str


class Answer(Protocol):
    """Writes the bodies of one request, in the shape of its route."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        """`is_first`: nothing has been sent for this choice yet."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Head:
    req_id: int
    created: int
    model: str
    include_usage: bool

    def body(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.req_id:x}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # Clients that ask for usage find the key in every chunk, filled in the last.
        usage = {"usage": None} if self.include_usage else {}
        return {**self.body(prefix, kind, choices), **usage}


class CompletionAnswer(_Head):
    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        bodies = [
            _text_choice(index, choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self.body("cmpl", "text_completion", bodies), "usage": _usage(usage)}

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        choice = _text_choice(event.index, event.text, event.finish_reason)
        return [self.chunk("cmpl", "text_completion", [choice])]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.body("cmpl", "text_completion", []), "usage": _usage(usage)}


class ChatAnswer(_Head):
    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        bodies = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self.body("chatcmpl", "chat.completion", bodies), "usage": _usage(usage)}

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        deltas: list[tuple[dict[str, str], str | None]] = []
        if is_first:
            deltas.append(({"role": "assistant", "content": ""}, None))
        if event.text:
            deltas.append(({"content": event.text}, None))
        if event.finish_reason is not None:
            deltas.append(({}, event.finish_reason))
        return [self._chunk(event.index, delta, reason) for delta, reason in deltas]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.body("chatcmpl", "chat.completion.chunk", []), "usage": _usage(usage)}

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.chunk("chatcmpl", "chat.completion.chunk", [choice])


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
