"""Settings come from the environment, and a bad one names its variable."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from services.common.config import from_env, variable_name
from services.common.errors import ConfigError
from services.common.ids import InstId


@dataclass(frozen=True, slots=True)
class Settings:
    inst_id: InstId
    listen_address: str = "127.0.0.1:0"
    num_blocks: int = 64
    period_s: float = 1.5
    pooling: bool = True
    folder: Path = Path("/tmp")
    otlp_endpoint: str | None = None
    num_threads: int | None = None
    dtype: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ConfigError(f"{variable_name('num_blocks')} must be at least 1")


def test_defaults_hold_where_nothing_is_set() -> None:
    assert from_env(Settings, {"INFINITE_LLM_INST_ID": "3"}) == Settings(inst_id=InstId(3))


def test_every_kind_of_field_is_read() -> None:
    environ = {
        "INFINITE_LLM_INST_ID": "1",
        "INFINITE_LLM_LISTEN_ADDRESS": "0.0.0.0:9000",
        "INFINITE_LLM_NUM_BLOCKS": "8",
        "INFINITE_LLM_PERIOD_S": "0.25",
        "INFINITE_LLM_POOLING": "off",
        "INFINITE_LLM_FOLDER": "~/models",
        "INFINITE_LLM_OTLP_ENDPOINT": "collector:4317",
        "INFINITE_LLM_NUM_THREADS": "2",
        "INFINITE_LLM_DTYPE": "float16",
    }
    assert from_env(Settings, environ) == Settings(
        inst_id=InstId(1),
        listen_address="0.0.0.0:9000",
        num_blocks=8,
        period_s=0.25,
        pooling=False,
        folder=Path.home() / "models",
        otlp_endpoint="collector:4317",
        num_threads=2,
        dtype="float16",
    )


def test_empty_means_none_for_an_optional_field() -> None:
    environ = {"INFINITE_LLM_INST_ID": "1", "INFINITE_LLM_NUM_THREADS": ""}
    assert from_env(Settings, environ).num_threads is None


def test_a_missing_required_field_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_INST_ID is required"):
        from_env(Settings, {})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("INST_ID", "one"),
        ("NUM_BLOCKS", ""),
        ("NUM_BLOCKS", "1.5"),
        ("PERIOD_S", "soon"),
        ("POOLING", "maybe"),
        ("FOLDER", ""),
        ("DTYPE", "float64"),
        ("PERIOD_S", "nan"),
        ("PERIOD_S", "inf"),
        ("NUM_THREADS", "two"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, text: str) -> None:
    environ = {"INFINITE_LLM_INST_ID": "1", f"INFINITE_LLM_{variable}": text}
    with pytest.raises(ConfigError, match=f"INFINITE_LLM_{variable} must be"):
        from_env(Settings, environ)


def test_the_class_checks_ranges_itself() -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_NUM_BLOCKS must be at least 1"):
        from_env(Settings, {"INFINITE_LLM_INST_ID": "1", "INFINITE_LLM_NUM_BLOCKS": "0"})
