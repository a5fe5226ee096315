"""Owners die, stop or restart under many streams: every client gets what it would have got.

Greedy and seeded streams, as clients see them, compared with an undisturbed run to the token.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from services.local.cluster import LocalCluster
from services.local.map_reader import ClusterView
from services.local.plan import worker_name
from tests.integration.cluster import ANSWER_DEADLINE_S, http_client

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(240)]

NUM_STREAMS = 8
#: Begun well, and far from the end.
MIDDLE = 8
RESUMED = "infinite_llm_router_streams_resumed_total"


@dataclass
class Answer:
    """What one client got."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    async def read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._add(json.loads(line.removeprefix("data: ")))

    def _add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        (choice,) = event["choices"]
        self.text += choice["text"]
        self.tokens += choice["logprobs"]["tokens"]
        self.logprobs += choice["logprobs"]["token_logprobs"]
        self.finish_reason = choice["finish_reason"]


def bodies(cluster: LocalCluster, num_new: int) -> list[dict[str, Any]]:
    """Half of them greedy, half seeded with everything that looks back at the tokens so far."""
    common = {
        "model": cluster.spec.model_name,
        "max_tokens": num_new,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 0,
    }
    greedy = {"temperature": 0}
    seeded = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "min_tokens": num_new}
    return [
        common
        | {"prompt": f"Once upon a time, in village number {index}, there lived"}
        | (greedy if index % 2 else {**seeded, "frequency_penalty": 0.2, "seed": index})
        for index in range(NUM_STREAMS)
    ]


@asynccontextmanager
async def streaming(cluster: LocalCluster, num_new: int) -> AsyncIterator[list[Answer]]:
    """In the middle of all streams; their ends are awaited after the block."""
    answers = [Answer() for _ in range(NUM_STREAMS)]
    async with http_client(cluster) as client, asyncio.TaskGroup() as tasks:
        for answer, body in zip(answers, bodies(cluster, num_new), strict=True):
            tasks.create_task(answer.read(client, body))
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while min(len(answer.tokens) for answer in answers) < MIDDLE:
                await asyncio.sleep(0.02)
        yield answers


async def undisturbed(cluster: LocalCluster, num_new: int) -> list[Answer]:
    await cluster.wait_view(lambda view: len(view.instances) == 2, ANSWER_DEADLINE_S)
    async with streaming(cluster, num_new) as answers:
        pass
    return answers


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert (answer.text, answer.tokens) == (wanted.text, wanted.tokens)
        assert answer.finish_reason == wanted.finish_reason == "length"
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


async def num_resumed(cluster: LocalCluster) -> int:
    async with http_client(cluster) as client:
        text = (await client.get("/metrics")).text
    return int(float(text.split(f"\n{RESUMED} ")[1].split()[0]))


def owned(view: ClusterView, inst_id: int) -> set[int]:
    return {entry.req_id for entry in view.entries if entry.owner_inst_id == inst_id}


async def test_streams_go_on_when_their_owner_is_killed(roomy: LocalCluster) -> None:
    expected = await undisturbed(roomy, 40)
    before = await num_resumed(roomy)
    async with streaming(roomy, 40) as answers:
        await roomy.kill(worker_name(0))
    assert_same(answers, expected)
    assert await num_resumed(roomy) > before


async def test_streams_go_on_when_their_owner_is_stopped_and_nothing_runs_on_for_nobody(
    roomy: LocalCluster,
) -> None:
    expected = await undisturbed(roomy, 40)
    before = await num_resumed(roomy)
    pid = roomy.processes[worker_name(0)].pid
    assert pid is not None
    try:
        async with streaming(roomy, 40) as answers:
            os.kill(pid, signal.SIGSTOP)
        assert_same(answers, expected)
        assert await num_resumed(roomy) > before
    finally:
        os.kill(pid, signal.SIGCONT)
    view = await roomy.wait_view(lambda view: not view.entries and len(view.instances) == 2, 20)
    assert not owned(view, 0)


async def test_streams_outlive_a_restart_of_every_worker(roomy: LocalCluster) -> None:
    num_new = 340
    expected = await undisturbed(roomy, num_new)
    before = await num_resumed(roomy)
    async with streaming(roomy, num_new) as answers:
        for inst_id in range(2):
            assert any(answer.finish_reason is None for answer in answers), "too fast to matter"
            await roomy.processes[worker_name(inst_id)].kill()
            await roomy.restart(worker_name(inst_id))
    assert_same(answers, expected)
    assert await num_resumed(roomy) > before + NUM_STREAMS // 2
