"""The steps of the short form: install, use, borrow, scale; and the end of both forms."""

import re

import yaml

from protos.infinite_llm.v1.types_pb2 import RequestPlacementEntry
from tests.chart.conftest import KUBE_VERSION
from tests.chart.metric_names import named_metrics
from tests.e2e.release import (
    CHART,
    NAME,
    NAMESPACE,
    TAG,
    VALUES,
    Release,
    demand,
    view,
    worker_selector,
)
from tests.e2e.streams import Load, chat, stream
from tests.e2e.tools import run, wait_for

IMAGES = {
    "infinite-llm-router": "deploy/router.Dockerfile",
    "infinite-llm-gmanager": "deploy/gmanager.Dockerfile",
    "infinite-llm-operator": "deploy/operator.Dockerfile",
    "infinite-llm-worker": "deploy/worker.Dockerfile",
    "infinite-llm-redis": "tests/e2e/redis.Dockerfile",
}
#: More tokens than the KV memory of one worker in values.yaml has room for.
LONG_PROMPT = "The owl looked at the moon and said a word. " * 130
NUM_STREAMS = 20
EVERYTHING = CHART / "ci" / "everything-values.yaml"


def images(release: Release) -> None:
    for name, dockerfile in IMAGES.items():
        command = [*release.settings.image_build, f"{name}:{TAG}", ".", "-f", dockerfile]
        run(command, timeout_s=1800.0)


def install(release: Release) -> None:
    options = ["-f", str(VALUES), "--create-namespace", "--wait", "--timeout=6m"]
    release.helm("install", NAME, str(CHART), *options)
    release.wait_workers(2)


def helm_test(release: Release) -> None:
    release.helm("test", NAME, "--timeout=5m")


def chat_through_service(release: Release) -> None:
    with release.router() as url:
        answer = chat(url, "What is the capital of France?")
    demand("Paris" in answer, f"no Paris in {answer!r}")


def borrow(release: Release) -> None:
    """A request larger than one pod's memory lies on two pods while it runs."""
    lent: list[RequestPlacementEntry] = []
    with release.router() as url, release.gmanager() as gmanager:
        for _ in stream(url, LONG_PROMPT, max_tokens=48):
            lent = lent or [entry for entry in view(gmanager).entries if not entry.local]
    demand(bool(lent), "no block was lent while the long prompt ran")
    holder, owner = f"{NAME}-w-{lent[0].inst_id}", f"{NAME}-w-{lent[0].owner_inst_id}"
    demand({holder, owner} <= release.workers().keys(), f"no pods {holder}, {owner}")
    print(f"  {lent[0].num_blocks} blocks of a request of {owner} lay on {holder}")


def metrics(release: Release) -> None:
    """Every metric that an alert, the dashboard or an autoscaler names is served by some pod."""
    options = ["-f", str(EVERYTHING), "--kube-version", KUBE_VERSION]
    rendered = release.helm("template", NAME, str(CHART), *options)
    named = named_metrics([item for item in yaml.safe_load_all(rendered) if item])
    served: set[str] = set()
    for pod in release.kubectl.get("pods")["items"]:
        for port in pod["spec"]["containers"][0].get("ports", []):
            if port["name"] == "metrics":
                target = f"{pod['metadata']['name']}:{port['containerPort']}"
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{target}/proxy/metrics"
                text = run(["kubectl", "get", "--raw", path])
                served |= set(re.findall(r"^infinite_llm_\w+", text, re.MULTILINE))
    demand(named <= served, f"nobody serves {sorted(named - served)}")


def scale_under_streams(release: Release) -> None:
    with release.router() as url, Load(url, NUM_STREAMS) as load:
        release.scale(4)
        release.scale(2)
    demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")
    demand(load.num_finished >= NUM_STREAMS, f"only {load.num_finished} streams ended")
    print(f"  {load.num_finished} streams while 2 workers became 4 and 2 again, none broken")


def nothing_lent(release: Release) -> None:
    """After all that no block is lent, and the map holds nobody."""
    with release.gmanager() as gmanager:
        wait_for("an empty map", lambda: not view(gmanager).entries, timeout_s=30.0)


def uninstall(release: Release) -> None:
    """Nothing of the release is left, and the namespace goes at once."""
    release.helm("uninstall", NAME, "--wait", "--timeout=3m")
    label = ("-l", f"app.kubernetes.io/instance={NAME}")
    kinds = "illm,pods,services,deployments,statefulsets,secrets,configmaps,serviceaccounts"
    kinds += ",roles,rolebindings,poddisruptionbudgets,networkpolicies,leases"
    wait_for("nothing left", lambda: not release.kubectl.has(kinds, *label), timeout_s=120.0)
    left = release.kubectl("get", f"{kinds},persistentvolumeclaims", "-o", "name").split()
    own = [name for name in left if NAME in name.rpartition("/")[2].split("-")]
    demand(not own, f"left behind: {own}")
    run(["kubectl", "delete", "namespace", NAMESPACE, "--timeout=60s"])


def describe(release: Release) -> str:
    """For people who look at a failure."""
    kubectl = release.kubectl
    parts = [kubectl("get", "illm,pods", "-o", "wide"), kubectl("events", "--types=Warning")]
    for component in ("operator", "worker", "router"):
        selector = worker_selector().replace("worker", component)
        parts.append(kubectl("logs", "-l", selector, "--tail=15", "--prefix", "--all-containers"))
    return "\n".join(parts)
