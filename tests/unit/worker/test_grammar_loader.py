"""Compiling takes a thread's time once, and what was compiled is one sequence's alone."""

from unittest.mock import Mock

import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.worker import grammar_loader
from services.worker.engine.sampling.grammar import Grammar
from services.worker.grammar_loader import GrammarLoader
from tests.unit.grammars import EOS, VOCAB_SIZE, VOCABULARY, compiler, regex, token_id


def next_of(grammar: Grammar) -> str:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    grammar.restrict(logits)
    return VOCABULARY.decode([int(logits.argmax())])


@pytest.mark.parametrize(("slow_s", "num_compiled"), [(-1.0, 6), (60.0, 12)])
async def test_slow_grammars_are_compiled_once_and_forgotten_in_time(
    monkeypatch: pytest.MonkeyPatch, slow_s: float, num_compiled: int
) -> None:
    monkeypatch.setattr(grammar_loader, "SLOW_S", slow_s)
    spy = Mock(wraps=compiler())
    load = Mock(return_value=spy)
    loader = GrammarLoader(load, frozenset({EOS}))
    for digit in "012345":
        text = regex(f"{digit}x")
        first, second = await loader.load(text), await loader.load(text)
        first.follow([token_id(digit)], 0)
        assert (next_of(first), next_of(second)) == ("x", digit)
    assert spy.compile.call_count == num_compiled
    assert load.call_count == 1
    await loader.load(regex("5x"))
    await loader.load(regex("0x"))
    assert spy.compile.call_count == num_compiled + (1 if slow_s < 0 else 2)


async def test_a_bad_grammar_leaves_nothing_behind() -> None:
    loader = GrammarLoader(compiler, frozenset({EOS}))
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await loader.load("start: nowhere")
    assert next_of(await loader.load(regex("7"))) == "7"
