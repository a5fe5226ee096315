"""The resource definition agrees with the worker that it configures."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from services.common.config import PREFIX, variable_name
from services.operator.settings import SETTINGS
from services.worker.config import Config

ROOT = Path(__file__).parents[3]
DEFINITION = ROOT / "charts/infinite-llm/crds/infinitellms.infinite-llm.io.yaml"


def _schema() -> Any:
    definition = yaml.safe_load(DEFINITION.read_text())
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("section", SETTINGS)
def test_defaults_are_the_workers_own(section: str) -> None:
    properties = _schema()["spec"]["properties"][section]["properties"]
    defaults = {variable_name(field.name): field.default for field in fields(Config)}
    settings = SETTINGS[section].items()
    known = {name: setting.default for name, setting in settings}
    assert {name: defaults[PREFIX + setting.variable] for name, setting in settings} == known
    assert {name: schema["default"] for name, schema in properties.items()} == known


@pytest.mark.parametrize("name", ["dtype", "kvDtype"])
def test_choices_are_the_workers_own(name: str) -> None:
    schema = _schema()["spec"]["properties"]["engine"]["properties"][name]
    hint = get_type_hints(Config)[SETTINGS["engine"][name].variable.lower()]
    assert tuple(schema["enum"]) == get_args(hint)
