"""What values are taken, what is refused, and that people are told of all of them."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.chart.conftest import CHART, VALUES, Helm, name_of
from tests.chart.readme import README, described, readme_with_table


@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_every_file_of_values_passes_strict_lint(any_helm: Helm, values: Path | None) -> None:
    files = ["-f", str(values)] if values else []
    done = any_helm("lint", "--strict", str(CHART), "--kube-version", "1.36.0", *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("worker.replcas=3", "replcas"),
        ("unknown=1", "unknown"),
        ("worker.replicas=-1", "replicas"),
        ("worker.engine.blockSize=20", "blockSize"),
        ("worker.engine.dtype=int8", "dtype"),
        ("worker.engine.kvBlocks=0", "kvBlocks"),
        ("worker.pooling.maxLentShare=1.5", "maxLentShare"),
        ("worker.updateStrategy.maxUnavailable=0", "maxUnavailable"),
        ("gmanager.replicas=3", "replicas"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("model.name=", "name"),
        ("fullnameOverride=Upper", "fullnameOverride"),
        ("router.service.type=Tunnel", "type"),
        ("dataPlaneTLS.mode=magic", "mode"),
        ("externalRedis.address=noport", "address"),
    ],
)
def test_values_that_make_no_sense_are_refused(any_helm: Helm, setting: str, words: str) -> None:
    done = any_helm.template(None, "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("redis.enabled=false", "externalRedis.address is required"),
        ("worker.autoscaling.enabled=true,worker.keda.enabled=true", "choose one"),
        ("dataPlaneTLS.mode=existingSecret", "dataPlaneTLS.existingSecret is required"),
        ("operator.watchNamespaces={*,a}", "watchNamespaces"),
        ("worker.engine.kvBlocks=8,worker.pooling.lendKeepFree=8", "lendKeepFree must be below"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(helm: Helm, settings: str, words: str) -> None:
    done = helm.template(None, "--set", settings)
    assert done.returncode != 0
    assert words in done.stderr


def test_both_helms_render_the_same(helm: Helm, any_helm: Helm) -> None:
    values = CHART / "ci" / "external-values.yaml"
    assert helm.render(values) == any_helm.render(values)


def test_the_chart_may_be_a_part_of_another(helm: Helm) -> None:
    assert helm.render(None, "--set", "global.registry=registry.example.com")


def test_the_images_that_make_builds_are_those_that_are_installed() -> None:
    root = CHART.parents[1]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == version
    assert f"TAG ?= {version}\n" in (root / "Makefile").read_text()
    repositories = yaml.safe_load((CHART / "values.yaml").read_text())
    for service in ("router", "gmanager", "operator", "worker"):
        assert repositories[service]["image"]["repository"] == f"infinite-llm-{service}"
        assert (root / "deploy" / f"{service}.Dockerfile").is_file()


def test_the_readme_tells_of_every_value() -> None:
    assert README.read_text() == readme_with_table(), "run: python -m tests.chart.readme"


def test_every_value_is_explained() -> None:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    sections = {path[0] for path, _ in described(text)}
    assert sections == set(values)


def test_the_chart_takes_what_the_definition_takes() -> None:
    """Of the fields that both have: the same words, the same defaults but for the KV memory."""
    definition = yaml.safe_load(next((CHART / "crds").glob("*.yaml")).read_text())
    (version,) = definition["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["worker"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["worker"]
    for section in ("engine", "pooling"):
        fields = spec[section]["properties"]
        ours = schema["properties"][section]["properties"]
        assert ours.keys() == fields.keys()
        for name, field in fields.items():
            assert ours[name].get("enum") == field.get("enum"), name
            if name != "kvBlocks":
                assert values[section][name] == field["default"], name
