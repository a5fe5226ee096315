"""OpenAI response bodies and stream chunks. Pure; the routes fill and send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.choice import TextEvent
from services.router.generation import Usage
from services.router.http.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from services.router.text.logprobs import ShownToken


class FinishedChoice:
    """The events of one choice, gathered."""

    def __init__(self) -> None:
        self.finish_reason = "stop"
        self.logprobs: list[ShownToken] = []
        self.prompt_logprobs: list[ShownToken] = []
        self._pieces: list[str] = []

    def add(self, event: TextEvent) -> None:
        self._pieces.append(event.text)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        self.finish_reason = event.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class Answer(Protocol):
    """Writes the bodies of one request, in the shape of its route."""

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]: ...

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
    has_logprobs: bool

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
    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        bodies = [
            self._choice(index, choice.text, choice.finish_reason, choice.logprobs) | _extra(choice)
            for index, choice in enumerate(choices)
        ]
        return {**self.body("cmpl", "text_completion", bodies), "usage": _usage(usage)}

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        choice = self._choice(event.index, event.text, event.finish_reason, event.logprobs)
        return [self.chunk("cmpl", "text_completion", [choice])]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.body("cmpl", "text_completion", []), "usage": _usage(usage)}

    def _choice(
        self, index: int, text: str, finish_reason: str | None, tokens: Sequence[ShownToken]
    ) -> dict[str, Any]:
        logprobs = completion_logprobs(tokens) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatAnswer(_Head):
    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> dict[str, Any]:
        bodies = []
        for index, choice in enumerate(choices):
            message, reason = self.message(choice)
            logprobs = chat_logprobs(choice.logprobs) if self.has_logprobs else None
            body = {"index": index, "message": message, "logprobs": logprobs}
            bodies.append(body | {"finish_reason": reason})
        body = self.body("chatcmpl", "chat.completion", bodies)
        return body | {"usage": _usage(usage)} | _extra(choices[0])

    def message(self, choice: FinishedChoice) -> tuple[dict[str, Any], str]:
        """And why it ended."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return message, choice.finish_reason

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        chunks = []
        if is_first:
            chunks.append(self.chunk_of(event.index, {"role": "assistant", "content": ""}))
        if event.text or event.logprobs:
            delta = {"content": event.text}
            chunks.append(self.chunk_of(event.index, delta, tokens=event.logprobs))
        if event.finish_reason is not None:
            chunks.append(self.chunk_of(event.index, {}, event.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.body("chatcmpl", "chat.completion.chunk", []), "usage": _usage(usage)}

    def chunk_of(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        tokens: Sequence[ShownToken] = (),
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(tokens) if tokens and self.has_logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.chunk("chatcmpl", "chat.completion.chunk", [choice])


def _extra(choice: FinishedChoice) -> dict[str, Any]:
    """Only where it was asked for: a field that OpenAI's clients do not know."""
    if not choice.prompt_logprobs:
        return {}
    return {"prompt_logprobs": prompt_logprobs(choice.prompt_logprobs)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
