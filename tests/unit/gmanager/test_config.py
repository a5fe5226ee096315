"""Settings come from the environment, and a bad one is named."""

import pytest

from services.common.config import from_env
from services.common.errors import ConfigError
from services.gmanager.config import GManagerConfig


def test_settings_come_from_the_environment() -> None:
    environ = {"INFINITE_LLM_LISTEN_ADDRESS": "0.0.0.0:7001", "INFINITE_LLM_POOLING": "false"}
    config = from_env(GManagerConfig, environ)
    assert (config.listen_address, config.pooling) == ("0.0.0.0:7001", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PLANNING_PERIOD_S", "0"),
        ("HEARTBEAT_PERIOD_S", "-1"),
        ("INSTANCE_TIMEOUT_S", "0.1"),
        ("BATCH_THRESHOLD", "-1"),
        ("UTILISATION_THRESHOLD", "1.5"),
        ("MIN_GAIN", "-0.1"),
        ("COOL_DOWN_S", "-1"),
        ("MAX_MOVES_PER_SOURCE", "0"),
        ("MAX_MOVES_PER_DESTINATION", "0"),
        ("OTHER_NODE_ROUND_TRIP_S", "-1"),
        ("OTHER_NODE_BYTES_PER_S", "0"),
        ("METRICS_PORT", "65536"),
        ("LEADER_LEASE_S", "0.1"),
        ("PLANNING_PERIOD_S", "soon"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"INFINITE_LLM_{name}"):
        from_env(GManagerConfig, {f"INFINITE_LLM_{name}": value})
