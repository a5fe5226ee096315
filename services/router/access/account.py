"""What the bearer of one key uses now, against its limits.

The doors enter it for each request; generation charges the tokens.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.errors import RateLimited
from services.router.access.keys import KeyLimits
from services.router.access.token_bucket import TokenBucket


class Account:
    """Owner of the counts of one key, which outlive changes of its limits."""

    def __init__(
        self, name: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._clock = clock
        self._num_requests = 0
        self._bucket: TokenBucket | None = None
        self.limit(limits)

    def limit(self, limits: KeyLimits) -> None:
        """These hold from now on."""
        self._max_concurrent = limits.max_concurrent
        per_minute = limits.tokens_per_minute
        if per_minute is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.per_minute != per_minute:
            self._bucket = TokenBucket(per_minute, self._clock())

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Around one request; raises RateLimited."""
        if self._max_concurrent is not None and self._num_requests >= self._max_concurrent:
            raise RateLimited(f"this key may have {self._max_concurrent} requests at once")
        if self._bucket is not None:
            wait_s = self._bucket.wait_s(self._clock())
            if wait_s > 0:
                raise RateLimited(
                    f"this key may use {self._bucket.per_minute} tokens a minute; "
                    f"try again in {math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
        self._num_requests += 1
        try:
            with self.named():
                yield
        finally:
            self._num_requests -= 1

    @contextmanager
    def named(self) -> Iterator[None]:
        """Around what costs nothing: no limits."""
        token = account_context.set(self)
        try:
            yield
        finally:
            account_context.reset(token)

    def charge(self, num_tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.take(num_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """As OpenAI names them. Only tokens have a rate here."""
        if self._bucket is None:
            return {}
        now_s = self._clock()
        return {
            "x-ratelimit-limit-tokens": str(self._bucket.per_minute),
            "x-ratelimit-remaining-tokens": str(self._bucket.remaining(now_s)),
            "x-ratelimit-reset-tokens": f"{self._bucket.full_in_s(now_s):.3f}s",
        }


#: Whose request the current task works for; None where no keys are asked for.
account_context: ContextVar[Account | None] = ContextVar("account", default=None)


def charge(num_tokens: int) -> None:
    """Puts tokens on the account of the request at hand."""
    account = account_context.get()
    if account is not None:
        account.charge(num_tokens)
