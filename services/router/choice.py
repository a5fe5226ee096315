"""One choice of an answer: chunks of tokens in, events of text out. Used by generation."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.ids import InstId
from services.router.request import TextRequest
from services.router.text.assembler import TextAssembler
from services.router.text.logprobs import LogprobTexts, ShownToken
from services.router.text.tokenizer import Tokenizer
from services.router.token_job import FinishReason, TokenChunk, TokenJob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextEvent:
    index: int
    """Which choice: the choices of the first prompt come first."""
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[ShownToken, ...] = ()
    """Of the tokens since the last event, whether or not their text is complete."""
    prompt_logprobs: tuple[ShownToken, ...] = ()
    """Once, where they were asked for."""


Emit = Callable[[TextEvent], Awaitable[None]]


class PromptShare:
    """What the first choice of a prompt finds out for the others, which begin after it."""

    def __init__(self) -> None:
        self._is_known = asyncio.Event()
        self.inst_id: InstId | None = None
        """Where the prompt is computed, so that the others find it in the cache."""
        self.num_cached_tokens = 0
        self.logprobs: tuple[TokenLogprobs, ...] = ()

    async def wait(self) -> None:
        """Ends with the first choice's first chunk; whoever waits is cancelled if that fails."""
        await self._is_known.wait()

    def learn(self, chunk: TokenChunk) -> None:
        if not self._is_known.is_set():
            self.inst_id = chunk.inst_id
            self.num_cached_tokens = chunk.num_cached_tokens
            self.logprobs = chunk.prompt_logprobs
            self._is_known.set()


class Choice:
    """Owner of the text of one sequence."""

    def __init__(
        self, index: int, job: TokenJob, request: TextRequest, tokenizer: Tokenizer, emit: Emit
    ) -> None:
        self._index = index
        self._job = job
        self._request = request
        self._tokenizer = tokenizer
        self._emit = emit
        min_tokens = request.sampling.min_tokens
        self._assembler = TextAssembler(tokenizer.decode, request.stop, min_tokens)
        self._texts = LogprobTexts(tokenizer.token_bytes)
        self._has_begun = False

    @property
    def num_tokens(self) -> int:
        return self._assembler.num_tokens

    @property
    def _is_echo_only(self) -> bool:
        return self._request.max_tokens == 0

    async def on_chunk(self, chunk: TokenChunk, share: PromptShare) -> bool:
        """Whether the choice needs no more."""
        if not self._has_begun:
            self._has_begun = True
            await self._begin(share)
        if self._is_echo_only:
            return True
        text, logprobs = await self._tokenizer.in_decode_thread(lambda: self._push(chunk))
        if text or logprobs:
            await self._emit(TextEvent(self._index, text, None, logprobs))
        return self._assembler.stopped

    async def end(self, reason: FinishReason) -> None:
        text = await self._tokenizer.in_decode_thread(self._assembler.flush)
        if self._is_echo_only:
            reason = "length"
        elif self._assembler.stopped:
            reason = "stop"
        await self._emit(TextEvent(self._index, text, reason))

    async def _begin(self, share: PromptShare) -> None:
        """The prompt's text and log probabilities, where they are wanted."""
        if self._request.echo or self._request.sampling.prompt_logprobs is not None:
            work = self._tokenizer.in_decode_thread(lambda: self._prompt_event(share.logprobs))
            await self._emit(await work)

    def _prompt_event(self, logprobs: tuple[TokenLogprobs, ...]) -> TextEvent:
        request, token_ids = self._request, self._job.prompt_token_ids
        text = ""
        shown: tuple[ShownToken, ...] = ()
        extra: tuple[ShownToken, ...] = ()
        if request.echo:
            prompt = request.prompts[self._index // request.n]
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids)
            if request.sampling.logprobs is not None:
                shown = self._texts.prompt(token_ids, logprobs)
        if request.sampling.prompt_logprobs is not None:
            extra = LogprobTexts(self._tokenizer.token_bytes).prompt(token_ids, logprobs)
        return TextEvent(self._index, text, None, shown, extra)

    def _push(self, chunk: TokenChunk) -> tuple[str, tuple[ShownToken, ...]]:
        before = self._assembler.num_tokens
        text = self._assembler.push(chunk.token_ids)
        # Tokens after a stop string do not count.
        token_ids = chunk.token_ids[: self._assembler.num_tokens - before]
        return text, self._texts.tokens(token_ids, chunk.logprobs)
