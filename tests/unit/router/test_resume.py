"""A stream whose instance is lost goes on elsewhere: no token repeated, none lost.

The workers are scripts on real sockets that answer as a worker does: what another one generated
already is not sent again.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.infinite_llm.v1 import worker_pb2
from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from services.common.telemetry.logs import JsonFormatter
from services.router import interruption, recovery
from tests.unit.router.cluster import (
    LENGTH,
    MODEL,
    TOKENIZER,
    Cluster,
    FakeWorker,
    Script,
    fail,
    running,
)
from tests.unit.router.gate import gate_before
from tests.unit.router.test_chat_and_completions import events
from tests.unit.router.test_telemetry import value

TEXT = "naïve €5 \U0001f600 hello world"
NUM_TOKENS = len(TOKENIZER.encode(TEXT).ids)
PROMPT = "hello w"
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}


def speak(text: str, until: int | None = None, error: Exception | None = None) -> Script:
    """The tokens of `text`, with log probability -i for token i; at `until` in all it fails.

    Without an error it falls silent there.
    """

    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        token_ids = TOKENIZER.encode(text).ids[: request.max_tokens]
        first = len(request.output_token_ids)
        assert list(request.output_token_ids) == token_ids[:first]
        for index in range(first, len(token_ids)):
            if index == until:
                await _end_with(error)
            response = worker_pb2.GenerateTokensResponse(token_ids=[token_ids[index]])
            if request.sampling.HasField("logprobs"):
                response.logprobs.add(chosen=-float(index))
            if index == first and request.sampling.HasField("prompt_logprobs"):
                for position in range(len(request.prompt_token_ids) - 1):
                    response.prompt_logprobs.add(chosen=-100.0 - position)
            if index == first:
                response.cached_tokens = 4 if first else 2
            if index == len(token_ids) - 1:
                response.finish_reason = LENGTH
            yield response

    return script


async def _end_with(error: Exception | None) -> None:
    if error is not None:
        raise error
    await asyncio.Event().wait()


def pair(first: Script, second: Script) -> list[FakeWorker]:
    """Two workers of which the first is always preferred."""
    workers = [FakeWorker(1, first), FakeWorker(2, second)]
    workers[1].load.running = 9
    return workers


@asynccontextmanager
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as http:
        yield http


async def ask(workers: list[FakeWorker], body: dict[str, Any], **settings: Any) -> httpx.Response:
    async with running(workers, **settings) as cluster, client(cluster) as http:
        return await http.post("/v1/completions", json=body)


def text_of(streamed: str) -> str:
    return "".join(event["choices"][0]["text"] for event in events(streamed))


async def test_the_seam_may_be_anywhere_even_inside_a_character() -> None:
    workers = pair(speak(TEXT), speak(TEXT))
    async with running(workers) as cluster, client(cluster) as http:
        for cut in range(NUM_TOKENS):
            workers[0].script = speak(TEXT, cut, Unavailable("stopping"))
            answer = await http.post("/v1/completions", json=BODY)
            assert text_of(answer.text) == TEXT
            assert answer.text.endswith("data: [DONE]\n\n")
            assert len(workers[1].requests[-1].output_token_ids) == cut
    assert len(workers[1].requests) == NUM_TOKENS


@pytest.mark.parametrize(
    "error", [Unavailable("draining"), DeadlineExceeded("slow"), Overloaded("no memory")]
)
async def test_whatever_ends_it_another_instance_goes_on(error: Exception) -> None:
    workers = pair(speak(TEXT, 5, error), speak(TEXT))
    whole = await ask(workers, BODY | {"stream": False})
    assert whole.json()["choices"][0]["text"] == TEXT
    usage = whole.json()["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (
        NUM_TOKENS,
        2,
    )


async def test_a_broken_connection_is_resumed() -> None:
    workers = pair(speak(TEXT, 5), speak(TEXT))
    async with running(workers) as cluster, client(cluster) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        while not workers[0].requests:
            await asyncio.sleep(0.005)
        await cluster.stop_worker(workers[0])
        assert text_of((await asking).text) == TEXT


async def test_what_fell_silent_is_left_and_aborted() -> None:
    workers = pair(speak(TEXT, 5), speak(TEXT))
    async with running(workers, stream_idle_timeout_s=0.2) as cluster, client(cluster) as http:
        answer = await http.post("/v1/completions", json=BODY)
        assert text_of(answer.text) == TEXT
        await asyncio.wait_for(workers[0].aborted.wait(), 5)


async def test_an_unseeded_request_is_continued_with_the_seed_it_began_with() -> None:
    workers = pair(speak(TEXT, 5, Unavailable("stopping")), speak(TEXT))
    async with running(workers) as cluster, client(cluster) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json=BODY | {"n": 2})
    first, second = [[request.sampling.seed for request in w.requests] for w in workers]
    assert all(request.sampling.HasField("seed") for request in workers[0].requests)
    assert first == second
    assert len(set(first)) == 3


async def test_a_request_keeps_its_age_when_another_instance_goes_on() -> None:
    workers = pair(speak(TEXT, until=3, error=Unavailable("draining")), speak(TEXT))
    before_s = time.time()
    await ask(workers, BODY)
    arrived_at_s = [worker.requests[0].arrived_at_s for worker in workers]
    assert before_s <= arrived_at_s[0] == arrived_at_s[1] <= time.time()


async def test_a_stop_string_across_the_seam_ends_the_answer() -> None:
    text = "one END two"
    for cut in range(4, 7):
        workers = pair(speak(text, cut, Unavailable("stopping")), speak(text))
        answer = await ask(workers, BODY | {"stop": "END"})
        assert text_of(answer.text) == "one "
        assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_choices_and_log_probabilities_cross_the_seam() -> None:
    workers = pair(speak(TEXT, 5, Unavailable("stopping")), speak(TEXT))
    answer = await ask(workers, BODY | {"n": 2, "logprobs": 0})
    for index in range(2):
        choices = [c for event in events(answer.text) for c in event["choices"]]
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TEXT
        logprobs = [v for choice in mine for v in choice["logprobs"]["token_logprobs"]]
        assert logprobs == [-float(position) for position in range(NUM_TOKENS)]


@pytest.mark.parametrize("cut", [0, 5])
async def test_echo_shows_the_prompt_once(cut: int) -> None:
    workers = pair(speak(TEXT, cut, Unavailable("stopping")), speak(TEXT))
    answer = await ask(workers, BODY | {"echo": True, "logprobs": 0})
    assert text_of(answer.text) == PROMPT + TEXT
    logprobs = [
        value
        for event in events(answer.text)
        for value in event["choices"][0]["logprobs"]["token_logprobs"]
    ]
    num_prompt = len(TOKENIZER.encode(PROMPT).ids)
    assert logprobs == [
        None,
        *(-100.0 - position for position in range(num_prompt - 1)),
        *(-float(position) for position in range(NUM_TOKENS)),
    ]
    # Only who has the prompt's log probabilities already does not ask for them again.
    assert workers[1].requests[0].sampling.HasField("prompt_logprobs") is (cut == 0)


async def test_only_the_word_that_it_has_ended_was_lost() -> None:
    workers = pair(fail(Unavailable("stopping"), after=TEXT), speak(TEXT))
    answer = await ask(workers, BODY)
    assert text_of(answer.text) == TEXT
    assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert not workers[1].requests


@pytest.mark.parametrize("error", [InvalidRequest("bad", "seed"), InternalError("bug")])
async def test_what_would_fail_anywhere_is_not_tried_elsewhere(error: Exception) -> None:
    workers = pair(speak(TEXT, 5, error), speak(TEXT))
    answer = await ask(workers, BODY)
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == str(error)
    assert not workers[1].requests


async def test_an_instance_that_was_started_anew_serves_its_own_stream_again() -> None:
    worker = FakeWorker(1, speak(TEXT, 5, Unavailable("stopping")))
    async with running([worker]) as cluster, client(cluster) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        while not worker.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert not asking.done()
        worker.incarnation, worker.script = 2, speak(TEXT)
        assert text_of((await asking).text) == TEXT
    assert len(worker.requests) == 2


async def test_a_cluster_that_has_shrunk_is_waited_for() -> None:
    """The request needs both: what is left refuses it until the other is there again."""
    workers = pair(speak(TEXT, 5, Unavailable("stopping")), speak(TEXT))
    for worker in workers:
        worker.num_blocks = 2
    body = BODY | {"prompt": [5] * 30, "max_tokens": 16}
    async with running(workers) as cluster, client(cluster) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        while not workers[0].requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.6)  # two views
        assert not workers[1].requests
        # It may still be refused by an instance that has not heard of the other.
        workers[0].script = workers[1].script = fail(ContextLengthExceeded("too long"))
        workers[0].incarnation = 2
        while sum(len(worker.requests) for worker in workers) < 2:
            await asyncio.sleep(0.005)
        workers[0].script = workers[1].script = speak(TEXT)
        workers[0].incarnation = workers[1].incarnation = 3
        expected = TOKENIZER.decode(TOKENIZER.encode(TEXT).ids[:16])
        assert text_of((await asking).text) == expected


async def test_a_request_that_takes_instances_down_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "EXCLUDED_S", 0.0)
    workers = [FakeWorker(n, speak(TEXT, 5, Unavailable("crashed"))) for n in range(1, 9)]
    answer = await ask(workers, BODY)
    assert '"code": "instance_lost"' in answer.text
    assert sum(len(worker.requests) for worker in workers) == recovery.MAX_ATTEMPTS


async def test_a_client_that_leaves_while_nobody_serves_it_leaves_nothing_behind() -> None:
    worker = FakeWorker(1, speak(TEXT, 5, Unavailable("stopping")))
    async with running([worker]) as cluster, client(cluster) as http:
        async with http.stream("POST", "/v1/completions", json=BODY) as response:
            async for _ in response.aiter_lines():
                break
        async with asyncio.timeout(5):
            while value((await http.get("/metrics")).text, "infinite_llm_router_in_flight"):
                await asyncio.sleep(0.01)
        text = (await http.get("/metrics")).text
    assert value(text, "infinite_llm_router_streams_failed_total") == 0


async def test_a_stop_of_the_router_ends_who_waits_for_an_instance() -> None:
    worker = FakeWorker(1, speak(TEXT, 5, Unavailable("stopping")))
    async with running([worker], shutdown_timeout_s=1.0) as cluster, client(cluster) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        while not worker.requests:
            await asyncio.sleep(0.005)
        cluster.stop.set()
        assert '"code": "unavailable"' in (await asking).text


async def test_a_stopped_process_is_noticed_and_a_long_computation_is_not_taken_for_it() -> None:
    async def slow(request: Any) -> Any:
        await asyncio.sleep(2.0)  # longer than it takes to notice the other one
        async for response in speak(TEXT)(request):
            yield response

    workers = pair(speak(TEXT, 5), slow)
    async with (
        running(workers, dead_after_s=0.6) as cluster,
        gate_before(workers[0]) as gate,
        client(cluster) as http,
    ):
        await asyncio.sleep(0.6)  # two views
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        while not workers[0].requests:
            await asyncio.sleep(0.005)
        gate.is_open.clear()
        answer = await asyncio.wait_for(asking, 10)
        assert text_of(answer.text) == TEXT
        assert len(workers[1].requests) == 1
        # What goes on again does not go on for nobody.
        gate.is_open.set()
        await asyncio.wait_for(workers[0].aborted.wait(), 5)


async def test_a_resume_is_told_as_metric_log_line_and_span(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(interruption, "tracer", provider.get_tracer)
    workers = pair(speak(TEXT, 5, Unavailable("stopping")), speak(TEXT))
    async with running(workers) as cluster, client(cluster) as http:
        answer = await http.post("/v1/completions", json=BODY)
        text = (await http.get("/metrics")).text
    assert value(text, "infinite_llm_router_streams_resumed_total") == 1
    assert value(text, "infinite_llm_router_streams_failed_total") == 0
    assert value(text, "infinite_llm_router_dispatch_retries_total") == 1
    (record,) = [record for record in caplog.records if record.message == "stream resumed"]
    line = json.loads(JsonFormatter("router").format(record))
    assert (line["lost_inst_id"], line["inst_id"], line["num_tokens"]) == (1, 2, 5)
    failed = next(record for record in caplog.records if record.message == "worker failed")
    assert vars(failed)["worker_req_id"] == workers[0].requests[0].req_id
    (span,) = spans.get_finished_spans()
    assert span.name == "resume stream"
    assert dict(span.attributes or {}).items() >= {"lost_inst_id": 1, "inst_id": 2}.items()
    assert text_of(answer.text) == TEXT


async def test_a_stream_that_could_not_be_saved_is_counted() -> None:
    worker = FakeWorker(1, speak(TEXT, 5, Unavailable("stopping")))
    async with running([worker], resume_timeout_s=0.2) as cluster, client(cluster) as http:
        answer = await http.post("/v1/completions", json=BODY)
        text = (await http.get("/metrics")).text
    assert '"code": "instance_lost"' in answer.text
    assert value(text, "infinite_llm_router_streams_resumed_total") == 0
    assert value(text, "infinite_llm_router_streams_failed_total") == 1
