"""Grammars over the tiny vocabulary of the router's tests."""

from llguidance import LLMatcher, LLTokenizer

from services.common.grammars import GrammarCompiler
from tests.unit.router.vocabulary import byte_level_bpe

VOCABULARY = byte_level_bpe()


def token_id(piece: str) -> int:
    found = VOCABULARY.token_to_id(piece)
    assert found is not None
    return found


EOS = token_id("<|im_end|>")
#: Larger than the tokenizer's, as some models have it.
VOCAB_SIZE = VOCABULARY.get_vocab_size() + 6


def compiler(eos_token_id: int = EOS) -> GrammarCompiler:
    return GrammarCompiler(
        LLTokenizer(VOCABULARY.to_str(), n_vocab=VOCAB_SIZE, eos_token=[eos_token_id])
    )


def json_grammar(schema: object) -> str:
    assert isinstance(schema, dict)
    return LLMatcher.grammar_from_json_schema(schema)


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)
