"""Sends one prompt through the router and follows the Request Placement Map meanwhile."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import InfiniteLLMError
from services.local.client import ChatRequest, stream_chat
from services.local.map_reader import ClusterView, MapReader, num_borrowed_blocks

_SAMPLE_PERIOD_S = 0.2


@dataclass(slots=True)
class Outcome:
    """Fills up while the request runs."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    borrowed_blocks_peak: int = 0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding: from the first token to the last."""
        if len(self.arrivals_s) < 2:
            return 0.0
        return (self.completion_tokens - 1) / (self.arrivals_s[-1] - self.arrivals_s[0])


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is told what: each new map in which somebody holds something, each piece of text."""

    on_view: Callable[[ClusterView], None]
    on_text: Callable[[str], None]


async def run_prompt(
    http_url: str, gmanager_address: str, request: ChatRequest, audience: Audience
) -> Outcome:
    outcome = Outcome()
    sampling = asyncio.create_task(_sample(gmanager_address, outcome, audience))
    try:
        async for delta in stream_chat(http_url, request):
            if delta.text:
                outcome.arrivals_s.append(time.monotonic())
                outcome.text += delta.text
                audience.on_text(delta.text)
            outcome.prompt_tokens = delta.prompt_tokens or outcome.prompt_tokens
            outcome.completion_tokens = delta.completion_tokens or outcome.completion_tokens
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
    return outcome


async def _sample(gmanager_address: str, outcome: Outcome, audience: Audience) -> None:
    async with MapReader(gmanager_address) as reader:
        while True:
            try:
                view = await reader.read()
            except InfiniteLLMError:
                # It may be restarting; the stream goes on without it.
                await asyncio.sleep(_SAMPLE_PERIOD_S)
                continue
            borrowed = num_borrowed_blocks(view)
            outcome.borrowed_blocks_peak = max(outcome.borrowed_blocks_peak, borrowed)
            if view.entries:
                audience.on_view(view)
            await asyncio.sleep(_SAMPLE_PERIOD_S)
