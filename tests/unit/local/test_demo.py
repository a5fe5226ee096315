"""When a demonstration counts as good, and how it is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.demo import Report, as_single_instance, is_same_answer
from services.local.plan import ClusterSpec
from services.local.showcase import Outcome

GOOD = Report(
    prompt_tokens=2000,
    kv_capacity_tokens_per_instance=1536,
    borrowed_blocks_peak=34,
    tokens_equal_to_single_instance=True,
    tokens_per_second=9.5,
    leaked_blocks=0,
)


def test_the_report_is_one_line_of_json() -> None:
    assert "\n" not in GOOD.to_json()
    assert json.loads(GOOD.to_json()) == {
        "prompt_tokens": 2000,
        "kv_capacity_tokens_per_instance": 1536,
        "borrowed_blocks_peak": 34,
        "tokens_equal_to_single_instance": True,
        "tokens_per_second": 9.5,
        "leaked_blocks": 0,
    }


def test_it_is_good_only_when_everything_holds() -> None:
    assert GOOD.is_good
    assert not replace(GOOD, tokens_equal_to_single_instance=False).is_good
    assert not replace(GOOD, leaked_blocks=1).is_good
    assert not replace(GOOD, borrowed_blocks_peak=0).is_good


def test_the_single_instance_has_the_memory_of_all() -> None:
    spec = ClusterSpec(Path("/m"), "m", num_instances=4, num_blocks=32)
    single = as_single_instance(spec)
    assert (single.num_instances, single.num_blocks) == (1, 128)


def test_answers_differ_by_text_or_by_length() -> None:
    answer = Outcome(text="yes", completion_tokens=2)
    assert is_same_answer(answer, replace(answer))
    assert not is_same_answer(answer, replace(answer, text="no"))
    assert not is_same_answer(answer, replace(answer, completion_tokens=3))


def test_the_rate_is_that_of_decoding() -> None:
    outcome = Outcome(completion_tokens=11, arrivals_s=[100.0, 101.0, 105.0])
    assert outcome.tokens_per_second == pytest.approx(2.0)
    assert Outcome(completion_tokens=1, arrivals_s=[1.0]).tokens_per_second == 0
