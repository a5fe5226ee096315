"""The stream of one chat answer, read from a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.addresses import free_ports
from services.common.errors import InfiniteLLMError, Unavailable
from services.local.client import ChatRequest, Delta, parse_event, stream_chat

REQUEST = ChatRequest("m", "hello", max_tokens=2)


def event(text: str | None) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})


@asynccontextmanager
async def answering(status: str, *lines: str) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A server that gives every request the same answer and keeps the bodies."""
    bodies: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        body = "".join(f"{line}\n\n" for line in lines)
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies


async def collect(url: str) -> list[Delta]:
    return [delta async for delta in stream_chat(url, REQUEST)]


async def test_the_pieces_arrive_in_order_with_the_counts_at_the_end() -> None:
    lines = (f"data: {event('Good ')}", ": ping", f"data: {event('day')}", f"data: {USAGE}")
    async with answering("200 OK", *lines, "data: [DONE]") as (url, bodies):
        assert await collect(url) == [Delta("Good "), Delta("day"), Delta("", 7, 2)]
    assert bodies[0]["temperature"] == 0
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "too long"}}', "too long"),
        ("Bad Gateway", "Bad Gateway"),
        ('{"error": "odd"}', '{"error": "odd"}'),
    ],
)
async def test_a_refusal_is_an_error_with_the_servers_words(body: str, message: str) -> None:
    async with answering("400 Bad Request", body) as (url, _):
        with pytest.raises(InfiniteLLMError) as caught:
            await collect(url)
    assert caught.value.message.strip() == message


async def test_an_error_in_the_stream_ends_it() -> None:
    lines = (f"data: {event('Good ')}", 'data: {"error": {"message": "instance lost"}}')
    async with answering("200 OK", *lines) as (url, _):
        with pytest.raises(InfiniteLLMError, match="instance lost"):
            await collect(url)


async def test_no_router_is_unavailable() -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unavailable):
        await collect(f"http://127.0.0.1:{port}")


def test_an_event_without_text_is_empty() -> None:
    assert parse_event(event(None)) == Delta("")
