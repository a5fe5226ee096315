"""Alerts, dashboard and autoscaler name metrics that exist, and alerts fire when they should."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from services.gmanager.metrics import GManagerMetrics
from services.operator.metrics import OperatorMetrics
from services.router.metrics import RouterMetrics
from services.worker.distattention.metrics import DataPlaneMetrics
from tests.chart.conftest import CHART, DEADLINE_S, Helm
from tests.chart.metric_names import named_metrics

EVERYTHING = CHART / "ci" / "everything-values.yaml"
SELECTED = {"namespace": "serving", "app_kubernetes_io_instance": "llm"}
SELECTOR = ",".join(f'{name}="{value}"' for name, value in SELECTED.items())
_WORKER_METRICS = Path(__file__).parents[2] / "services" / "worker" / "metrics.py"


def exported_metrics() -> set[str]:
    router, registry = RouterMetrics(), CollectorRegistry()
    GManagerMetrics(registry)
    DataPlaneMetrics(registry)
    OperatorMetrics(registry)
    names = set()
    for family in (*router.registry.collect(), *registry.collect()):
        names |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    # A worker's own need a running engine: they are taken from where they are named.
    source = _WORKER_METRICS.read_text()
    for word in re.findall(r'"(\w+)"(?:,|:)', source):
        names |= {f"infinite_llm_worker_{word}", f"infinite_llm_worker_{word}_total", word}
    return names


def test_every_metric_that_is_named_exists(helm: Helm) -> None:
    named = named_metrics(helm.render(EVERYTHING))
    assert len(named) > 20
    assert named <= exported_metrics()


def test_alerts_fire_when_they_should_and_not_before(helm: Helm, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on the PATH")
    (rule,) = (item for item in helm.render(EVERYTHING) if item["kind"] == "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    cases = (Path(__file__).parent / "alerts_test.yaml").read_text()
    labels = ", ".join(f"{name}: {value}" for name, value in SELECTED.items())
    cases = cases.replace("SELECTOR", SELECTOR).replace("SELECTED", labels)
    (tmp_path / "cases.yaml").write_text(cases)
    done = subprocess.run(
        ["promtool", "test", "rules", "cases.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", cases))
    assert tested == {
        alert["alert"] for group in rule["spec"]["groups"] for alert in group["rules"]
    }


def test_pods_are_scraped_where_they_serve_metrics(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    (monitor,) = (item for item in objects if item["kind"] == "PodMonitor")
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert scraped == {"metrics"}
    ports = {
        port["name"]
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet")
        for container in item["spec"]["template"]["spec"]["containers"]
        for port in container["ports"]
    }
    assert scraped <= ports
