"""The pod of one worker, as the resource describes it. Pure; called by `reconcile`."""

from typing import Any

from services.operator.merge import merge
from services.operator.pods import (
    CONTAINER,
    CONTROL_PORT,
    FAILURES,
    INSTANCE_ID,
    TEMPLATE_HASH,
    pod_name,
)
from services.operator.resource import GROUP, KIND, VERSION, Object, Resource
from services.operator.settings import SETTINGS
from services.operator.template_hash import template_hash

DATA_PORT = 7101
METRICS_PORT = 9100
_TLS_FOLDER = "/etc/infinite-llm/data-plane-tls"
_TLS_FILES = {"CERTIFICATE": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}

#: Beyond the drain itself: for the last answers to leave, and the process to end.
_GRACE_MARGIN_S = 15
#: A model may take as long to be fetched and loaded.
_START_BUDGET_S = 1800
_START_PERIOD_S = 3
#: How long a node may be away before its workers are made anew elsewhere.
_NODE_PATIENCE_S = 60


def worker_pod(resource: Resource, inst_id: int, num_failures: int = 0) -> Object:
    template = resource.spec.get("podTemplate", {})
    metadata = merge(template.get("metadata", {}), _metadata(resource, inst_id, num_failures))
    spec = merge(_pod_spec(resource, inst_id), template.get("spec", {}))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _metadata(resource: Resource, inst_id: int, num_failures: int) -> Object:
    """What the operator finds its pods by is not the user's to change."""
    return {
        "name": pod_name(resource.key.name, inst_id),
        "namespace": resource.key.namespace,
        "labels": {
            **resource.selector,
            "app.kubernetes.io/managed-by": "infinite-llm-operator",
            INSTANCE_ID: str(inst_id),
            TEMPLATE_HASH: template_hash(resource),
        },
        "annotations": {FAILURES: str(num_failures)} if num_failures else {},
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": resource.key.name,
                "uid": resource.uid,
                "controller": True,
            }
        ],
    }


def _pod_spec(resource: Resource, inst_id: int) -> Object:
    spec: Object = {
        "containers": [_container(resource, inst_id)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *_tls_volumes(resource),
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": resource.drain_timeout_s + _GRACE_MARGIN_S,
        "tolerations": [_stay_for_a_while(taint) for taint in ("not-ready", "unreachable")],
    }
    if resource.spec.get("imagePullSecrets"):
        spec["imagePullSecrets"] = resource.spec["imagePullSecrets"]
    return spec


def _stay_for_a_while(taint: str) -> Object:
    return {
        "key": f"node.kubernetes.io/{taint}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": _NODE_PATIENCE_S,
    }


def _container(resource: Resource, inst_id: int) -> Object:
    return {
        "name": CONTAINER,
        "image": resource.spec["image"],
        "imagePullPolicy": resource.spec.get("imagePullPolicy", "IfNotPresent"),
        "env": _env(resource, inst_id),
        "ports": [
            {"name": "control", "containerPort": CONTROL_PORT},
            {"name": "data", "containerPort": DATA_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": resource.spec.get("resources", {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *_tls_mounts(resource),
        ],
        **_probes(),
    }


def _probes() -> Object:
    """Being alive depends on nobody else; being ready ends with a drain."""
    alive = {"grpc": {"port": CONTROL_PORT, "service": "liveness"}, "timeoutSeconds": 5}
    num_tries = _START_BUDGET_S // _START_PERIOD_S
    return {
        "startupProbe": {**alive, "periodSeconds": _START_PERIOD_S, "failureThreshold": num_tries},
        "livenessProbe": {**alive, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {
            "grpc": {"port": CONTROL_PORT},
            "timeoutSeconds": 5,
            "periodSeconds": 3,
            "failureThreshold": 2,
        },
    }


def _env(resource: Resource, inst_id: int) -> list[Object]:
    scheme = "tls" if resource.spec.get("dataPlaneTLS") else "tcp"
    values: dict[str, Any] = {
        "INST_ID": inst_id,
        "MODEL": resource.spec["model"],
        "MODEL_NAME": resource.spec.get("servedName", ""),
        "GMANAGER_ADDRESS": resource.gmanager_address,
        "LISTEN_ADDRESS": f"0.0.0.0:{CONTROL_PORT}",
        "ADVERTISE_ADDRESS": f"$(POD_IP):{CONTROL_PORT}",
        "DATA_ADDRESS": f"{scheme}:0.0.0.0:{DATA_PORT}",
        "ADVERTISE_DATA_ADDRESS": f"{scheme}:$(POD_IP):{DATA_PORT}",
        "METRICS_PORT": METRICS_PORT,
        "DRAIN_TIMEOUT_S": resource.drain_timeout_s,
    }
    for section, settings in SETTINGS.items():
        given = resource.spec.get(section, {})
        values |= {settings[name].variable: given[name] for name in settings if name in given}
    if scheme == "tls":
        values |= {f"DATA_TLS_{name}": f"{_TLS_FOLDER}/{file}" for name, file in _TLS_FILES.items()}
    return [
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("INFINITE_LLM_NODE", "spec.nodeName"),
        *({"name": f"INFINITE_LLM_{name}", "value": _text(v)} for name, v in values.items()),
    ]


def _from_pod(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tls_volumes(resource: Resource) -> list[Object]:
    tls = resource.spec.get("dataPlaneTLS")
    if not tls:
        return []
    secret = {"secretName": tls["secretName"], "defaultMode": 0o440}
    return [{"name": "data-plane-tls", "secret": secret}]


def _tls_mounts(resource: Resource) -> list[Object]:
    if not resource.spec.get("dataPlaneTLS"):
        return []
    return [{"name": "data-plane-tls", "mountPath": _TLS_FOLDER, "readOnly": True}]
