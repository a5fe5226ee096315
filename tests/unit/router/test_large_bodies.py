"""Large bodies and prompts are worked on where the event loop does not wait for them."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Self

import pytest

from services.common.errors import InternalError, InvalidRequest
from services.router.http.chat import MAX_MESSAGES, ChatBody
from services.router.http.parsing import BodyParser
from services.router.http.schemas import CompletionBody
from services.router.request import ChatPrompt
from services.router.text.tokenizer import Tokenizer
from tests.unit.router.cluster import MODEL
from tests.unit.router.vocabulary import byte_level_bpe


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    parser = BodyParser(max_thread_bytes=200)
    yield parser
    parser.close()


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


class WhereItIs(CompletionBody):
    """Says in its answer which process has read it."""

    def without_prompt(self) -> Self:
        return self.model_copy(update={"user_process": os.getpid()})


async def test_only_large_bodies_go_to_another_process(parser: BodyParser) -> None:
    for size, is_here in [(10, True), (1000, False)]:
        body, request = await parser.parse(WhereItIs, raw(prompt="x" * size, stream=True))
        assert request.prompts == ("x" * size,)
        assert body.stream
        assert (getattr(body, "user_process") == os.getpid()) is is_here  # noqa: B009
    ids, request = await parser.parse(CompletionBody, raw(prompt=list(range(200)), logprobs=1))
    assert (ids.prompt, ids.num_logprobs) == ("", 1)
    assert request.prompts == (tuple(range(200)),)
    messages = [{"role": "user", "content": "x" * 1000}]
    chat, request = await parser.parse(ChatBody, raw(messages=messages))
    assert (chat.messages, request.prompts) == ([], (ChatPrompt(tuple(messages)),))


async def test_whatever_a_request_holds_comes_back(parser: BodyParser) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    fields = {
        "messages": [{"role": "user", "content": "x" * 1000}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for more in ({}, {"tools": None, "tool_choice": None, "response_format": shape}):
        body = raw(**(fields | more))
        there, here = await parser.parse(ChatBody, body), await BodyParser().parse(ChatBody, body)
        assert there == here


async def test_errors_come_back_with_their_field(parser: BodyParser) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["x" * 1000, 1]}, "prompt"),
        ({"prompt": "x" * 1000, "top_p": 2}, "top_p"),
        ({"prompt": "x" * 1000, "tempature": 1}, "tempature"),
    ]
    for fields, param in faults:
        with pytest.raises(InvalidRequest) as caught:
            await parser.parse(CompletionBody, raw(**fields))
        assert caught.value.param == param
    many = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    with pytest.raises(InvalidRequest) as caught:
        await parser.parse(ChatBody, raw(messages=many))
    assert caught.value.param == "messages"


class Deadly(CompletionBody):
    def check_fields(self) -> None:
        os._exit(1)


async def test_a_process_that_dies_is_started_again(parser: BodyParser) -> None:
    with pytest.raises(InternalError):
        await parser.parse(Deadly, raw(prompt="x" * 1000))
    _, request = await parser.parse(CompletionBody, raw(prompt="x" * 1000))
    assert request.prompts == ("x" * 1000,)


async def longest_wait_s(work: Awaitable[object]) -> tuple[float, float]:
    """Of the event loop while the work is under way, and how long that was."""
    task = asyncio.ensure_future(work)
    start_s = last_s = time.monotonic()
    longest_s = 0.0
    while not task.done():
        await asyncio.sleep(0)
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s, last_s - start_s


async def test_a_long_prompt_is_tokenised_beside_the_event_loop() -> None:
    """Whoever keeps the interpreter for himself makes the loop wait for all of the work."""
    tokenizer = Tokenizer(byte_level_bpe())
    text = "hello world " * 20_000
    shares = []
    for _ in range(3):  # the machine may be busy with others
        longest_s, whole_s = await longest_wait_s(tokenizer.encode(text, add_special_tokens=False))
        shares.append(longest_s / whole_s)
    tokenizer.close()
    assert min(shares) < 0.5
