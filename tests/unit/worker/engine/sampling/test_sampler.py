"""What requests change about their logits, against the oracle; and what a plain batch costs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from services.common.errors import InvalidRequest
from services.common.sampling import SamplingParams
from services.worker.engine.sampling.logits import edit
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.state import TokenCounts
from tests.unit.worker.engine.sampling import oracle
from tests.unit.worker.engine.sampling.builders import next_tokens, sequence_of

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=10)
EDITS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5, 100.0]),
        "presence_penalty": st.sampled_from([0.0, 2.0, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-100, 100)),
        "min_tokens": st.integers(0, 5),
    }
)
ROW = st.tuples(EDITS, TOKENS.filter(bool), TOKENS, st.sets(st.integers(0, VOCAB - 1), max_size=3))


def logits_for(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 4


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert next_tokens(logits, [sequence_of(), sequence_of()]) == [1, 0]


@settings(deadline=None, max_examples=150)
@given(st.lists(ROW, min_size=1, max_size=4))
def test_edits_agree_with_the_oracle(
    rows: list[tuple[dict[str, Any], list[int], list[int], set[int]]],
) -> None:
    before = logits_for(len(rows))
    sequences = [
        sequence_of(prompt, output, ends, **params) for params, prompt, output, ends in rows
    ]
    after = before.clone()
    edit(after.numpy(), sequences)
    for row, (params, prompt, output, ends) in enumerate(rows):
        wanted = oracle.edited(before[row].tolist(), SamplingParams(**params), prompt, output, ends)
        assert after[row].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-4)


def test_counts_follow_a_growing_sequence() -> None:
    """Step by step or all at once, as after a preemption: the same."""
    tokens = torch.randint(0, 300, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt, output = tokens[:100], tokens[100:]
    stepwise, at_once = TokenCounts(prompt), TokenCounts(prompt)
    for token in output:
        stepwise.add([token])
    at_once.add(output)
    for counts in (stepwise, at_once):
        found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
        assert found == {token: float(output.count(token)) for token in tokens}
        assert counts.num_output_tokens == len(output)


def test_rows_that_ask_for_nothing_are_not_touched_by_those_that_do() -> None:
    logits = logits_for(3)
    before = logits.clone()
    likeliest = logits.argmax(-1).tolist()
    banned = sequence_of(logit_bias={likeliest[1]: -100.0})
    tokens = next_tokens(logits, [sequence_of(), banned, sequence_of()])
    assert (tokens[0], tokens[2]) == (likeliest[0], likeliest[2])
    assert tokens[1] == logits[1].topk(2).indices[1]
    assert torch.equal(logits, before)


def test_a_plain_batch_is_one_argmax() -> None:
    """No operation of torch looks at the logits but the view that numpy gets; none copies them."""
    seen: list[str] = []

    class Watched(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    logits = logits_for(4)
    with Watched():
        assert sample(logits, [1, 2, 3, 4], [sequence_of() for _ in range(4)]) == [1, 2, 3, 4]
    assert not seen


def test_the_minimum_length_ends_at_once() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    for num_output, expected in [(0, 2), (1, 2), (2, 1)]:
        sequence = sequence_of(output=[0] * num_output, ends=[1], min_tokens=2)
        assert next_tokens(logits, [sequence]) == [expected]


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_for(3)
    sequences = [
        sequence_of(logprobs=2, temperature=1.0, seed=1, logit_bias={0: 50.0}),
        sequence_of(logprobs=0),
        sequence_of(),
    ]
    tokens = next_tokens(logits, sequences)
    wanted = logits.log_softmax(-1)
    assert tokens[0] == 0
    for row, num_top in [(0, 2), (1, 0)]:
        found = sequences[row].sampling.last_logprobs
        assert found is not None
        top = wanted[row].topk(num_top)
        assert found.chosen == pytest.approx(wanted[row, tokens[row]].item(), abs=1e-5)
        assert found.top_token_ids == tuple(top.indices.tolist())
        assert found.top == pytest.approx(top.values.tolist(), abs=1e-5)
    assert sequences[2].sampling.last_logprobs is None


NUMBERS = st.one_of(st.floats(), st.floats(-3, 3), st.sampled_from([0.0, 1.0, -1.0]))
COUNTS = st.one_of(st.integers(), st.integers(0, 30))
OPTIONAL = st.none() | COUNTS
ANY_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": NUMBERS,
        "top_p": NUMBERS,
        "top_k": COUNTS,
        "seed": COUNTS,
        "min_p": NUMBERS,
        "repetition_penalty": NUMBERS,
        "presence_penalty": NUMBERS,
        "frequency_penalty": NUMBERS,
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), NUMBERS, max_size=3),
        "min_tokens": COUNTS,
        "logprobs": OPTIONAL,
        "prompt_logprobs": OPTIONAL,
    },
)
ANY_LOGITS = st.lists(st.one_of(st.floats(width=32), st.just(0.0)), min_size=VOCAB, max_size=VOCAB)


@settings(deadline=None, max_examples=400)
@given(ANY_PARAMS, TOKENS, st.sets(st.integers(0, VOCAB - 1)), ANY_LOGITS)
def test_whatever_is_asked_gets_a_token_or_a_refusal_by_name(
    params: dict[str, Any], output: list[int], ends: set[int], logits: list[float]
) -> None:
    """Whatever the model says, too: infinities and what is not a number."""
    try:
        sequence = sequence_of((1, 2), output, ends, **params)
    except InvalidRequest as error:
        assert error.param in params
        return
    batch = torch.tensor([logits, [0.0] * VOCAB])
    tokens = next_tokens(batch, [sequence, sequence_of()])
    assert 0 <= tokens[0] < VOCAB
    assert tokens[1] == 0


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, 100.1, float("nan"), float("inf")]),
        ("top_p", [0.0, -0.5, 1.01, float("nan")]),
        ("top_k", [-1]),
        ("seed", [-1, 2**64]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("repetition_penalty", [0.0, -1.0, 101.0, float("nan"), float("inf")]),
        ("presence_penalty", [-2.1, 2.1, float("nan")]),
        ("frequency_penalty", [-2.1, 2.1, float("nan")]),
        ("logit_bias", [{1: 101.0}, {1: float("nan")}, dict.fromkeys(range(1025), 1.0)]),
        ("min_tokens", [-1]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(param: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=param) as caught:
            SamplingParams(**{param: value})
        assert caught.value.param == param
