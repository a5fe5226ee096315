"""What operators see: metrics, traces that reach the worker, logs without the prompt."""

import json
import logging
import re

import httpx
import pytest

from services.common.errors import Unavailable
from services.common.telemetry import configure_tracing
from services.common.telemetry.logs import JsonFormatter
from tests.unit.router.cluster import MODEL, FakeWorker, fail, running, say

COMPLETION = {"model": MODEL, "prompt": "a secret", "max_tokens": 100}


def value(exposition: str, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", exposition, re.MULTILINE)
    assert found, sample
    return float(found[1])


async def test_metrics() -> None:
    workers = [FakeWorker(1, fail(Unavailable("no"))), FakeWorker(2, say("hello"))]
    workers[1].load.running = 9
    async with running(workers) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        await http.post("/v1/completions", json=COMPLETION)
        await http.post("/v1/completions", json=COMPLETION | {"n": 0})
        await http.get("/a-path-that-must-not-become-a-label")
        text = (await http.get("/metrics")).text
    requests = "infinite_llm_router_requests_total"
    assert value(text, f'{requests}{{route="/v1/completions",status="200"}}') == 1
    assert value(text, f'{requests}{{route="/v1/completions",status="400"}}') == 1
    assert value(text, f'{requests}{{route="unmatched",status="404"}}') == 1
    assert value(text, "infinite_llm_router_prompt_tokens_total") == 8
    assert value(text, "infinite_llm_router_generation_tokens_total") == 1
    assert value(text, "infinite_llm_router_dispatch_retries_total") == 1
    assert value(text, "infinite_llm_router_in_flight") == 0
    assert value(text, "infinite_llm_router_time_to_first_token_seconds_count") == 1
    assert value(text, "infinite_llm_router_time_per_output_token_seconds_count") == 0
    assert value(text, "infinite_llm_router_e2e_seconds_count") == 1


async def test_trace_context_reaches_the_worker() -> None:
    provider = configure_tracing("router", "")
    worker = FakeWorker(1, say("hello"))
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        for stream in (False, True):
            body = COMPLETION | {"stream": stream}
            await http.post("/v1/completions", json=body, headers=headers)
    provider.shutdown()
    for metadata in worker.metadata:
        assert str(metadata["traceparent"]).split("-")[1] == trace_id


async def test_logs_name_the_request_and_never_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter("router").format(record))

    handler = Keep()
    logging.getLogger().addHandler(handler)
    caplog.set_level("DEBUG")
    try:
        async with (
            running([FakeWorker(1, say("hello"))]) as cluster,
            httpx.AsyncClient(base_url=cluster.url) as http,
        ):
            answer = await http.post("/v1/completions", json=COMPLETION)
            await http.post("/v1/completions", json=COMPLETION | {"prompt": {"a secret": 1}})
    finally:
        logging.getLogger().removeHandler(handler)
    assert not any("secret" in line for line in lines)
    logged = [json.loads(line) for line in lines]
    req_id = answer.headers["x-request-id"]
    mine = {line["message"]: line for line in logged if line.get("req_id") == req_id}
    assert mine["dispatched"]["inst_id"] == 1
    assert (mine["request"]["route"], mine["request"]["status"]) == ("/v1/completions", 200)
    assert answer.json()["id"] == f"cmpl-{req_id}"
