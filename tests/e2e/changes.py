"""Steps in which something changes or breaks under load: upgrades, lost pods, lost nodes."""

import json

import trustme

from tests.e2e.basic import borrow
from tests.e2e.release import NAME, READY_S, Release, demand, worker_selector
from tests.e2e.streams import Load
from tests.e2e.tools import run, wait_for

NUM_STREAMS = 8
#: A node that is cut off is NotReady by then, and back by then.
NODE_STATE_S = 120.0


def upgrade_and_rollback(release: Release) -> None:
    """Both keep the number of workers, though kubectl has set it since the install."""
    release.upgrade({"router.preStopSeconds": "4"})
    demand(release.replicas() == 2, f"the upgrade made {release.replicas()} replicas of 2")
    release.sets.clear()
    release.helm("rollback", NAME, "--wait", "--timeout=6m")
    demand(release.replicas() == 2, f"the rollback made {release.replicas()} replicas of 2")
    release.wait_workers(2)


def pod_killed(release: Release) -> None:
    """Streams of a worker that is killed go on elsewhere, and another pod takes its place."""
    with release.router() as url, Load(url, NUM_STREAMS) as load:
        victim, uid = next(iter(release.workers().items()))
        wait_for("some streams", lambda: load.num_finished > 0, READY_S)
        release.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        wait_for("a new pod", lambda: uid not in release.workers().values(), 60.0)
        release.wait_workers(2)
    demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")


def rolling_update(release: Release) -> None:
    """To mutual TLS: all workers are replaced, no stream breaks, and lending goes on over it."""
    authority = trustme.CA()
    own = authority.issue_cert("workers")
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "data-plane"},
        "stringData": {
            "tls.crt": own.cert_chain_pems[0].bytes().decode(),
            "tls.key": own.private_key_pem.bytes().decode(),
            "ca.crt": authority.cert_pem.bytes().decode(),
        },
    }
    release.kubectl("apply", "-f", "-", text=json.dumps(secret))
    before = set(release.workers().values())
    with release.router() as url, Load(url, NUM_STREAMS) as load:
        release.upgrade(
            {"dataPlaneTLS.mode": "existingSecret", "dataPlaneTLS.existingSecret": "data-plane"}
        )
        wait_for("new pods", lambda: before.isdisjoint(release.workers().values()), 2 * READY_S)
        release.wait_workers(2)
    demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")
    borrow(release)


def node_drained(release: Release) -> None:
    """The budget lets one worker go at a time; its streams go on."""
    node = _node_of(release, next(iter(release.workers())))
    try:
        with release.router() as url, Load(url, NUM_STREAMS) as load:
            # The router and what its clients are connected to stay: only workers are drained.
            selector = f"--pod-selector={worker_selector()}"
            run(
                ["kubectl", "drain", node, selector, "--ignore-daemonsets",
                 "--delete-emptydir-data", "--force", "--timeout=5m"],
                timeout_s=330.0,
            )  # fmt: skip
            release.wait_workers(2)
        demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")
        here = [pod for pod in release.workers() if _node_of(release, pod) == node]
        demand(not here, f"{here} run on the drained node")
    finally:
        run(["kubectl", "uncordon", node])


def node_cut_off(release: Release) -> None:
    """A node that nobody reaches: its worker is replaced, and does no harm when it is back."""
    node = release.settings.cut_node
    _move_router_off(release, node)
    run(list(release.settings.node_off))
    try:
        wait_for(f"{node} lost", lambda: not _is_ready(release, node), NODE_STATE_S)
        with release.router() as url, Load(url, 2) as load:
            wait_for("streams without it", lambda: load.num_finished >= 4, READY_S)
        demand(not load.broken, f"{len(load.broken)} streams broke: {load.broken[:3]}")
    finally:
        run(list(release.settings.node_on))
    wait_for(f"{node} back", lambda: _is_ready(release, node), NODE_STATE_S)
    release.wait_workers(2)


def _move_router_off(release: Release, node: str) -> None:
    """So that it goes on when the node does not."""
    selector = worker_selector().replace("worker", "router")
    run(["kubectl", "cordon", node])
    try:
        for pod in release.kubectl.get("pods", "-l", selector)["items"]:
            if pod["spec"]["nodeName"] == node:
                release.kubectl("delete", "pod", pod["metadata"]["name"])
        release.kubectl("rollout", "status", f"deployment/{NAME}-router", "--timeout=120s")
    finally:
        run(["kubectl", "uncordon", node])


def _node_of(release: Release, pod: str) -> str:
    return str(release.kubectl.get("pod", pod)["spec"].get("nodeName", ""))


def _is_ready(release: Release, node: str) -> bool:
    conditions = release.kubectl.get("node", node)["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
