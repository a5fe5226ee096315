"""What is told of the router is true and complete: its OpenAPI document, its metrics."""

import json
import re
from pathlib import Path

import httpx

from services.router.metrics import RouterMetrics
from tests.unit.router.cluster import MODEL, FakeWorker, running, say

DOCS = Path(__file__).parents[3] / "docs"


async def test_the_openapi_document_is_whole() -> None:
    async with running([]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        text = (await http.get("/openapi.json")).text
    paths = json.loads(text)["paths"]
    assert "$defs" not in text and "$ref" not in text
    for path, media_types in {
        "/v1/completions": {"application/json", "text/event-stream"},
        "/v1/chat/completions": {"application/json", "text/event-stream"},
        "/tokenize": {"application/json"},
        "/detokenize": {"application/json"},
    }.items():
        described = paths[path]["post"]
        assert described["responses"]["200"]["content"].keys() == media_types
        assert "default" in described["responses"]
        (body,) = described["requestBody"]["content"].values()
        assert MODEL in body["schema"]["properties"]["model"]["enum"]
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]


def test_every_metric_of_the_router_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    documented = set(re.findall(r"infinite_llm_router_\w+", text))
    exposed = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in RouterMetrics().registry.collect()
    }
    assert documented == exposed


def test_every_metric_of_the_worker_that_is_documented_exists() -> None:
    source = (DOCS.parent / "services" / "worker" / "metrics.py").read_text()
    text = (DOCS / "metrics.md").read_text()
    for name in set(re.findall(r"infinite_llm_worker_(\w+)", text)):
        assert re.search(rf'"(infinite_llm_worker_)?{name.removesuffix("_total")}"', source), name


async def test_all_four_latencies_are_measured() -> None:
    async with (
        running([FakeWorker(1, say("hello €"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        await http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
        lines = (await http.get("/metrics")).text.splitlines()
    for name in ("queue_time", "time_to_first_token", "time_per_output_token", "e2e"):
        assert f"infinite_llm_router_{name}_seconds_count 1.0" in lines
