"""Whatever the model says, the output matches, or fails clearly; wherever it was begun."""

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.worker.engine.sampling.grammar import Grammar
from services.worker.engine.sequence import Sequence
from tests.unit.grammars import EOS, VOCAB_SIZE, VOCABULARY, compiler, json_grammar, regex, token_id
from tests.unit.worker.engine.sampling.builders import next_tokens, sequence_of

COMPILER = compiler()


def grammar_sequence(text: str, output: Seq[int] = (), **params: Any) -> Sequence:
    sequence = sequence_of(output=output, ends=[EOS], **params)
    grammar = Grammar(COMPILER.compile(text), frozenset({EOS}))
    return replace(sequence, request=replace(sequence.request, grammar=grammar))


def logits_at(step: int, num_rows: int = 1, seed: int = 1) -> torch.Tensor:
    generator = np.random.default_rng(seed * 1000 + step)
    return torch.tensor(generator.normal(size=(num_rows, VOCAB_SIZE)) * 3, dtype=torch.float32)


def generate(sequence: Sequence, num_steps: int, seed: int = 1) -> list[int]:
    """The output, without its end; what the model says depends on the step alone."""
    while sequence.num_output_tokens < num_steps:
        (token,) = next_tokens(logits_at(sequence.num_output_tokens, seed=seed), [sequence])
        if sequence.failure is not None:
            raise sequence.failure
        sequence.token_ids.append(token)
        if token == EOS:
            break
    return sequence.token_ids[1:]


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 7, None]},
        {"const": {"a": [1]}},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]?$"},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ]
)


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3})
    objects = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )
    either = st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several})
    return arrays | objects | either


SCHEMAS = st.recursive(SCALARS, _containers, max_leaves=6)


@settings(deadline=None, max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 999), is_greedy=st.booleans())
def test_every_output_parses_and_is_valid(
    schema: dict[str, Any], seed: int, is_greedy: bool
) -> None:
    text = json_grammar({**schema, "x-guidance": {"whitespace_flexible": False}})
    sequence = grammar_sequence(text, temperature=0.0 if is_greedy else 1.0, seed=seed)
    output = generate(sequence, 400, seed)
    assert output[-1] == EOS
    jsonschema.validate(json.loads(VOCABULARY.decode(output[:-1])), schema)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 1.2, "top_p": 0.9, "seed": 5}, id="seeded"),
        pytest.param({"repetition_penalty": 1.5, "frequency_penalty": 1.0}, id="penalties"),
    ],
)
def test_it_goes_on_elsewhere_with_the_token_that_would_have_come(params: dict[str, Any]) -> None:
    text = regex("[a-f]{30}-[0-9]{30}")
    whole = generate(grammar_sequence(text, **params), 100)
    assert len(whole) == 62
    for cut in (1, 29, 31, 61):
        assert generate(grammar_sequence(text, whole[:cut], **params), 100) == whole


def test_a_grammar_that_has_ended_forces_the_end_whatever_is_asked_for() -> None:
    sequence = grammar_sequence(regex("ab"), min_tokens=10, logit_bias={EOS: -100.0})
    output = generate(sequence, 20)
    assert (VOCABULARY.decode(output), output[-1]) == ("ab", EOS)


def test_it_may_end_before_it_must_but_not_before_min_tokens() -> None:
    likely_end = {EOS: 100.0}
    assert generate(grammar_sequence(regex("a+"), logit_bias=likely_end), 20)[1:] == [EOS]
    output = generate(grammar_sequence(regex("a+"), logit_bias=likely_end, min_tokens=5), 20)
    assert len(output) == 6


def test_a_likeliest_token_that_is_allowed_is_taken_as_it_is() -> None:
    text = regex("[a-z]+")
    allowed = grammar_sequence(text)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, token_id("q")] = 1.0
    before = logits.clone()
    assert next_tokens(logits, [allowed]) == [token_id("q")]
    assert torch.equal(logits, before)
    # It may end now, and then its end counts as allowed, too.
    allowed.token_ids.append(token_id("q"))
    logits[0, EOS] = 2.0
    assert next_tokens(logits, [allowed]) == [EOS]


def test_others_in_the_batch_are_left_alone() -> None:
    logits = logits_at(0, num_rows=3)
    plain = next_tokens(logits, [sequence_of(), sequence_of(), sequence_of()])
    mixed = [sequence_of(), grammar_sequence(regex("0")), sequence_of()]
    tokens = next_tokens(logits, mixed)
    assert (tokens[0], tokens[2]) == (plain[0], plain[2])
    assert tokens[1] == token_id("0")


def test_output_that_does_not_match_fails_its_sequence_alone() -> None:
    """Where another instance went on with what this grammar could not have brought."""
    wrong = grammar_sequence(regex("[0-9]+"), output=[token_id("x")])
    right = grammar_sequence(regex("[0-9]"))
    tokens = next_tokens(logits_at(0, num_rows=2), [wrong, right])
    assert isinstance(wrong.failure, InvalidRequest)
    assert right.failure is None
    assert VOCABULARY.decode([tokens[1]]).isdigit()


def test_a_dead_end_is_an_error_and_not_a_token() -> None:
    """This vocabulary's ids end where the model's logits do not begin."""
    sequence = grammar_sequence(regex("[0-9]"))
    narrow = logits_at(0)[:, :3]
    next_tokens(narrow, [sequence])
    assert sequence.failure is not None
    assert "allows no token" in sequence.failure.message


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("start: nowhere", id="unknown rule"),
        pytest.param("start: start", id="endless"),
        pytest.param(regex("(a"), id="unclosed"),
        pytest.param("x" * 200_000, id="too large"),
        pytest.param(json_grammar({"not": {}}), id="unsupported keyword"),
        pytest.param(json_grammar({"$ref": "#"}), id="reference to itself"),
        pytest.param(json_grammar({"$ref": "file:///etc/passwd"}), id="reference to a file"),
        pytest.param(json_grammar({"enum": []}), id="no value"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(text)
    assert 0 < len(caught.value.message) < 400
