"""What a real model says in a format, through the official client: JSON that the schema allows."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import openai
import pydantic
import pytest

from services.local.cluster import LocalCluster
from tests.integration.cluster import assert_no_leak, http_client

pytestmark = [pytest.mark.integration, pytest.mark.model]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Animal(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    legs: int = pydantic.Field(ge=0, le=100)
    colours: list[Colour] = pydantic.Field(max_length=3)


ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Describe a dog. Answer in JSON."}]}


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    url = f"{pair.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
        yield client


async def test_schemas_hold_for_every_choice_and_seed(
    pair: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    async def ask(**sampling: Any) -> list[Animal | None]:
        answer = await client.chat.completions.parse(
            model=pair.spec.model_name, response_format=Animal, max_tokens=200, **ASK, **sampling
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        return [choice.message.parsed for choice in answer.choices]

    greedy, again, seeded, hot = await asyncio.gather(
        ask(temperature=0),
        ask(temperature=0),
        ask(temperature=1, seed=7, n=3, frequency_penalty=0.5),
        ask(temperature=2, seed=8, n=2),
    )
    assert greedy == again
    assert all(isinstance(animal, Animal) for animal in greedy + seeded + hot)


async def test_streams_regexes_and_grammars(pair: LocalCluster, client: openai.AsyncOpenAI) -> None:
    async def text_of(response_format: dict[str, Any]) -> str:
        stream = await client.chat.completions.create(
            model=pair.spec.model_name,
            temperature=1.5,
            seed=1,
            max_tokens=100,
            stream=True,
            extra_body={"response_format": response_format},
            **ASK,
        )
        return "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        )

    date, sums, anything = await asyncio.gather(
        text_of({"type": "regex", "regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
        text_of({"type": "grammar", "grammar": 'start: N ("+" N){2}\nN: /[0-9]{1,3}/'}),
        text_of({"type": "json_schema", "json_schema": {"name": "x", "schema": {"maxLength": 9}}}),
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){2}", sums)
    json.loads(anything)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


async def test_tools_are_called_as_their_schemas_say(
    pair: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    common: Any = {"model": pair.spec.model_name, "tools": TOOLS, "temperature": 0}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = await client.chat.completions.create(
        messages=messages, tool_choice=named, max_tokens=100, **common
    )
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")

    async with client.chat.completions.stream(
        messages=messages, tool_choice=named, max_tokens=100, **common
    ) as stream:
        streamed = await stream.get_final_completion()
    (again,) = streamed.choices[0].message.tool_calls or []
    assert again.function.arguments == call.function.arguments

    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 C"}]
    answer = await client.chat.completions.create(
        messages=messages, tool_choice="none", max_tokens=20, **common
    )
    assert answer.choices[0].message.content
    required = await client.chat.completions.create(
        messages=messages, tool_choice="required", max_tokens=400, n=2, **common
    )
    for choice in required.choices:
        names = [c.function.name for c in choice.message.tool_calls or [] if c.type == "function"]
        assert names
        assert set(names) <= {"get_weather", "get_time"}


async def test_a_bad_grammar_is_refused_and_everything_goes_on(pair: LocalCluster) -> None:
    chain = "\n".join(["start: a0", *(f'a{i}: "x" a{i + 1}' for i in range(3000)), 'a3000: "z"'])
    async with http_client(pair) as http:
        for grammar in ("start: nowhere", chain):
            body = {"response_format": {"type": "grammar", "grammar": grammar}}
            answer = await http.post(
                "/v1/chat/completions", json=ASK | body | {"model": pair.spec.model_name}
            )
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "response_format.grammar"
        assert (await http.get("/health")).status_code == 200
    await assert_no_leak(pair)
