"""A prompt that no single instance can hold runs on two, and says the same as on a big one."""

import pytest

from services.local.client import ChatRequest
from services.local.cluster import LocalCluster
from services.local.prompt import build_request
from services.local.showcase import Audience, Outcome, run_prompt
from tests.integration.cluster import CAPACITY_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.model]

SILENT = Audience(on_view=lambda _: None, on_text=lambda _: None)


async def answer(cluster: LocalCluster, request: ChatRequest) -> Outcome:
    return await run_prompt(cluster.http_url, cluster.gmanager_address, request, SILENT)


async def test_a_long_prompt_says_the_same_on_two_small_instances_as_on_a_big_one(
    pair: LocalCluster, big: LocalCluster
) -> None:
    request = build_request(pair.spec, max_new_tokens=24)
    pooled, single = await answer(pair, request), await answer(big, request)
    assert pooled.prompt_tokens == single.prompt_tokens > CAPACITY_TOKENS
    assert pooled.borrowed_blocks_peak > 0
    assert single.borrowed_blocks_peak == 0
    assert pooled.completion_tokens == single.completion_tokens == 24
    assert pooled.text == single.text
