"""Compiles grammars for one tokenizer, within limits. Blocks; nothing here awaits or forks.

Used by the worker, which enforces them, and by the router's checking process, which finds out
beforehand whether that would be well. A grammar is Lark or JSON, as llguidance has it.
"""

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.errors import InvalidRequest

#: JSON schemas included.
MAX_GRAMMAR_CHARS = 128 * 1024
_MAX_REASON_CHARS = 300

# A step of one grammar takes 10 ms at most, and what it keeps 40 MB; usual ones take 0.1 ms.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=30_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Owner of the vocabulary as llguidance wants it, which takes 50 MB."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls, folder: Path, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()
    ) -> "GrammarCompiler":
        """Raises InvalidRequest where the model's tokenizer is of a kind that has no grammars."""
        text = (folder / "tokenizer.json").read_text("utf-8")
        ends = list(eos_token_ids) or None
        try:
            tokenizer = LLTokenizer(text, eos_token=ends)
            if tokenizer.vocab_size < vocab_size:  # some models' are padded
                tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
            return cls(tokenizer)
        except ValueError as error:
            reason = f"grammars do not work with this model's tokenizer: {_short(str(error))}"
            raise InvalidRequest(reason, "grammar") from error

    def compile(self, grammar: str) -> LLMatcher:
        """Raises InvalidRequest where the grammar is wrong, too large, or matches nothing."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"must have at most {MAX_GRAMMAR_CHARS} characters", "grammar")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some faults show only now
        if matcher.is_error():
            raise InvalidRequest(_short(matcher.get_error()), "grammar")
        return matcher


def _short(reason: str) -> str:
    """The library may quote all of a grammar."""
    text = " ".join(reason.removesuffix("<non-verbose/>").split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
