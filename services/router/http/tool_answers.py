"""Answers of chats with tools: text becomes calls of functions. Pure; used by the routes."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.choice import TextEvent
from services.router.http.answers import ChatAnswer, FinishedChoice
from services.router.tools.call_parser import CallDelta, CallParser, Delta


@dataclass(frozen=True, slots=True)
class ToolAnswer(ChatAnswer):
    new_parser: Callable[[], CallParser]
    _parsers: dict[int, CallParser] = field(default_factory=dict, init=False)
    """Of the choices that stream."""

    def message(self, choice: FinishedChoice) -> tuple[dict[str, Any], str]:
        parser = self.new_parser()
        deltas = parser.push(choice.text) + parser.flush()
        text = "".join(delta for delta in deltas if isinstance(delta, str))
        message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
        if parser.num_calls:
            message["tool_calls"] = _calls(deltas, parser.num_calls)
        return message, _reason(parser, choice.finish_reason)

    def chunks(self, event: TextEvent, is_first: bool) -> list[dict[str, Any]]:
        parser = self._parsers.setdefault(event.index, self.new_parser())
        deltas = parser.push(event.text)
        if event.finish_reason is not None:
            deltas += parser.flush()
        bodies = [{"role": "assistant", "content": None}] if is_first else []
        bodies += [_delta(delta) for delta in deltas]
        if event.logprobs and not deltas:
            bodies.append({})
        # Log probabilities are of the tokens of the whole event: they go with its last piece.
        tokens = [()] * (len(bodies) - 1) + [event.logprobs]
        chunks = [
            self.chunk_of(event.index, body, tokens=shown)
            for body, shown in zip(bodies, tokens, strict=False)
        ]
        if event.finish_reason is not None:
            reason = _reason(parser, event.finish_reason)
            chunks.append(self.chunk_of(event.index, {}, reason))
        return chunks


def _reason(parser: CallParser, reason: str) -> str:
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


def _calls(deltas: Sequence[Delta], num_calls: int) -> list[dict[str, Any]]:
    names, arguments = [""] * num_calls, [""] * num_calls
    for delta in deltas:
        if isinstance(delta, CallDelta):
            names[delta.index] += delta.name
            arguments[delta.index] += delta.arguments
    return [
        {"id": _new_id(), "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in zip(names, arguments, strict=True)
    ]


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, str):
        return {"content": delta}
    if not delta.name:
        call = {"index": delta.index, "function": {"arguments": delta.arguments}}
        return {"tool_calls": [call]}
    function = {"name": delta.name, "arguments": ""}
    head = {"index": delta.index, "id": _new_id(), "type": "function", "function": function}
    return {"tool_calls": [head]}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
