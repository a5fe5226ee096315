"""The number of workers over upgrades and rollbacks, on a real API server.

Whoever scales owns `spec.replicas`; each test is one way in which Helm could undo that. Only the
custom resource is installed, and no operator: pods have no part in it.
"""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.conftest import CHART, DEADLINE_S, Helm

NAME = "llm"


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The part of the chart that makes the custom resource."""
    folder = tmp_path_factory.mktemp("chart") / "infinite-llm"
    shutil.copytree(CHART, folder)
    for part in (folder / "templates").iterdir():
        if part.is_dir() and part.name != "worker":
            shutil.rmtree(part)
    return folder


@pytest.fixture(scope="module")
def cluster() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on the PATH")
    if kubectl("get", "--raw", "/readyz").returncode != 0:
        pytest.skip("no cluster answers at KUBECONFIG")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"), check=True)


def kubectl(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=check
    )


class Installed:
    """A release in a namespace of its own."""

    def __init__(self, helm: Helm, chart: Path, namespace: str) -> None:
        self._helm = helm
        self._chart = chart
        self._namespace = namespace

    @property
    def is_server_side(self) -> bool:
        """Helm 4 applies on the server, where fields have owners; Helm 3 patches."""
        return self._helm("version", "--template={{.Version}}").stdout.startswith("v4")

    def run(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        chart = [] if action == "rollback" else [str(self._chart)]
        return self._helm(action, NAME, *chart, "-n", self._namespace, *options)

    def apply(self, action: str, *options: str) -> None:
        done = self.run(action, *options)
        assert done.returncode == 0, done.stderr

    def scale(self, replicas: int) -> None:
        kubectl(
            "-n", self._namespace, "scale", f"illm/{NAME}", f"--replicas={replicas}", check=True
        )

    @property
    def replicas(self) -> int:
        path = "jsonpath={.spec.replicas}"
        done = kubectl("-n", self._namespace, "get", "illm", NAME, "-o", path, check=True)
        return int(done.stdout)


@pytest.fixture
def release(cluster: None, any_helm: Helm, chart: Path) -> Iterator[Installed]:
    namespace = f"replicas-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", namespace, check=True)
    yield Installed(any_helm, chart, namespace)
    kubectl("delete", "namespace", namespace, "--wait=false", check=True)


CONSTANT = ("--set", "worker.preserveReplicas=false")
FREE = ("--set", "worker.replicas=null")


def test_an_upgrade_keeps_every_scale(release: Installed) -> None:
    release.apply("install")
    assert release.replicas == 2
    for replicas in (5, 6, 1):
        release.scale(replicas)
        release.apply("upgrade", "--set", "worker.engine.threads=2")
        assert release.replicas == replicas


def test_an_upgrade_changes_nothing_where_nobody_scaled(release: Installed) -> None:
    release.apply("install", "--set", "worker.replicas=3")
    release.apply("upgrade", "--set", "worker.replicas=3")
    assert release.replicas == 3


def test_a_number_that_was_installed_and_is_dropped_later_stays(release: Installed) -> None:
    """Helm removes a field that it no longer renders, and the default would be 1."""
    release.apply("install", "--set", "worker.replicas=3")
    for options in (FREE, ("--set", "worker.autoscaling.enabled=true"), FREE):
        release.apply("upgrade", *options)
        assert release.replicas == 3


def test_a_number_that_was_never_rendered_is_the_scalers(release: Installed) -> None:
    release.apply("install", *FREE)
    assert release.replicas == 1
    release.scale(4)
    release.apply("upgrade", *FREE)
    assert release.replicas == 4
    release.apply("rollback", "1")
    assert release.replicas == 4


def test_a_value_given_after_a_scale_does_not_undo_it(release: Installed) -> None:
    release.apply("install", *FREE)
    release.scale(4)
    release.apply("upgrade", "--set", "worker.replicas=2")
    assert release.replicas == 4


def test_a_constant_equal_to_the_live_number_is_no_conflict(release: Installed) -> None:
    release.apply("install", *CONSTANT)
    release.scale(3)
    release.apply("upgrade", *CONSTANT, "--set", "worker.replicas=3")
    assert release.replicas == 3


def test_a_constant_conflicts_with_a_scale_and_the_scale_stays(release: Installed) -> None:
    if not release.is_server_side:
        pytest.skip("Helm 3 knows no owners of fields")
    release.apply("install")
    release.scale(3)
    for options in (CONSTANT, (*CONSTANT, "--rollback-on-failure", "--wait", "--timeout=20s")):
        done = release.run("upgrade", *options)
        assert done.returncode != 0
        assert "conflict" in done.stderr
        assert release.replicas == 3


def test_a_constant_counts_where_it_is_forced(release: Installed) -> None:
    release.apply("install")
    release.scale(3)
    forced = ["--force-conflicts"] if release.is_server_side else []
    release.apply("upgrade", *CONSTANT, *forced, "--set", "worker.replicas=5")
    assert release.replicas == 5


def test_a_constant_counts_without_server_side_apply(release: Installed) -> None:
    if not release.is_server_side:
        pytest.skip("Helm 3 has nothing else")
    release.apply("install")
    release.scale(3)
    release.apply("upgrade", *CONSTANT, "--server-side=false", "--set", "worker.replicas=5")
    assert release.replicas == 5


def test_a_rollback_to_another_number_must_be_forced(release: Installed) -> None:
    """Rollbacks do not render again, so that the old manifest's number comes back or conflicts."""
    release.apply("install")
    release.scale(4)
    release.apply("upgrade")
    if release.is_server_side:
        done = release.run("rollback", "1")
        assert done.returncode != 0
        assert "conflict" in done.stderr
        assert release.replicas == 4
        release.apply("rollback", "1", "--force-conflicts")
    else:
        release.apply("rollback", "1")
    assert release.replicas == 2
