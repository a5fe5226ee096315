"""What is rendered suits Kubernetes: by the schemas of old and new versions, and by a server."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import CHART, DEADLINE_S, VALUES, Helm, name_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")

#: The oldest that Chart.yaml admits, and the newest that there are schemas of.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
#: Groups that Kubernetes itself does not have.
FOREIGN = ("infinite-llm.io/", "monitoring.coreos.com/", "keda.sh/", "cert-manager.io/",
           "gateway.networking.k8s.io/")  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_objects_are_valid(helm: Helm, values: Path | None, version: str) -> None:
    for item in helm.render(values):
        if not item["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(item, version, strict=True)


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on the PATH")
    if kubectl("get", "--raw", "/readyz").returncode != 0:
        pytest.skip("no cluster answers at KUBECONFIG")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"))
    kubectl("create", "namespace", "serving")
    yield "serving"
    kubectl("delete", "namespace", "serving", "--wait=false")


@pytest.mark.parametrize("values", VALUES, ids=name_of)
def test_a_server_takes_all_of_it(helm: Helm, namespace: str, values: Path | None) -> None:
    """Definitions of others included, where the cluster has them."""
    known = kubectl("api-resources", "-o", "wide", "--no-headers").stdout
    objects = helm.render(values)
    missing = sorted({item["apiVersion"] for item in objects if item["apiVersion"] not in known})
    if missing:
        pytest.skip(f"the cluster lacks {', '.join(missing)}")
    done = _dry_run(objects)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def _dry_run(objects: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    text = yaml.safe_dump_all(objects)
    return kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", text=text)


def kubectl(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
