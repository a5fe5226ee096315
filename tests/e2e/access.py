"""Steps about who reaches what: Ingress, routes of the Gateway API, network policies."""

import json

import grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.release import NAME, TAG, Release, Settings, demand
from tests.e2e.streams import MODEL, chat
from tests.e2e.tools import StepFailed, wait_for

HOST = "infinite-llm.test"
# What it found is its last word: that is in the pod's status, while logs can be out of reach.
_PROBE = """
import socket, sys
found = open("/dev/termination-log", "w")
for target in sys.argv[1:]:
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(target, "open", file=found)
    except OSError as error:
        print(target, "closed", file=found)
"""


def ingress(release: Release) -> None:
    release.upgrade({"ingress.enabled": "true", "ingress.host": HOST})
    _wait_answer(release.settings.ingress_url)


def http_route(release: Release) -> None:
    release.upgrade({"ingress.enabled": "false"} | _route("httpRoute", release.settings.gateway))
    _wait_answer(release.settings.gateway_url)


def grpc_route(release: Release) -> None:
    release.upgrade({"httpRoute.enabled": "false"} | _route("grpcRoute", release.settings.gateway))
    wait_for("an answer through the GRPCRoute", lambda: _generates(release.settings), 90.0)
    release.upgrade({"grpcRoute.enabled": "false"})


def _generates(settings: Settings) -> bool:
    options = [("grpc.default_authority", HOST)]
    try:
        with grpc.insecure_channel(settings.gateway_grpc, options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model=MODEL, prompt="One, two,", max_tokens=4)
            return bool(list(stub.Generate(request, timeout=60.0)))
    except grpc.RpcError:
        return False


def network_policy(release: Release) -> None:
    """A stranger reaches the router, and neither the KV plane nor Redis nor the control plane."""
    kubectl = release.kubectl
    addresses = {
        pod["metadata"]["name"]: pod["status"]["podIP"] for pod in kubectl.get("pods")["items"]
    }
    worker = addresses[next(iter(release.workers()))]
    closed = [
        f"{worker}:7101",
        f"{worker}:7100",
        f"{addresses[f'{NAME}-redis-0']}:6379",
        f"{addresses[f'{NAME}-gmanager-0']}:7000",
    ]
    is_open = f"{NAME}-router:8000"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "stranger",
                    "image": f"infinite-llm-router:{TAG}",
                    "command": ["python", "-c", _PROBE, is_open, *closed],
                }
            ],
        },
    }
    kubectl("apply", "-f", "-", text=json.dumps(pod))
    try:
        kubectl("wait", "pod/stranger", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=90s")
        (status,) = kubectl.get("pod", "stranger")["status"]["containerStatuses"]
        found = status["state"]["terminated"]["message"]
        seen = dict(line.split() for line in found.splitlines())
    finally:
        kubectl("delete", "pod", "stranger", "--wait=false")
    expected = {is_open: "open", **dict.fromkeys(closed, "closed")}
    demand(seen == expected, f"a stranger found {seen}")


def _route(kind: str, gateway: str) -> dict[str, str]:
    namespace, _, name = gateway.partition("/")
    return {
        f"{kind}.enabled": "true",
        f"{kind}.hostnames[0]": HOST,
        f"{kind}.parentRefs[0].name": name,
        f"{kind}.parentRefs[0].namespace": namespace,
    }


def _wait_answer(url: str) -> None:
    def answers() -> bool:
        try:
            return "Paris" in chat(url, "What is the capital of France?", headers={"host": HOST})
        except Exception as error:
            last.append(str(error))
            return False

    last: list[str] = []
    try:
        wait_for(f"an answer from {url}", answers, 90.0)
    except StepFailed as error:
        raise StepFailed(f"{error}; last: {last[-1:]}") from error
