"""Streams one chat answer from the router, as any client would."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from services.common.errors import InfiniteLLMError, Unavailable

#: Longest silence: the whole prompt is computed before the first token comes.
_READ_DEADLINE_S = 600.0
_CONNECT_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Greedy, and exactly `max_tokens` long: end tokens do not end it."""

    model: str
    prompt: str
    max_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Delta:
    """One event of the stream; the last one carries the token counts."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def stream_chat(http_url: str, request: ChatRequest) -> AsyncIterator[Delta]:
    """Raises an error of ours where the answer is not a stream that ends well."""
    timeout = httpx.Timeout(_READ_DEADLINE_S, connect=_CONNECT_DEADLINE_S)
    url = f"{http_url}/v1/chat/completions"
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as client,
            client.stream("POST", url, json=request.body()) as response,
        ):
            if response.is_error:
                raise InfiniteLLMError(_message_of((await response.aread()).decode()))
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data != line and data != "[DONE]":
                    yield parse_event(data)
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}: {error!r}") from error


def _message_of(body: str) -> str:
    """What an error answer says; as it is where it is not one of the router's."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body


def parse_event(data: str) -> Delta:
    event = json.loads(data)
    if "error" in event:
        raise InfiniteLLMError(event["error"]["message"])
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    usage = event.get("usage") or {}
    return Delta(text, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
