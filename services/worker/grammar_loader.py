"""Grammars from the wire, compiled off the event loop and off the engine's thread.

The router has seen before that one compiles in good time. Used by the request checks.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from services.common.grammars import GrammarCompiler
from services.worker.engine.sampling.grammar import Grammar

#: One that took longer is kept, so that the other choices of its request only copy it.
SLOW_S = 0.05
_MAX_KEPT = 4


class GrammarLoader:
    """Owner of the thread; the vocabulary is loaded with the first grammar."""

    def __init__(
        self, load_compiler: Callable[[], GrammarCompiler], eos_token_ids: frozenset[int]
    ) -> None:
        self._load_compiler = load_compiler
        self._eos_token_ids = eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar")

    async def load(self, grammar: str) -> Grammar:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._load, grammar)

    def _load(self, grammar: str) -> Grammar:
        if self._compiler is None:
            self._compiler = self._load_compiler()
        return Grammar(self._matcher(self._compiler, grammar), self._eos_token_ids)

    def _matcher(self, compiler: GrammarCompiler, grammar: str) -> LLMatcher:
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar].deep_copy()
        started_s = time.monotonic()
        matcher = compiler.compile(grammar)
        if time.monotonic() - started_s > SLOW_S:
            self._kept[grammar] = matcher.deep_copy()
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher
