"""The limits of one key, on a clock of the test's own."""

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import RateLimited
from services.router.access.account import Account, charge
from services.router.access.keys import KeyLimits
from services.router.access.token_bucket import TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_no_more_at_once_than_allowed(clock: Clock) -> None:
    account = Account("alice", KeyLimits(max_concurrent=2), clock)
    with ExitStack() as requests:
        requests.enter_context(account.enter())
        requests.enter_context(account.enter())
        with pytest.raises(RateLimited, match="2 requests at once"):
            requests.enter_context(account.enter())
    with account.enter():
        pass


def test_a_debt_is_waited_for(clock: Clock) -> None:
    account = Account("alice", KeyLimits(tokens_per_minute=60), clock)
    with account.enter():
        charge(90)
    with pytest.raises(RateLimited) as caught, account.enter():
        pass
    assert caught.value.retry_after_s == pytest.approx(31)
    assert account.headers() == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    clock.now_s += 31
    with account.enter():
        pass
    assert account.headers()["x-ratelimit-remaining-tokens"] == "1"


def test_new_limits_keep_what_runs(clock: Clock) -> None:
    account = Account("alice", KeyLimits(max_concurrent=1, tokens_per_minute=60), clock)
    with account.enter():
        charge(60)
        account.limit(KeyLimits(max_concurrent=1, tokens_per_minute=60))
        assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
        account.limit(KeyLimits(max_concurrent=2))
        assert account.headers() == {}
        with account.enter():
            pass
        account.limit(KeyLimits(max_concurrent=1))
        with pytest.raises(RateLimited), account.enter():
            pass


def test_without_an_account_nothing_is_charged() -> None:
    charge(5)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5_000)), min_size=1, max_size=30),
)
def test_whoever_waits_as_told_keeps_the_rate(
    per_minute: int, requests: list[tuple[float, int]]
) -> None:
    """In any time the tokens are the rate's, one bucket, and the last request's own at most."""
    now_s = start_s = 50.0
    bucket = TokenBucket(per_minute, now_s)
    used = 0
    for pause_s, num_tokens in requests:
        now_s += pause_s
        now_s += bucket.wait_s(now_s)
        assert bucket.wait_s(now_s) == pytest.approx(0, abs=1e-6)
        assert used <= per_minute * (1 + (now_s - start_s) / 60) + 1e-6
        bucket.take(num_tokens, now_s)
        used += num_tokens
        assert 0 <= bucket.remaining(now_s) <= per_minute
