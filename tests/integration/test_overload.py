"""More requests than two small instances can take: refused early or served whole, nothing lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from services.common.model_store import DEFAULT_MODEL
from services.local.cluster import LocalCluster
from tests.integration.cluster import (
    BLOCK_SIZE,
    assert_no_leak,
    http_client,
    make_spec,
    running_cluster,
    worker_metric,
)

pytestmark = [pytest.mark.integration, pytest.mark.model]

NUM_BLOCKS, NUM_QUEUED, NUM_TOKENS = 8, 6, 24
NUM_REQUESTS = 40


def body(num_words: int, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    prompt = " ".join(f"word{number}" for number in range(num_words))
    return {
        "model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


@pytest.fixture
async def crowded() -> AsyncIterator[LocalCluster]:
    spec = make_spec(2, NUM_BLOCKS)
    router = {"max_queued_requests": NUM_QUEUED, "queue_timeout_s": 60.0}
    async with running_cluster(replace(spec, overrides={**spec.overrides, "router": router})) as it:
        yield it


@pytest.fixture
async def static() -> AsyncIterator[LocalCluster]:
    async with running_cluster(replace(make_spec(2, NUM_BLOCKS), pooling=False)) as cluster:
        yield cluster


async def test_an_overload_is_refused_early_and_what_is_taken_in_is_served_whole(
    crowded: LocalCluster,
) -> None:
    async with http_client(crowded) as http:

        async def ask(number: int) -> tuple[httpx.Response, float]:
            begun_s = time.monotonic()
            answer = await http.post("/v1/completions", json=body(5 + number % 20))
            return answer, time.monotonic() - begun_s

        outcomes = await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))
    served = [answer for answer, _ in outcomes if answer.status_code == 200]
    refused = [(answer, took_s) for answer, took_s in outcomes if answer.status_code != 200]
    assert len(served) >= NUM_QUEUED
    assert refused
    for answer, took_s in refused:
        assert answer.status_code in (429, 503), answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert took_s < 10.0
    assert all(a.json()["usage"]["completion_tokens"] == NUM_TOKENS for a in served)
    await assert_no_leak(crowded)


async def test_without_pooling_every_instance_is_alone(static: LocalCluster) -> None:
    """The static baseline: nothing is lent, and one instance is the limit of a request."""
    capacity = NUM_BLOCKS * BLOCK_SIZE
    async with http_client(static) as http:
        too_long = await http.post("/v1/completions", json=body(2, max_tokens=capacity))
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body(8, max_tokens=70)) for _ in range(6))
        )
    assert [answer.status_code for answer in answers] == [200] * 6
    for inst_id in range(2):
        assert await worker_metric(static, inst_id, "moved_blocks_total") == 0.0
    view = await static.wait_view(lambda view: len(view.instances) == 2, 10.0)
    assert all(i.load.lent_blocks == i.load.borrowed_blocks == 0 for i in view.instances)
    await assert_no_leak(static)
