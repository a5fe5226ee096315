"""Functions to be called: what the model is told, what it may say, and what the client gets."""

import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.text.chat_template import ChatTemplate
from services.router.tools.call_parser import CallDelta, CallParser
from services.router.tools.syntax import JSON_LIST, TAGGED
from services.router.tools.use import Function, ToolUse
from tests.unit.router.cluster import (
    LENGTH,
    MODEL,
    TOKENIZER,
    Cluster,
    FakeWorker,
    running,
    say,
    served_model,
)
from tests.unit.router.test_formats import matches
from tests.unit.router.vocabulary import TEMPLATE

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "description": "The time."}},
]
#: Knows tools, and tags calls.
TAGGING = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
    "Call with <tool_call>.{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}"
)
ONE = '{"name": "weather", "arguments": {"city":"a}]\\"b"}}'
TWO = '{"name": "time", "arguments": {}}'
FUNCTIONS = (Function.of("weather", CITY, "a"), Function.of("time", {"type": "object"}, "b"))


async def ask(cluster: Cluster, **fields: Any) -> Any:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="x", http_client=http, max_retries=0
    ) as client:
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        answer = await client.chat.completions.create(**body | fields)
        if not fields.get("stream"):
            return answer
        return [chunk async for chunk in answer]


def prompt_of(worker: FakeWorker) -> str:
    return TOKENIZER.decode(list(worker.requests[-1].prompt_token_ids), skip_special_tokens=False)


async def test_required_calls_are_enforced_and_told_to_a_model_without_tools() -> None:
    worker = FakeWorker(1, say(f"[{ONE}, {TWO}]"))
    async with running([worker]) as cluster:
        answer = await ask(cluster, tools=TOOLS, tool_choice="required")
    grammar, prompt = worker.requests[0].grammar, prompt_of(worker)
    assert matches(grammar, f"[{ONE}, {TWO}]")
    assert matches(grammar, f"[{TWO}]")
    for wrong in ("hello", "[]", '[{"name": "time", "arguments": {"x":1}}]', f"[{ONE}{TWO}]"):
        assert not matches(grammar, wrong)
    assert '"name": "weather"' in prompt
    assert "The time." in prompt
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("weather", '{"city":"a}]\\"b"}'), ("time", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"tool_choice": "required", "tools": TOOLS[1:], "parallel_tool_calls": False},
    ],
)
async def test_one_call_where_one_is_named_or_none_may_be_beside_it(fields: Any) -> None:
    worker = FakeWorker(1, say(f"[{TWO}]"))
    async with running([worker]) as cluster:
        await ask(cluster, **{"tools": TOOLS} | fields)
    grammar = worker.requests[0].grammar
    assert matches(grammar, f"[{TWO}]")
    assert not matches(grammar, f"[{ONE}]")
    assert not matches(grammar, f"[{TWO}, {TWO}]")


async def test_streams_bring_the_name_first_then_the_arguments_in_pieces() -> None:
    worker = FakeWorker(1, say(f"[{ONE}, {TWO}]"))
    async with running([worker]) as cluster:
        chunks = await ask(cluster, tools=TOOLS, tool_choice="required", stream=True, n=2, seed=1)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in mine)
        deltas = [call for choice in mine for call in choice.delta.tool_calls or []]
        assert [d.index for d in deltas if d.id] == [0, 1]
        assert [d.function.name for d in deltas if d.id] == ["weather", "time"]
        pieces = [d.function.arguments for d in deltas if d.index == 0]
        assert len(pieces) > 5
        assert json.loads("".join(pieces)) == {"city": 'a}]"b'}


async def test_text_or_calls_where_the_template_can_tell_them_apart() -> None:
    call = f"<tool_call>\n{ONE}\n</tool_call>"
    for text, content, num_calls, reason in (
        ("hello <b>", "hello <b>", 0, "stop"),
        (f"well {call}", "well ", 1, "tool_calls"),
        (call, None, 1, "tool_calls"),
    ):
        worker = FakeWorker(1, say(text))
        async with running([worker], served_model(TAGGING)) as cluster:
            answer = await ask(cluster, tools=TOOLS)
            chunks = await ask(cluster, tools=TOOLS, stream=True)
        grammar = worker.requests[0].grammar
        assert matches(grammar, text)
        assert not matches(grammar, f"well <tool_call>\n{ONE}")
        assert not matches(grammar, "<tool_call>hello")
        assert prompt_of(worker).startswith("weather;time;Call with")
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (content, reason)
        assert len(choice.message.tool_calls or []) == num_calls
        deltas = [c.choices[0].delta for c in chunks]
        assert "".join(d.content or "" for d in deltas) == (content or "")
        assert chunks[-1].choices[0].finish_reason == reason


async def test_an_answer_that_was_cut_has_the_arguments_so_far() -> None:
    worker = FakeWorker(1, say(f"[{ONE[:-6]}", LENGTH))
    async with running([worker]) as cluster:
        answer = await ask(cluster, tools=TOOLS, tool_choice="required")
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city":"a}]'


async def test_log_probabilities_come_with_calls_too() -> None:
    worker = FakeWorker(1, say(f"[{TWO}]"))
    async with running([worker]) as cluster:
        chunks = await ask(cluster, tools=TOOLS, tool_choice="required", stream=True, logprobs=True)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_none_is_as_if_there_were_no_tools() -> None:
    worker = FakeWorker(1, say("ok"))
    async with running([worker]) as cluster:
        answer = await ask(cluster, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == "ok"
    assert worker.requests[0].grammar == ""
    assert "weather" not in prompt_of(worker)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def conversation(arguments: str = '{"city": "Paris"}') -> list[dict[str, Any]]:
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]


async def test_calls_and_their_results_are_shown_to_the_model() -> None:
    worker = FakeWorker(1, say("ok"))
    for template, shown in (
        (TAGGING, "[user]hello[assistant]Paris[tool]sunny"),
        (
            TEMPLATE,
            '[{"name": "weather", "arguments": {"city": "Paris"}}]<|im_end|>\n<|im_start|>tool',
        ),
    ):
        async with running([worker], served_model(template)) as cluster:
            await ask(cluster, messages=conversation())
        assert shown in prompt_of(worker)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (conversation("[]"), "messages[1].tool_calls[0].function.arguments"),
        (conversation("{"), "messages[1].tool_calls[0].function.arguments"),
        (conversation()[2:], "messages[0].tool_call_id"),
    ],
)
async def test_calls_that_make_no_sense_are_refused(messages: Any, param: str) -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        body = {"model": MODEL, "messages": messages}
        answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
), max_size=3)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(
    arguments=st.lists(ARGUMENTS, min_size=1, max_size=3),
    text=st.text(max_size=12) | st.sampled_from(["<tool_cal", "a <tool_call> b"]),
    is_tagged=st.booleans(),
    data=st.data(),
)
def test_calls_come_out_whole_however_their_text_is_cut(
    arguments: list[dict[str, Any]], text: str, is_tagged: bool, data: st.DataObject
) -> None:
    syntax = TAGGED if is_tagged else JSON_LIST
    text = text if is_tagged and syntax.opening not in text else ""
    dumped = [json.dumps(value, ensure_ascii=False) for value in arguments]
    calls = [f'{{"name": "f{i}", "arguments": {value}}}' for i, value in enumerate(dumped)]
    whole = text + syntax.opening + syntax.separator.join(calls) + syntax.closing
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=6).map(sorted))
    parser = CallParser(syntax, may_begin_with_text=is_tagged)
    deltas = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        deltas += parser.push(whole[start:end])
    deltas += parser.flush()
    assert "".join(d for d in deltas if isinstance(d, str)) == text
    found = [d for d in deltas if isinstance(d, CallDelta)]
    assert [d.name for d in found if d.name] == [f"f{i}" for i in range(len(calls))]
    for index, value in enumerate(dumped):
        assert "".join(d.arguments for d in found if d.index == index) == value


def test_a_template_says_how_calls_are_written() -> None:
    assert ChatTemplate(TAGGING, {}).call_syntax is TAGGED
    assert ChatTemplate(TEMPLATE, {}).call_syntax is JSON_LIST
    use = ToolUse(FUNCTIONS, is_required=True, max_calls=2)
    text = TAGGED.opening + ONE + TAGGED.separator + TWO + TAGGED.closing
    assert matches(use.grammar(TAGGED).text, text)
