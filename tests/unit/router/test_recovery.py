"""When a sequence is worth another try, and which instances may be asked."""

from dataclasses import replace

import pytest

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InfiniteLLMError,
    InstanceLost,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from services.common.ids import Incarnation, InstId
from services.common.sampling import SamplingParams
from services.router.recovery import (
    ATTEMPTS_WITHIN_S,
    EXCLUDED_S,
    MAX_ATTEMPTS,
    RETRY_REFUSED_WITHIN_S,
    Recovery,
)
from services.router.token_job import TokenChunk, TokenJob
from tests.unit.router.test_routing import instance

JOB = TokenJob((1, 2, 3), 10, SamplingParams(prompt_logprobs=1), seed=5)
TIMEOUT_S = 30.0
LOSSES = [Unavailable("stopping"), InstanceLost("gone"), DeadlineExceeded("silent")]


def recovery(num_tokens: int = 0) -> Recovery:
    """Started at 100 s; `num_tokens` came since."""
    made = Recovery(JOB, TIMEOUT_S, 100.0)
    for token_id in range(num_tokens):
        made.receive(chunk(token_id))
    return made


def chunk(*token_ids: int) -> TokenChunk:
    return TokenChunk(InstId(1), token_ids, (), 0, (), None)


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("error", LOSSES)
def test_a_loss_is_worth_another_try(error: InfiniteLLMError, num_tokens: int) -> None:
    lost = recovery(num_tokens)
    assert lost.fail(instance(1), error, 103.0)
    assert lost.wait_until_s == 103.0 + TIMEOUT_S
    assert isinstance(lost.error, InstanceLost if num_tokens else type(error))


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("error", [InvalidRequest("bad", "seed"), InternalError("bug")])
def test_what_would_fail_anywhere_is_told_as_it_is(
    error: InfiniteLLMError, num_tokens: int
) -> None:
    failed = recovery(num_tokens)
    assert not failed.fail(instance(1), error, 101.0)
    assert failed.error is error


def test_a_request_that_never_fitted_is_told_so() -> None:
    refused = recovery()
    error = ContextLengthExceeded("too long")
    assert not refused.fail(instance(1), error, 101.0)
    assert refused.error is error


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_one_that_fitted_before_a_loss_may_fit_again(num_tokens: int) -> None:
    lost = recovery(num_tokens)
    assert lost.fail(instance(1), Unavailable("stopping"), 101.0)
    assert lost.fail(instance(2), ContextLengthExceeded("too long"), 102.0)
    assert lost.wait_until_s == 102.0 + TIMEOUT_S
    assert isinstance(lost.error, InstanceLost if num_tokens else Unavailable)


def test_who_has_nothing_yet_does_not_wait_for_room() -> None:
    full = recovery()
    assert full.fail(instance(1), Overloaded("full"), 101.0)
    assert full.wait_until_s <= 101.0
    assert isinstance(full.error, Overloaded)


def test_a_refusal_out_of_a_queue_is_final_unless_the_client_has_something() -> None:
    late_s = 100.0 + RETRY_REFUSED_WITHIN_S + 1
    assert not recovery().fail(instance(1), Overloaded("full"), late_s)
    begun = recovery(num_tokens=1)
    assert begun.fail(instance(1), Overloaded("full"), late_s)
    assert begun.wait_until_s == late_s + TIMEOUT_S


def test_attempts_are_bounded() -> None:
    lost = recovery(num_tokens=1)
    tries = [lost.fail(instance(n), Unavailable("x"), 101.0 + n) for n in range(MAX_ATTEMPTS)]
    assert tries == [True] * (MAX_ATTEMPTS - 1) + [False]


def test_restarts_of_long_ago_do_not_end_a_very_long_stream() -> None:
    lost = recovery(num_tokens=1)
    for number in range(3 * MAX_ATTEMPTS):
        lost.receive(chunk(number))
        assert lost.fail(instance(1), Unavailable("x"), 101.0 + number * ATTEMPTS_WITHIN_S / 4)


def test_a_begun_stream_knocks_at_full_queues_until_its_time_is_over() -> None:
    lost = recovery(num_tokens=1)
    lost.fail(instance(1), InstanceLost("gone"), 101.0)
    knocks = [lost.fail(instance(2), Overloaded("full"), 102.0 + n) for n in range(20)]
    assert all(knocks)
    assert lost.wait_until_s == 101.0 + TIMEOUT_S
    assert not lost.fail(instance(2), Overloaded("full"), 101.0 + TIMEOUT_S)


def test_a_failed_instance_is_asked_again_once_it_is_heard_of() -> None:
    lost = recovery()
    lost.fail(instance(1), Unavailable("stopping"), 103.0)

    def excluded(reported_at_s: float, now_s: float) -> bool:
        seen = [instance(1, reported_at_s=reported_at_s), instance(2)]
        return lost.excluded(seen, now_s) == {1}

    later_s = 103.0 + EXCLUDED_S
    assert excluded(reported_at_s=102.9, now_s=later_s + 60)
    assert excluded(reported_at_s=104.0, now_s=later_s - 0.1)
    assert not excluded(reported_at_s=104.0, now_s=later_s)


def test_an_instance_that_was_started_anew_may_be_asked_at_once() -> None:
    lost = recovery()
    lost.fail(instance(1), Unavailable("stopping"), 103.0)
    assert lost.excluded([instance(1)], 103.1) == {1}
    assert not lost.excluded([instance(1, incarnation=Incarnation(2))], 103.1)


def test_what_came_is_what_another_instance_goes_on_from() -> None:
    begun = recovery()
    assert begun.job is JOB
    begun.receive(chunk(7, 8))
    begun.receive(chunk(9))
    sampling = replace(JOB.sampling, prompt_logprobs=None)
    assert begun.job == replace(JOB, sampling=sampling, output_token_ids=(7, 8, 9))
    assert not begun.is_complete
    begun.receive(chunk(*range(7)))
    assert begun.is_complete
