"""Text through the real app, over loopback, in OpenAI's words."""

import json
from typing import Any

import httpx

from tests.unit.router.cluster import LENGTH, MODEL, TOKENIZER, FakeWorker, running, say

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello world"}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_chat() -> None:
    worker = FakeWorker(1, say("hello €"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["created"] > 1_700_000_000
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello €", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    num_prompt_tokens = len(TOKENIZER.encode(prompt).ids)
    num_tokens = len(TOKENIZER.encode("hello €").ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert list(worker.requests[0].prompt_token_ids) == TOKENIZER.encode(prompt).ids
    assert worker.requests[0].max_tokens == 512 - num_prompt_tokens


async def test_chat_stream() -> None:
    worker = FakeWorker(1, say("hello €", finish_reason=LENGTH))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *texts, last, usage = chunks
    assert texts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == "hello €"
    assert all(chunk["usage"] is None for chunk in (*texts, last))
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(TOKENIZER.encode("hello €").ids)


async def test_completion() -> None:
    worker = FakeWorker(1, say("x" * 100))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=COMPLETION)
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"]["completion_tokens"] == 16


async def test_completion_stream_without_usage() -> None:
    worker = FakeWorker(1, say("hello", size=3))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=COMPLETION | {"stream": True})
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert not any("usage" in chunk for chunk in chunks)
