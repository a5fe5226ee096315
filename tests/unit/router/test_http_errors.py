"""Bad input gets an OpenAI error body at once, by table, and the next request works."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.common.errors import InvalidRequest
from services.router.http.body import parse_body
from services.router.http.chat import ChatBody
from services.router.http.schemas import CompletionBody, OpenAiBody
from tests.unit.router.cluster import MODEL, FakeWorker, running, say

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello"}


@dataclass(frozen=True)
class Bad:
    name: str
    path: str
    body: Any
    status: int
    code: str
    param: str | None = None


def chat(name: str, change: dict[str, Any], param: str, status: int = 400) -> Bad:
    return Bad(name, "chat/completions", CHAT | change, status, "invalid_request", param)


def completion(name: str, change: dict[str, Any], param: str) -> Bad:
    return Bad(name, "completions", COMPLETION | change, 400, "invalid_request", param)


def message(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def tool(parameters: dict[str, Any] | None = None, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def required(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"tools": list(tools), "tool_choice": "required"}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OBJECT = {"type": "json_object"}

TABLE = [
    Bad("not JSON", "completions", b"{", 400, "invalid_request"),
    Bad("no body", "completions", b"", 400, "invalid_request"),
    Bad("not UTF-8", "completions", b'{"model": "\xff"}', 400, "invalid_request"),
    Bad("not an object", "completions", b"[1]", 400, "invalid_request"),
    Bad("too deep", "completions", b"[" * 100_000, 400, "invalid_request"),
    Bad("no model", "completions", {"prompt": "x"}, 400, "invalid_request", "model"),
    Bad("no prompt", "completions", {"model": MODEL}, 400, "invalid_request", "prompt"),
    Bad("model", "completions", COMPLETION | {"model": "x"}, 404, "model_not_found", "model"),
    Bad("chat model", "chat/completions", CHAT | {"model": "x"}, 404, "model_not_found", "model"),
    completion("prompt type", {"prompt": 7}, "prompt"),
    completion("prompt mixed", {"prompt": ["a", 1]}, "prompt"),
    completion("prompt empty", {"prompt": ""}, "prompt"),
    completion("prompt empty list", {"prompt": []}, "prompt"),
    completion("prompt empty ids", {"prompt": [[]]}, "prompt"),
    completion("prompt booleans", {"prompt": [True]}, "prompt"),
    completion("ids too large", {"prompt": [1, 100_000]}, "prompt"),
    completion("ids negative", {"prompt": [1, -1]}, "prompt"),
    completion("ids huge", {"prompt": [2**70]}, "prompt"),
    completion("too many prompts", {"prompt": ["a"] * 65}, "prompt"),
    completion("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
    completion("max_tokens text", {"max_tokens": "5"}, "max_tokens"),
    completion("max_tokens fraction", {"max_tokens": 1.5}, "max_tokens"),
    completion("temperature high", {"temperature": 2.5}, "temperature"),
    completion("temperature low", {"temperature": -0.1}, "temperature"),
    completion("temperature text", {"temperature": "hot"}, "temperature"),
    completion("top_p zero", {"top_p": 0}, "top_p"),
    completion("top_p high", {"top_p": 1.1}, "top_p"),
    completion("top_k low", {"top_k": -2}, "top_k"),
    completion("seed large", {"seed": 2**64}, "seed"),
    completion("stop many", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    completion("stop empty", {"stop": ["a", ""]}, "stop"),
    completion("stop type", {"stop": 5}, "stop"),
    completion("stop item", {"stop": ["a", 5]}, "stop"),
    completion("stream text", {"stream": "yes"}, "stream"),
    completion("options alone", {"stream_options": {"include_usage": True}}, "stream_options"),
    completion("n zero", {"n": 0}, "n"),
    completion("n true", {"n": True}, "n"),
    completion("n large", {"n": 129}, "n"),
    completion("n over prompts", {"n": 65, "prompt": ["a", "b"]}, "n"),
    completion("echo text", {"echo": "yes"}, "echo"),
    completion("logprobs boolean", {"logprobs": True}, "logprobs"),
    completion("logprobs many", {"logprobs": 21}, "logprobs"),
    completion("prompt_logprobs", {"prompt_logprobs": -1}, "prompt_logprobs"),
    completion(
        "prompt_logprobs streamed", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"
    ),
    completion("best_of", {"best_of": 3}, "best_of"),
    completion("best_of and n", {"best_of": 1, "n": 2}, "best_of"),
    completion("suffix", {"suffix": "end"}, "suffix"),
    completion("frequency", {"frequency_penalty": 2.5}, "frequency_penalty"),
    completion("presence", {"presence_penalty": -2.5}, "presence_penalty"),
    completion("repetition", {"repetition_penalty": 0}, "repetition_penalty"),
    completion("min_p", {"min_p": 1.5}, "min_p"),
    completion("bias value", {"logit_bias": {"1": 101}}, "logit_bias"),
    completion("bias type", {"logit_bias": {"1": "much"}}, "logit_bias"),
    completion("bias key", {"logit_bias": {"one": 1}}, "logit_bias"),
    completion("bias token", {"logit_bias": {"100000": 1}}, "logit_bias"),
    completion("min_tokens low", {"min_tokens": -1}, "min_tokens"),
    completion("min_tokens high", {"min_tokens": 17}, "min_tokens"),
    completion("stop id", {"stop_token_ids": [-1]}, "stop_token_ids"),
    completion("stop ids", {"stop_token_ids": [1] * 129}, "stop_token_ids"),
    completion("priority", {"priority": 2**31}, "priority"),
    completion("salt", {"cache_salt": "x" * 257}, "cache_salt"),
    completion("not a number", {"min_p": float("nan")}, "min_p"),
    completion("infinite", {"presence_penalty": float("inf")}, "presence_penalty"),
    completion("unknown field", {"temprature": 0.5}, "temprature"),
    chat("no messages", {"messages": []}, "messages"),
    chat("messages type", {"messages": "hello"}, "messages"),
    chat("role", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    chat("content type", message(5), "messages[0].content"),
    chat("content null", message(None), "messages[0].content"),
    chat(
        "content missing",
        {"messages": [*CHAT["messages"], {"role": "assistant"}]},
        "messages[1].content",
    ),
    chat("image", message([{"type": "image_url", "text": "x"}]), "messages[0].content[0].type"),
    chat("user calls", message("x", tool_calls=[CALL]), "messages[0].tool_calls"),
    chat("half a call", message("x", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].type"),
    chat("answer to none", message("x", tool_call_id="1"), "messages[0].tool_call_id"),
    chat("no content", message(None), "messages[0].content"),
    chat("half a tool", {"tools": [{"type": "function"}]}, "tools[0].function"),
    chat("name", {"tools": [tool(name="a b")]}, "tools[0].function.name"),
    chat("name twice", {"tools": [tool(), tool()]}, "tools[1].function.name"),
    chat("no object", {"tools": [tool({"type": "string"})]}, "tools[0].function.parameters"),
    chat("bad schema", required(tool(), tool({"not": {}}, "g")), "tools[1].function.parameters"),
    chat("auto", {"tools": [tool()]}, "tools"),
    chat("choice alone", {"tool_choice": "required"}, "tool_choice"),
    chat("choice", {"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    chat("choice kind", {"tool_choice": {"type": "function"}}, "tool_choice.function"),
    chat("format", required(tool()) | {"response_format": OBJECT}, "response_format"),
    chat("too many", required(*(tool(name=f"f{i}") for i in range(129))), "tools"),
    chat("ignore_eos", required(tool()) | {"ignore_eos": True}, "ignore_eos"),
    chat("format", {"response_format": {"type": "yaml"}}, "response_format.type"),
    chat("logprobs number", {"logprobs": 1}, "logprobs"),
    chat("top_logprobs alone", {"top_logprobs": 1}, "top_logprobs"),
    chat("top_logprobs many", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    chat("echo", {"echo": True}, "echo"),
    chat("completion tokens", {"max_completion_tokens": 0}, "max_tokens"),
    chat("option", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    chat(
        "template refuses",
        {"messages": [*CHAT["messages"], {"role": "system", "content": "late"}]},
        "messages",
    ),
]


async def test_table() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(
            base_url=cluster.url, headers={"content-type": "application/json"}
        ) as http,
    ):
        for bad in TABLE:
            raw = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body)
            answer = await http.post(f"/v1/{bad.path}", content=raw)
            error = answer.json().get("error")
            assert error, bad.name
            assert (answer.status_code, error["code"], error["param"]) == (
                bad.status,
                bad.code,
                bad.param,
            ), (bad.name, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        assert not cluster.workers[0].requests
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(
            CompletionBody,
            COMPLETION
            | {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0}
            | {"suffix": "", "logit_bias": {}, "user": "someone", "top_k": -1, "min_p": 0},
            id="completion",
        ),
        pytest.param(
            ChatBody,
            CHAT
            | {"tools": [], "tool_choice": "none", "logprobs": False, "top_logprobs": 0, "n": 1}
            | {"response_format": {"type": "text"}, "metadata": {"a": "b"}, "store": True}
            | {"stream": True, "stream_options": {"include_obfuscation": False}},
            id="chat",
        ),
    ],
)
def test_neutral_values_are_accepted(kind: type[OpenAiBody], body: dict[str, Any]) -> None:
    assert parse_body(kind, json.dumps(body).encode()).model == MODEL


def test_messages_do_not_repeat_the_prompt() -> None:
    body = {"model": MODEL, "prompt": {"secret": "the prompt"}}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionBody, json.dumps(body).encode())
    assert "secret" not in caught.value.message


async def test_wrong_routes_have_the_same_shape() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        for method, path, status, code in [
            ("GET", "/v1/nothing", 404, "not_found"),
            ("GET", "/", 404, "not_found"),
            ("POST", "/v1/chat/completions/", 404, "not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/v1/models/other", 404, "model_not_found"),
        ]:
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_body_too_large() -> None:
    async with (
        running([FakeWorker(1, say("ok"))], max_body_bytes=1000) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):

        async def unsized() -> Any:
            for _ in range(20):
                yield b"x" * 100

        for content in (b"x" * 1001, unsized()):
            answer = await http.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_beyond_the_clusters_capacity() -> None:
    # Two instances of 4 blocks: one keeps a block, so 7 * 16 tokens.
    workers = [FakeWorker(1, say("ok"), num_blocks=4), FakeWorker(2, say("ok"), num_blocks=4)]
    async with (
        running(workers) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        ids = list(range(100))
        for prompt, change, param in [
            (ids, {"max_tokens": 12}, None),
            (ids, {"max_tokens": 13}, "max_tokens"),
            (ids, {"max_tokens": 2**40}, "max_tokens"),
            (ids, {}, None),  # the default shrinks
            (list(range(112)), {}, "prompt"),
            (list(range(112)), {"max_tokens": 2}, "prompt"),
            ("x" * 1_000_000, {}, "prompt"),
            ([ids, ids + ids], {}, "prompt"),
        ]:
            body = {"model": MODEL, "prompt": prompt, **change}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == (400 if param else 200), (prompt, change)
            if param:
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        long_chat = CHAT | {"messages": [{"role": "user", "content": "x" * 200}]}
        answer = await http.post("/v1/chat/completions", json=long_chat)
        assert answer.json()["error"]["param"] == "messages"
    assert [w.requests[-1].max_tokens for w in workers if w.requests] == [12]


async def test_who_needs_an_instance_that_is_away_may_come_again() -> None:
    workers = [FakeWorker(1, say("ok"), num_blocks=4), FakeWorker(2, say("ok"), num_blocks=4)]
    async with (
        running(workers) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        cluster.gmanager.workers = workers[:1]
        capacity, statuses = 112, []
        async with asyncio.timeout(10):
            while 503 not in statuses:  # until the next view
                body = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 12}
                statuses.append((await http.post("/v1/completions", json=body)).status_code)
        assert set(statuses) <= {200, 503}
        for num_tokens, status in [(30, 200), (capacity - 1, 503), (capacity, 400)]:
            body = {"model": MODEL, "prompt": list(range(num_tokens))}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == status


async def test_without_pooling_a_request_must_fit_on_one_instance() -> None:
    workers = [FakeWorker(1, say("ok"), num_blocks=4), FakeWorker(2, say("ok"), num_blocks=6)]
    async with (
        running(workers, pooling=False) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        for num_tokens, status in [(90, 200), (91, 400)]:
            body = {"model": MODEL, "prompt": list(range(num_tokens)), "max_tokens": 6}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == status
    assert len(workers[1].requests) == 1


async def test_no_instance_and_overload_say_when_to_come_back() -> None:
    async with running([]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["type"] == "server_error"
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/live")).status_code == 200
    worker = FakeWorker(1, say("ok"))
    async with (
        running([worker], max_concurrent_requests=1) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        assert (await http.get("/health")).status_code == 200
