"""The same prompts give the same greedy tokens on one, two and four instances, and in transformers.

Freed blocks are poisoned with NaN on every instance, so that a block which was lent away and is
still read locally cannot go unnoticed.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import cache

import grpc
import pytest
import torch

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.ids import new_req_id
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.local.cluster import LocalCluster
from services.local.plan import HOST
from tests.integration.cluster import ANSWER_DEADLINE_S, CAPACITY_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.model]

NUM_NEW = 16
#: Within one instance, half lent on two, and mostly lent on four.
SHORT, HALF_LENT, MOSTLY_LENT = 100, 650, 1250


@cache
def prompt_of(num_tokens: int) -> tuple[int, ...]:
    """Seeded token ids of plain words: greedy answers differ from prompt to prompt."""
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(torch.randint(300, 20_000, (num_tokens,), generator=generator).tolist())


@cache
def oracle(num_tokens: int) -> tuple[int, ...]:
    """transformers' own generate, float32, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    folder = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([prompt_of(num_tokens)])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return tuple(out[0, num_tokens:].tolist())


async def generate(
    cluster: LocalCluster,
    prompt: Sequence[int],
    inst_id: int = 0,
    sampling: types_pb2.SamplingParams | None = None,
) -> tuple[int, ...]:
    """Straight to one worker: token ids in, token ids out."""
    request = worker_pb2.GenerateTokensRequest(
        req_id=new_req_id(),
        prompt_token_ids=prompt,
        max_tokens=NUM_NEW,
        sampling=sampling,
        ignore_eos=True,
    )
    async with grpc.aio.insecure_channel(f"{HOST}:{cluster.ports.workers[inst_id]}") as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        answers = stub.Generate(request, timeout=ANSWER_DEADLINE_S)
        return tuple([token async for answer in answers for token in answer.token_ids])


async def peak_share_lent(cluster: LocalCluster, answer: asyncio.Task[tuple[int, ...]]) -> float:
    """The largest share of the running request's blocks that lay elsewhere while it ran."""
    share = 0.0
    while not answer.done():
        view = await cluster.view()
        lent = sum(entry.num_blocks for entry in view.entries if not entry.local)
        held = sum(entry.num_blocks for entry in view.entries)
        share = max(share, lent / held if held else 0.0)
        await asyncio.sleep(0.1)
    return share


@pytest.mark.parametrize("num_tokens", [SHORT, HALF_LENT, MOSTLY_LENT])
async def test_one_big_instance_agrees_with_transformers(
    big: LocalCluster, num_tokens: int
) -> None:
    assert await generate(big, prompt_of(num_tokens)) == oracle(num_tokens)


async def test_two_instances_agree_with_half_of_the_blocks_lent(pair: LocalCluster) -> None:
    answer = asyncio.create_task(generate(pair, prompt_of(HALF_LENT)))
    assert await peak_share_lent(pair, answer) > 0.4
    assert await answer == oracle(HALF_LENT)


async def test_four_instances_agree_with_most_blocks_lent(quad: LocalCluster) -> None:
    answer = asyncio.create_task(generate(quad, prompt_of(MOSTLY_LENT)))
    assert await peak_share_lent(quad, answer) > 0.6
    assert await answer == oracle(MOSTLY_LENT)


async def test_requests_side_by_side_agree_while_they_lend_to_each_other(
    pair: LocalCluster,
) -> None:
    """Owners on both instances, one too long for its own; a batch of mixed steps."""
    lengths = [(SHORT, 0), (CAPACITY_TOKENS + 40, 0), (SHORT, 1), (60, 1)]
    answers = await asyncio.gather(
        *(generate(pair, prompt_of(num_tokens), inst_id) for num_tokens, inst_id in lengths)
    )
    for (num_tokens, _), answer in zip(lengths, answers, strict=True):
        assert answer == oracle(num_tokens)


async def test_a_seed_gives_the_same_tokens_wherever_the_blocks_lie(
    pair: LocalCluster, big: LocalCluster
) -> None:
    sampling = types_pb2.SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    alone = await generate(big, prompt_of(HALF_LENT), sampling=sampling)
    pooled = await generate(pair, prompt_of(HALF_LENT), sampling=sampling)
    assert alone == pooled != oracle(HALF_LENT)
