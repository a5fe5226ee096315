"""The same seed gives the same tokens in company, after preemption and wherever the blocks lie.

And what an application developer reads with the official client: choices and log probabilities.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import openai
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.ids import new_req_id
from services.local.cluster import LocalCluster
from services.local.plan import HOST
from tests.integration.cluster import ANSWER_DEADLINE_S, BLOCK_SIZE, http_client, worker_metric
from tests.integration.test_exactness import HALF_LENT, peak_share_lent, prompt_of

pytestmark = [pytest.mark.integration, pytest.mark.model]

HITS = "prefix_cache_hit_tokens"
STORY = "Once upon a time, in a village by the sea, there lived an old fisherman who"


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


def sampled(seed: int) -> types_pb2.SamplingParams:
    """With everything that looks back at the tokens so far."""
    return types_pb2.SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=200,
        min_p=0.001,
        seed=seed,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logprobs=1,
    )


async def ask(
    cluster: LocalCluster,
    prompt: Sequence[int],
    sampling: types_pb2.SamplingParams,
    num_new: int = 24,
    inst_id: int = 0,
) -> Answer:
    """Straight to one worker."""
    request = worker_pb2.GenerateTokensRequest(
        req_id=new_req_id(),
        prompt_token_ids=prompt,
        max_tokens=num_new,
        sampling=sampling,
        ignore_eos=True,
    )
    answer = Answer()
    async with grpc.aio.insecure_channel(f"{HOST}:{cluster.ports.workers[inst_id]}") as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        async for message in stub.Generate(request, timeout=ANSWER_DEADLINE_S):
            answer.token_ids.extend(message.token_ids)
            answer.logprobs.extend(one.chosen for one in message.logprobs)
            answer.prompt_logprobs.extend(one.chosen for one in message.prompt_logprobs)
    return answer


async def counted(cluster: LocalCluster, name: str) -> float:
    """A counter of the workers, summed, since their start."""
    inst_ids = range(cluster.spec.num_instances)
    return sum([await worker_metric(cluster, inst_id, f"{name}_total") for inst_id in inst_ids])


async def test_seeds_are_reproduced_under_load(pair: LocalCluster) -> None:
    prompts = [prompt_of(20 + index) for index in range(4)]
    alone = [await ask(pair, prompt, sampled(seed)) for seed, prompt in enumerate(prompts)]
    greedy = types_pb2.SamplingParams()
    together = await asyncio.gather(
        *(ask(pair, prompt, sampled(seed)) for seed, prompt in enumerate(prompts)),
        *(ask(pair, prompt_of(40 + index), greedy) for index in range(3)),
    )
    assert [a.token_ids for a in together[:4]] == [a.token_ids for a in alone]
    assert len({tuple(a.token_ids) for a in alone}) == 4


async def test_seeds_are_reproduced_after_preemption(pair: LocalCluster) -> None:
    """Together they need half as much memory again as both instances have."""
    prompts = [prompt_of(30 + index) for index in range(9)]
    num_new = 6 * BLOCK_SIZE
    before = await counted(pair, "preemptions")
    together = await asyncio.gather(
        *(ask(pair, prompt, sampled(seed), num_new) for seed, prompt in enumerate(prompts))
    )
    assert await counted(pair, "preemptions") > before
    for seed in (0, 4, 8):
        alone = await ask(pair, prompts[seed], sampled(seed), num_new)
        assert together[seed].token_ids == alone.token_ids
        assert together[seed].logprobs == pytest.approx(alone.logprobs, abs=1e-3)


async def test_blocks_that_are_lent_change_neither_tokens_nor_log_probabilities(
    pair: LocalCluster, big: LocalCluster
) -> None:
    prompt, sampling = prompt_of(HALF_LENT), sampled(seed=7)
    sampling.prompt_logprobs = 0
    alone = await ask(big, prompt, sampling)
    lent = asyncio.create_task(ask(pair, prompt, sampling))
    tokens = asyncio.create_task(_tokens_of(lent))
    assert await peak_share_lent(pair, tokens) > 0.4
    pooled = await lent
    assert pooled.token_ids == alone.token_ids
    assert pooled.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    assert len(alone.prompt_logprobs) == HALF_LENT - 1
    assert pooled.prompt_logprobs == pytest.approx(alone.prompt_logprobs, abs=1e-3)


async def _tokens_of(answer: asyncio.Task[Answer]) -> tuple[int, ...]:
    return tuple((await answer).token_ids)


async def test_the_openai_client_gets_choices_that_share_their_prompt(pair: LocalCluster) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    hits_before = await counted(pair, HITS)
    async with openai.AsyncOpenAI(
        base_url=f"{pair.http_url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        answers = [
            await client.completions.create(
                model=pair.spec.model_name,
                prompt=STORY,
                n=3,
                seed=5,
                temperature=1,
                max_tokens=12,
                logprobs=2,
                extra_body={"ignore_eos": True},
            )
            for _ in range(2)
        ]
    texts = [[choice.text for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2]
    logprobs = answers[0].choices[1].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == texts[0][1]
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    usage = answers[1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens == 36
    # All choices but the first find what the first one has computed.
    assert await counted(pair, HITS) - hits_before >= 4 * BLOCK_SIZE


async def test_echo_scores_a_text(pair: LocalCluster) -> None:
    """As evaluation harnesses do: no new tokens, and likely words are likely."""
    async with http_client(pair) as http:
        scores = []
        for text in ("The capital of France is Paris", "The capital of France is cabbage"):
            body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
            answer = await http.post("/v1/completions", json={"model": pair.spec.model_name} | body)
            choice = answer.json()["choices"][0]
            assert choice["text"] == text
            values = choice["logprobs"]["token_logprobs"]
            assert values[0] is None and all(value <= 0 for value in values[1:])
            scores.append(math.fsum(values[5:]))
    assert scores[0] > scores[1] + 2


async def test_a_chat_tells_how_likely_its_tokens_were(pair: LocalCluster) -> None:
    async with http_client(pair) as http:
        answer = await http.post(
            "/v1/chat/completions",
            json={
                "model": pair.spec.model_name,
                "messages": [{"role": "user", "content": "Say hello"}],
                "temperature": 0,
                "max_tokens": 8,
                "logprobs": True,
                "top_logprobs": 3,
            },
        )
    choice = answer.json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(token["bytes"]) for token in content).decode()
        == (choice["message"]["content"])
    )
    for token in content:
        best = [other["logprob"] for other in token["top_logprobs"]]
        assert best == sorted(best, reverse=True)
        assert token["logprob"] == best[0]
        assert sum(map(math.exp, best)) <= 1 + 1e-5
