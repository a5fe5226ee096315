"""The resource definition agrees with the worker that it configures."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from services.worker.config import Config

ROOT = Path(__file__).parents[3]
DEFINITION = ROOT / "charts/infinite-llm/crds/infinitellms.infinite-llm.io.yaml"

WORKER_FIELDS = {
    "engine": {
        "kvBlocks": "num_blocks",
        "blockSize": "block_size",
        "dtype": "dtype",
        "kvDtype": "kv_dtype",
        "threads": "num_threads",
        "maxBatchedTokens": "max_batched_tokens",
        "maxRunning": "max_running",
        "maxWaiting": "max_waiting",
        "prefixCaching": "prefix_caching",
    },
    "pooling": {
        "enabled": "pooling",
        "lendKeepFree": "lend_keep_free",
        "maxLentShare": "max_lent_share",
        "moveTokensPerStep": "move_tokens_per_step",
        "leaseSeconds": "lease_s",
    },
}


def _schema() -> Any:
    definition = yaml.safe_load(DEFINITION.read_text())
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("section", WORKER_FIELDS)
def test_defaults_are_the_workers_own(section: str) -> None:
    properties = _schema()["spec"]["properties"][section]["properties"]
    defaults = {field.name: field.default for field in fields(Config)}
    wanted = {name: defaults[field] for name, field in WORKER_FIELDS[section].items()}
    assert {name: schema["default"] for name, schema in properties.items()} == wanted


@pytest.mark.parametrize("name", ["dtype", "kvDtype"])
def test_choices_are_the_workers_own(name: str) -> None:
    schema = _schema()["spec"]["properties"]["engine"]["properties"][name]
    hint = get_type_hints(Config)[WORKER_FIELDS["engine"][name]]
    assert tuple(schema["enum"]) == get_args(hint)
