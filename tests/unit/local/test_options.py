"""What the command line may say, and what it means."""

import os
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.local.options import Options, model_name_of
from services.local.tool import resolve_model


def options(instances: int = 2, kv_blocks: int = 96, gmanagers: int = 1) -> Options:
    return Options(
        model="m",
        instances=instances,
        gmanagers=gmanagers,
        kv_blocks=kv_blocks,
        dtype="float32",
        max_new_tokens=1,
        move_tokens_per_step=16,
        pooling=True,
        otlp_endpoint="",
        environ=os.environ,
    )


@pytest.mark.parametrize(
    ("instances", "kv_blocks", "gmanagers"), [(0, 96, 1), (-1, 96, 1), (2, 1, 1), (2, 96, 0)]
)
def test_a_cluster_of_nothing_is_refused(instances: int, kv_blocks: int, gmanagers: int) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        options(instances, kv_blocks, gmanagers)


def test_a_model_goes_by_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-1.5b"
    folder.mkdir()
    assert model_name_of(str(folder)) == model_name_of(f"{folder}/") == "tiny-1.5b"
    file = tmp_path / "tiny.Q4_1.gguf"
    file.touch()
    assert model_name_of(str(file)) == "tiny.Q4_1"
    assert model_name_of("someone/tiny") == "someone/tiny"


async def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"^model '.*missing': there is no such folder$"):
        await resolve_model(missing, said.append, os.environ)
    assert said == []
