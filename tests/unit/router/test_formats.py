"""`response_format`: what reaches the worker, and what is refused before anything is queued."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pydantic
import pytest

from services.common.errors import InvalidRequest
from services.common.rpc import error_from_rpc
from services.router.grammars.checks import GrammarChecks
from services.router.grammars.output_grammar import OutputGrammar
from tests.unit.grammars import VOCABULARY, compiler
from tests.unit.router.cluster import MODEL, FakeWorker, fail, running, say, tiny_folder
from tests.unit.router.test_chat_and_completions import CHAT
from tests.unit.router.test_grpc_door import generate

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema: object, **fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | fields}


def matches(grammar: str, text: str) -> bool:
    matcher = compiler().compile(grammar)
    token_ids = VOCABULARY.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "json_object"}, '{"a": [1, {}]}', "[1]"),
    ({"type": "json_object"}, '{\n  "a": 1\n}', '{   "a": 1}'),
    (schema_format(PERSON, strict=True), '{"name":"x","age":3}', '{"name":"x"}'),
    (schema_format({"enum": [1, "b"]}, strict=False, description="d"), '"b"', '"c"'),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "{}", "3"),
    ({"type": "regex", "regex": "[0-9]{2}/x"}, "12/x", "1/x"),
    ({"type": "grammar", "grammar": 'start: "a" start | "b"'}, "aab", "aa"),
]


async def test_every_format_reaches_the_worker_as_a_grammar() -> None:
    worker = FakeWorker(1, say("ok"))
    body = {"model": MODEL, "prompt": "hello"}
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        for response_format, good, bad in FORMATS:
            json = body | {"response_format": response_format}
            answer = await http.post("/v1/completions", json=json)
            assert answer.status_code == 200, answer.text
            grammar = worker.requests[-1].grammar
            assert matches(grammar, good), response_format
            assert not matches(grammar, bad), response_format


async def test_text_is_no_grammar() -> None:
    worker = FakeWorker(1, say("ok"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        for value in (None, {"type": "text"}):
            await http.post("/v1/chat/completions", json=CHAT | {"response_format": value})
    assert [request.grammar for request in worker.requests] == ["", ""]


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(150):
    DEEP = {"type": "array", "items": DEEP}
FORMAT = "response_format"


REFUSED: list[tuple[object, str]] = [
    ({"type": "yaml"}, f"{FORMAT}.type"),
    ({}, f"{FORMAT}.type"),
    ("json_object", FORMAT),
    ({"type": "json_schema"}, f"{FORMAT}.json_schema"),
    ({"type": "json_object", "regex": "a"}, f"{FORMAT}.regex"),
    ({"type": "json_object", "extra": 1}, f"{FORMAT}.extra"),
    (schema_format({}, name="not a name"), f"{FORMAT}.json_schema.name"),
    (schema_format({}, more=1), f"{FORMAT}.json_schema.more"),
    (schema_format([]), f"{FORMAT}.json_schema.schema"),
    (schema_format({"type": "wrong"}), f"{FORMAT}.json_schema.schema"),
    (schema_format({"not": {}}), f"{FORMAT}.json_schema.schema"),
    (schema_format({"$ref": "#"}), f"{FORMAT}.json_schema.schema"),
    (schema_format({"$ref": "http://example.com/x"}), f"{FORMAT}.json_schema.schema"),
    (schema_format({"enum": ["x" * 200_000]}), f"{FORMAT}.json_schema.schema"),
    (schema_format(DEEP), f"{FORMAT}.json_schema.schema"),
    ({"type": "regex", "regex": "(a"}, f"{FORMAT}.regex"),
    ({"type": "grammar", "grammar": "start: nowhere"}, f"{FORMAT}.grammar"),
    ({"type": "grammar", "grammar": "start: start"}, f"{FORMAT}.grammar"),
]


async def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    worker = FakeWorker(1, say("ok"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        for response_format, param in REFUSED:
            body = CHAT | {"response_format": response_format}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
            assert len(answer.content) < 1000
    assert worker.requests == []


async def test_a_format_needs_an_end() -> None:
    body = CHAT | {"response_format": {"type": "json_object"}, "ignore_eos": True}
    worker = FakeWorker(1, say("ok"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ignore_eos")


async def test_a_dead_end_in_a_worker_names_the_clients_field() -> None:
    error = InvalidRequest("the grammar allows no token here", "grammar")
    worker = FakeWorker(1, fail(error))
    body = CHAT | {"response_format": {"type": "json_object"}}
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, FORMAT)
    assert len(worker.requests) == 1


async def test_the_official_client_parses_into_a_model() -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    worker = FakeWorker(1, say('{"name":"Bo","age":3}'))
    async with running([worker]) as cluster:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", http_client=http)
        async with client:
            answer = await client.chat.completions.parse(
                model=MODEL, messages=[{"role": "user", "content": "who"}], response_format=Person
            )
    assert answer.choices[0].message.parsed == Person(name="Bo", age=3)
    assert matches(worker.requests[0].grammar, '{"name":"Bo","age":3}')


async def test_grpc_has_the_same_formats() -> None:
    worker = FakeWorker(1, say("ok"))
    formats: list[tuple[dict[str, Any], str]] = [
        ({"json_object": True}, "{}"),
        ({"json_schema": '{"const": 5}'}, "5"),
        ({"regex": "[0-9]"}, "7"),
        ({"lark": 'start: "x"'}, "x"),
    ]
    async with running([worker]) as cluster:
        for fields, good in formats:
            await generate(cluster, prompt="x", **fields)
            assert matches(worker.requests[-1].grammar, good)


@pytest.mark.parametrize("schema", ["{", "[]", "[" * 100_000])
async def test_grpc_refuses_what_is_no_schema(schema: str) -> None:
    async with running([FakeWorker(1, say("ok"))]) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, prompt="x", json_schema=schema)
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.param == "json_schema"


@pytest.fixture
async def checks(tmp_path: Path) -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks(tiny_folder(), compile_deadline_s=2.0)
    yield checks
    await checks.close()


def lark_chain(num_rules: int) -> str:
    rules = [f'a{i}: "x" a{i + 1} | "y" a{i + 1}' for i in range(num_rules)]
    return "\n".join(["start: a0", *rules, f'a{num_rules}: "z"'])


SLOW = OutputGrammar.of_schema({"type": "integer", "multipleOf": 1_000_003}, "f")
CRASHING = OutputGrammar.of_lark(lark_chain(3000), "f")
GOOD = OutputGrammar.of_schema(PERSON, "f")


@pytest.mark.parametrize(("bomb", "fault"), [(SLOW, "too long"), (CRASHING, "too deeply")])
async def test_a_bomb_ends_its_process_and_nothing_else(
    checks: GrammarChecks, bomb: OutputGrammar, fault: str
) -> None:
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequest, match=fault):
            await checks.check(bomb)
        await checks.check(GOOD)


async def test_an_answer_to_somebody_who_left_is_not_taken_for_the_next(
    checks: GrammarChecks,
) -> None:
    bad = OutputGrammar.of_regex("(a", "f")
    await checks.check(GOOD)
    leaving = asyncio.create_task(checks.check(bad))
    await asyncio.sleep(0.0005)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await checks.check(OutputGrammar.of_regex("b", "f"))


async def test_a_tokenizer_without_grammars_is_a_clear_refusal(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checks = GrammarChecks(tmp_path)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        await checks.check(GOOD)
