"""The programs that the chart is checked with; what is missing skips its tests and says so."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "infinite-llm"
#: The defaults, and all files beside them.
VALUES = [None, *sorted([*CHART.glob("values-*.yaml"), *CHART.glob("ci/*.yaml")])]
KUBE_VERSION = "1.36.0"
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Helm:
    program: str

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def render(self, values: Path | None = None, *options: str) -> list[dict[str, Any]]:
        done = self.template(values, *options)
        assert done.returncode == 0, done.stderr
        return [item for item in yaml.safe_load_all(done.stdout) if item]

    def template(
        self, values: Path | None = None, *options: str
    ) -> subprocess.CompletedProcess[str]:
        files = ["-f", str(values)] if values else []
        version = ["--kube-version", KUBE_VERSION]
        return self("template", "llm", str(CHART), "-n", "serving", *version, *files, *options)


@pytest.fixture(scope="session", params=["helm", "helm3"])
def any_helm(request: pytest.FixtureRequest) -> Helm:
    """Both major versions, where `helm3` is the name of the older beside a newer `helm`."""
    return _find(request.param)


@pytest.fixture(scope="session")
def helm() -> Helm:
    return _find("helm")


def _find(program: str) -> Helm:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on the PATH")
    return Helm(program)


def name_of(values: Path | None) -> str:
    return values.name if values else "defaults"
