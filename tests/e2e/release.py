"""One release of the chart: what the steps share, and what they ask the cluster."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc
from tests.e2e.tools import REPO_ROOT, Kubectl, StepFailed, run, wait_for

CHART = REPO_ROOT / "charts" / "infinite-llm"
VALUES = Path(__file__).parent / "values.yaml"
NAME = "e2e"
NAMESPACE = "infinite-llm-e2e"
TAG = "e2e"
DEFAULT_IMAGE_BUILD = "deploy/build-image"
#: Of a worker that has to load torch and the model on a busy machine.
READY_S = 240.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What differs between clusters, from the environment."""

    image_build: tuple[str, ...]
    """Builds an image and brings it to the nodes: this, NAME:TAG CONTEXT -f FILE."""
    helm: str = "helm"
    ingress_url: str = ""
    """Of the ingress controller; empty leaves the step out, as with the others below."""
    gateway: str = ""
    """NAMESPACE/NAME of a Gateway for HTTPRoute and GRPCRoute."""
    gateway_url: str = ""
    gateway_grpc: str = ""
    """host:port where it takes gRPC in plain text."""
    prometheus_address: str = ""
    """As KEDA reaches it."""
    enforces_policies: bool = False
    cut_node: str = ""
    """A node that these two cut off the network, and bring back."""
    node_off: tuple[str, ...] = ()
    node_on: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        return cls(
            image_build=tuple(shlex.split(environ.get("IMAGE_BUILD", DEFAULT_IMAGE_BUILD))),
            helm=environ.get("HELM", "helm"),
            ingress_url=environ.get("INGRESS_URL", ""),
            gateway=environ.get("GATEWAY", ""),
            gateway_url=environ.get("GATEWAY_URL", ""),
            gateway_grpc=environ.get("GATEWAY_GRPC", ""),
            prometheus_address=environ.get("PROMETHEUS_ADDRESS", ""),
            enforces_policies=environ.get("NETWORK_POLICY", "") == "enforced",
            cut_node=environ.get("CUT_NODE", ""),
            node_off=tuple(shlex.split(environ.get("NODE_OFF", ""))),
            node_on=tuple(shlex.split(environ.get("NODE_ON", ""))),
        )


@dataclass(slots=True)
class Release:
    settings: Settings
    kubectl: Kubectl = field(default_factory=lambda: Kubectl(NAMESPACE))
    sets: dict[str, str] = field(default_factory=dict)
    """What steps have switched on and not off again."""

    def helm(self, *arguments: str, timeout_s: float = 420.0) -> str:
        return run([self.settings.helm, "-n", NAMESPACE, *arguments], timeout_s)

    def upgrade(self, changes: Mapping[str, str]) -> None:
        """With these values changed, and those of earlier calls."""
        self.sets |= changes
        pairs = (f"{key}={value}" for key, value in self.sets.items())
        options = ["-f", str(VALUES), *(option for pair in pairs for option in ("--set", pair))]
        self.helm("upgrade", NAME, str(CHART), *options, "--wait", "--timeout=6m")

    @contextmanager
    def router(self) -> Iterator[str]:
        """The router's URL, through its Service."""
        with self.kubectl.forward(f"svc/{NAME}-router", 8000) as address:
            yield f"http://{address}"

    @contextmanager
    def gmanager(self) -> Iterator["gmanager_pb2_grpc.GManagerStub"]:
        with (
            self.kubectl.forward(f"pod/{NAME}-gmanager-0", 7000) as address,
            grpc.insecure_channel(address) as channel,
        ):
            yield gmanager_pb2_grpc.GManagerStub(channel)

    def workers(self) -> dict[str, str]:
        """Names and uids of the pods that exist and do not end; a name may come again."""
        pods = self.kubectl.get("pods", "-l", worker_selector())["items"]
        metadata = [pod["metadata"] for pod in pods]
        return {own["name"]: own["uid"] for own in metadata if "deletionTimestamp" not in own}

    def replicas(self) -> int:
        return int(self.kubectl.get("illm", NAME)["spec"]["replicas"])

    def wait_workers(self, num_workers: int, timeout_s: float = READY_S) -> None:
        """Until so many are ready, updated, and no other is there."""

        def are_there() -> bool:
            status = self.kubectl.get("illm", NAME)["status"]
            counts = {status[f"{kind}Replicas"] for kind in ("ready", "updated")}
            pods = self.kubectl.get("pods", "-l", worker_selector())["items"]
            return counts == {num_workers} and len(pods) == num_workers

        wait_for(f"{num_workers} workers", are_there, timeout_s)

    def scale(self, num_workers: int) -> None:
        self.kubectl("scale", f"illm/{NAME}", f"--replicas={num_workers}")
        self.wait_workers(num_workers)


def worker_selector() -> str:
    return f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=worker"


def view(gmanager: "gmanager_pb2_grpc.GManagerStub") -> gmanager_pb2.GetClusterViewResponse:
    response = gmanager.GetClusterView(gmanager_pb2.GetClusterViewRequest(), timeout=10.0)
    assert isinstance(response, gmanager_pb2.GetClusterViewResponse)
    return response


def demand(is_met: bool, otherwise: str) -> None:
    if not is_met:
        raise StepFailed(otherwise)
