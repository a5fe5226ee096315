"""Connects to Redis, and tells people whether it does what it is asked.

Built by `__main__`; used by `store` (the map's copy) and `redis_lease` (who leads).
"""

import logging
import math
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import Gauge
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.errors import ConfigError

#: For a connection, and for each reply.
REDIS_DEADLINE_S = 1.0
#: A Redis that comes and goes is told of once in so long.
LOG_PERIOD_S = 5.0

REDIS_ERRORS = (RedisError, OSError, TimeoutError)
#: What each failure means, the first that fits; with everything else it cannot be reached.
_TROUBLES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((AuthenticationError, NoPermissionError), "refuses us"),
    ((ReadOnlyError,), "is read-only"),
    ((OutOfMemoryError,), "is full"),
    ((BusyLoadingError,), "is still loading"),
    ((RedisTimeoutError, TimeoutError), "does not answer in time"),
    ((ResponseError,), "answers with an error"),
)
_log = logging.getLogger(__name__)


def connect(
    redis_url: str, ca_file: Path | None = None, password_file: Path | None = None
) -> Redis:
    """A client that connects at first use and never retries by itself: its users do."""
    options: dict[str, Any] = {}
    if ca_file is not None:
        options["ssl_ca_certs"] = _checked_ca(redis_url, ca_file)
    if password_file is not None:
        options["password"] = _read_password(password_file)
    try:
        return Redis.from_url(
            redis_url,
            socket_timeout=REDIS_DEADLINE_S,
            socket_connect_timeout=REDIS_DEADLINE_S,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
    except ValueError as error:
        raise ConfigError(f"INFINITE_LLM_REDIS_URL: {error}") from error


def _checked_ca(redis_url: str, ca_file: Path) -> str:
    name = "INFINITE_LLM_REDIS_CA_FILE"
    if not redis_url.startswith("rediss://"):
        raise ConfigError(f"{name} needs an INFINITE_LLM_REDIS_URL that begins with rediss://")
    try:
        ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{name}={ca_file}: {error.strerror or error}") from error
    return str(ca_file)


def _read_password(password_file: Path) -> str:
    try:
        return password_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"INFINITE_LLM_REDIS_PASSWORD_FILE={password_file}: {error}") from error


class RedisState:
    """Whether Redis does one thing for us: a metric at once, a log line where that changes."""

    def __init__(
        self, up: Gauge, meanwhile: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`meanwhile`: what follows from its failures, for the log."""
        self._up = up
        self._meanwhile = meanwhile
        self._clock = clock
        self.trouble = ""
        """Empty while all is well."""
        self._told = ""
        self._told_at_s = -math.inf

    def worked(self) -> None:
        self._note("", "")

    def failed(self, error: BaseException) -> None:
        self._note(_trouble_of(error), f"{type(error).__name__}: {error}")

    def _note(self, trouble: str, detail: str) -> None:
        self.trouble = trouble
        self._up.set(not trouble)
        now_s = self._clock()
        if trouble == self._told or now_s - self._told_at_s < LOG_PERIOD_S:
            return
        self._told, self._told_at_s = trouble, now_s
        if trouble:
            _log.warning("redis %s: %s", trouble, self._meanwhile, extra={"error": detail})
        else:
            _log.info("redis is well again")


def _trouble_of(error: BaseException | None) -> str:
    # The client tells of a connection that was refused with the server's own words as the cause.
    while error is not None:
        for kinds, trouble in _TROUBLES:
            if isinstance(error, kinds):
                return trouble
        error = error.__cause__
    return "cannot be reached"
