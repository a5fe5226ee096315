"""Steps in which an autoscaler, not a person, sets the number of workers."""

from tests.e2e.release import READY_S, Release, demand
from tests.e2e.streams import Load
from tests.e2e.tools import wait_for

#: At once, where the chart's default waits for five minutes.
_QUICK = {
    "worker.{}.behavior.scaleDown.stabilizationWindowSeconds": "0",
    "worker.{}.behavior.scaleDown.policies[0].type": "Pods",
    "worker.{}.behavior.scaleDown.policies[0].value": "4",
    "worker.{}.behavior.scaleDown.policies[0].periodSeconds": "15",
}
SCALE_S = 2 * READY_S


def hpa(release: Release) -> None:
    """On CPU: up under load and back without."""
    options = {"maxReplicas": "3", "targetCPUUtilizationPercentage": "150"}
    _up_and_back(release, "autoscaling", options, num_streams=8)


def keda(release: Release) -> None:
    """On requests that wait and run: up under load and back without."""
    options = {
        "maxReplicas": "3",
        "requestsPerWorker": "6",
        "pollingIntervalSeconds": "5",
        "prometheusAddress": release.settings.prometheus_address,
    }
    _up_and_back(release, "keda", options, num_streams=16)


def _up_and_back(release: Release, kind: str, options: dict[str, str], num_streams: int) -> None:
    values = {key.format(kind): value for key, value in _QUICK.items()}
    values |= {f"worker.{kind}.{key}": value for key, value in options.items()}
    release.upgrade(values | {f"worker.{kind}.enabled": "true"})
    with release.router() as url, Load(url, num_streams) as load:
        wait_for("three workers wanted", lambda: release.replicas() == 3, SCALE_S)
        release.wait_workers(3)
    wait_for("two workers wanted", lambda: release.replicas() == 2, SCALE_S)
    release.wait_workers(2)
    demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")
    for key in values:
        del release.sets[key]
    release.upgrade({f"worker.{kind}.enabled": "false"})
