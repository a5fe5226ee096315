"""How Redis is reached, and what people are told of it."""

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from services.common.errors import ConfigError
from services.gmanager.redis_connection import LOG_PERIOD_S, RedisState, connect

TLS = "rediss://127.0.0.1:6379/0"


def test_a_url_of_another_kind_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_REDIS_URL"):
        connect("http://127.0.0.1")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_bad_ca_file_names_its_variable(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"INFINITE_LLM_REDIS_CA_FILE=.*ca\.pem"):
        connect(TLS, ca_file=file)


def test_a_ca_file_without_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        connect("redis://127.0.0.1", ca_file=tmp_path)


def test_a_missing_password_file_names_its_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_REDIS_PASSWORD_FILE"):
        connect(TLS, password_file=tmp_path / "missing")


class Told:
    """A state whose clock only the test moves."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.now_s = 0.0
        self._registry = CollectorRegistry()
        up = Gauge("up", "", registry=self._registry)
        self.state = RedisState(up, "memory alone", lambda: self.now_s)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]

    @property
    def is_up(self) -> bool:
        return self._registry.get_sample_value("up") == 1


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AuthenticationError("wrong"), "redis refuses us: memory alone"),
        (ReadOnlyError("replica"), "redis is read-only: memory alone"),
        (OutOfMemoryError("maxmemory"), "redis is full: memory alone"),
        (BusyLoadingError("loading"), "redis is still loading: memory alone"),
        (TimeoutError(), "redis does not answer in time: memory alone"),
        (ResponseError("what"), "redis answers with an error: memory alone"),
        (ConnectionRefusedError(), "redis cannot be reached: memory alone"),
    ],
)
def test_each_trouble_has_its_line(told: Told, error: Exception, line: str) -> None:
    told.state.failed(error)
    assert (told.lines, told.is_up) == ([line], False)


def test_a_trouble_that_stays_is_told_once_and_its_end_too(told: Told) -> None:
    told.state.worked()
    assert told.lines == []
    for told.now_s in (0.0, 10.0, 20.0):
        told.state.failed(ConnectionRefusedError())
    told.state.worked()
    assert (told.lines[1:], told.is_up) == (["redis is well again"], True)


def test_a_redis_that_comes_and_goes_is_told_of_now_and_then(told: Told) -> None:
    for _ in range(100):
        told.now_s += 0.5
        told.state.failed(ConnectionRefusedError())
        assert not told.is_up
        told.state.worked()
        assert told.is_up
    assert 2 <= len(told.lines) <= 100 / LOG_PERIOD_S
