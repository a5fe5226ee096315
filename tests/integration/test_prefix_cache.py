"""A prefix that was computed once is not computed again, and the tokens stay the same."""

import grpc
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.ids import new_req_id
from services.local.cluster import LocalCluster
from services.local.plan import HOST
from tests.integration.cluster import ANSWER_DEADLINE_S, BLOCK_SIZE
from tests.integration.test_exactness import HALF_LENT, NUM_NEW, SHORT, oracle, prompt_of

pytestmark = [pytest.mark.integration, pytest.mark.model]


async def ask(
    cluster: LocalCluster, num_tokens: int, salt: str, **sampling: float
) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    request = worker_pb2.GenerateTokensRequest(
        req_id=new_req_id(),
        prompt_token_ids=prompt_of(num_tokens),
        max_tokens=NUM_NEW,
        sampling=types_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        ignore_eos=True,
        cache_salt=salt,
    )
    async with grpc.aio.insecure_channel(f"{HOST}:{cluster.ports.workers[0]}") as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        answers = [a async for a in stub.Generate(request, timeout=ANSWER_DEADLINE_S)]
    tokens = tuple(token for answer in answers for token in answer.token_ids)
    return tokens, sum(answer.cached_tokens for answer in answers)


async def test_the_second_time_only_the_last_block_is_computed(pair: LocalCluster) -> None:
    first, missed = await ask(pair, SHORT, "short")
    again, hit = await ask(pair, SHORT, "short")
    assert first == again == oracle(SHORT)
    assert (missed, hit) == (0, (SHORT - 1) // BLOCK_SIZE * BLOCK_SIZE)


async def test_a_salt_keeps_the_prefix_to_itself(pair: LocalCluster) -> None:
    await ask(pair, SHORT, "mine")
    assert await ask(pair, SHORT, "yours") == (oracle(SHORT), 0)


async def test_a_lent_prefix_is_used_where_it_lies(pair: LocalCluster) -> None:
    """The prompt is longer than one instance: what is found lies on the creditor, too."""
    first, missed = await ask(pair, HALF_LENT, "lent")
    again, hit = await ask(pair, HALF_LENT, "lent")
    assert first == again == oracle(HALF_LENT)
    assert missed == 0
    assert hit > HALF_LENT // 2


async def test_sampling_does_not_notice_the_cache(pair: LocalCluster) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 11}
    first, _ = await ask(pair, SHORT, "sampled", **sampling)
    again, hit = await ask(pair, SHORT, "sampled", **sampling)
    assert first == again
    assert hit > 0
