"""The pod that a resource describes starts the worker that it describes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config import from_env
from services.operator.merge import merge
from services.operator.pod_template import worker_pod
from services.operator.pods import FAILURES
from services.operator.resource import Object, parse
from services.operator.template_hash import template_hash
from services.worker.config import Config
from tests.unit.operator.builders import resource

SAMPLES = Path(__file__).parents[3] / "deploy/samples"


def container(pod: Object) -> Object:
    (worker,) = pod["spec"]["containers"]
    return dict(worker)


def config_of(pod: Object, pod_ip: str = "10.1.2.3") -> Config:
    """As the worker reads it."""
    values = {
        item["name"]: item.get("value", "n1").replace("$(POD_IP)", pod_ip)
        for item in container(pod)["env"]
    }
    return from_env(Config, values)


def test_the_worker_is_told_everything() -> None:
    spec: dict[str, Any] = {
        "model": "/models/large",
        "servedName": "large",
        "gmanagerAddress": "gm:7000",
        "engine": {"kvBlocks": 99, "dtype": "bfloat16", "prefixCaching": False},
        "pooling": {"enabled": False, "maxLentShare": 0.5, "leaseSeconds": 7},
        "drainTimeoutSeconds": 77,
    }
    config = config_of(worker_pod(resource(**spec), inst_id=4))
    assert (config.inst_id, config.model, config.model_name) == (4, "/models/large", "large")
    assert (config.num_blocks, config.dtype, config.prefix_caching) == (99, "bfloat16", False)
    assert (config.pooling, config.max_lent_share, config.lease_s) == (False, 0.5, 7.0)
    assert config.gmanager_address == "gm:7000"
    assert config.advertise_address == "10.1.2.3:7100"
    assert config.advertise_data_address == "tcp:10.1.2.3:7101"
    assert (config.node, config.drain_timeout_s) == ("n1", 77.0)


def test_the_gmanager_is_beside_the_resource_unless_it_says_otherwise() -> None:
    assert config_of(worker_pod(resource(), 0)).gmanager_address == "small-gmanager:7000"


def test_mutual_tls_is_read_from_the_secret() -> None:
    pod = worker_pod(resource(dataPlaneTLS={"secretName": "certs"}), 0)
    config = config_of(pod)
    assert config.data_address == "tls:0.0.0.0:7101"
    assert config.advertise_data_address == "tls:10.1.2.3:7101"
    volume = next(v for v in pod["spec"]["volumes"] if "secret" in v)
    mount = next(m for m in container(pod)["volumeMounts"] if m["name"] == volume["name"])
    assert volume["secret"]["secretName"] == "certs"
    assert config.data_tls_key == f"{mount['mountPath']}/tls.key"


def test_the_grace_period_is_longer_than_the_drain() -> None:
    pod = worker_pod(resource(drainTimeoutSeconds=300), 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] > 300


def test_pods_are_confined() -> None:
    pod = worker_pod(resource(), 0)
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_pod_is_owned_and_found_by_its_resource() -> None:
    pod = worker_pod(resource(), 3, num_failures=2)
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("InfiniteLLM", "uid-small", True)
    assert pod["metadata"]["name"] == "small-w-3"
    assert resource().selector.items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"] == {FAILURES: "2"}


def test_the_users_template_is_merged_over_ours() -> None:
    template = {
        "metadata": {"labels": {"team": "x", "app.kubernetes.io/instance": "stolen"}},
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "volumes": [{"name": "models", "hostPath": {"path": "/m"}}],
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "INFINITE_LLM_LOG_LEVEL", "value": "debug"}],
                    "startupProbe": {"failureThreshold": 9},
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    pod = worker_pod(resource(podTemplate=template), 0)
    worker, sidecar = pod["spec"]["containers"]
    assert sidecar == {"name": "sidecar", "image": "s"}
    assert worker["image"] == "worker:1"
    assert {"name": "INFINITE_LLM_LOG_LEVEL", "value": "debug"} in worker["env"]
    assert worker["startupProbe"]["failureThreshold"] == 9
    assert worker["startupProbe"]["grpc"]["port"] == 7100
    assert [m["mountPath"] for m in worker["volumeMounts"]] == ["/tmp", "/dev/shm", "/models"]
    assert pod["spec"]["nodeSelector"] == {"disk": "fast"}
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "small"


def test_null_takes_a_key_away_and_volumes_are_not_mixed() -> None:
    base = {"a": {"b": 1, "c": 2}, "volumes": [{"name": "v", "emptyDir": {}}], "tolerations": [1]}
    patch = {"a": {"b": None}, "volumes": [{"name": "v", "secret": {}}], "tolerations": [2]}
    assert merge(base, patch) == {
        "a": {"c": 2},
        "volumes": [{"name": "v", "secret": {}}],
        "tolerations": [2],
    }


@pytest.mark.parametrize(
    "containers", [[{"image": "x"}], ["x"], "x", None, [{"name": 7}], [{"name": {}}]]
)
def test_what_makes_no_pod_is_left_to_the_server_to_refuse(containers: Any) -> None:
    template = {"spec": {"containers": containers}}
    pod = worker_pod(resource(podTemplate=template), 0)
    assert pod["spec"].get("containers") != worker_pod(resource(), 0)["spec"]["containers"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_pods_of_the_samples_are_valid(sample: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = yaml.safe_load(sample.read_text())
    found["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    pod = worker_pod(parse(found), 0, num_failures=1)
    kubernetes_validate.validate(pod, version, strict=True)


# -- when pods are made anew -----------------------------------------------------------------------

SAME = [
    {"replicas": 7},
    {"drainTimeoutSeconds": 9},
    {"updateStrategy": {"maxUnavailable": "50%"}},
    {"imagePullPolicy": "Always"},
    {"imagePullSecrets": [{"name": "s"}]},
    {"gmanagerAddress": "small-gmanager:7000"},
    {"engine": {"kvBlocks": 1024, "prefixCaching": True}},
    {"podTemplate": {"metadata": {"labels": {}}}, "resources": {}},
]
OTHER: list[dict[str, Any]] = [
    {"image": "worker:2"},
    {"model": "n"},
    {"servedName": "n"},
    {"gmanagerAddress": "other:7000"},
    {"engine": {"kvBlocks": 1025}},
    {"pooling": {"enabled": False}},
    {"resources": {"requests": {"cpu": 1}}},
    {"dataPlaneTLS": {"secretName": "s"}},
    {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
]


@pytest.mark.parametrize("spec", SAME, ids=str)
def test_what_no_running_pod_needs_restarts_nobody(spec: dict[str, Any]) -> None:
    assert template_hash(resource(**spec)) == template_hash(resource())


@pytest.mark.parametrize("spec", OTHER, ids=str)
def test_what_a_running_pod_cannot_learn_makes_a_new_template(spec: dict[str, Any]) -> None:
    assert template_hash(resource(**spec)) != template_hash(resource())


@pytest.mark.parametrize(("one", "same"), [("200m", 0.2), ("1Gi", "1024Mi"), (2, "2"), ("2", 2.0)])
def test_amounts_written_in_another_way_are_the_same(one: Any, same: Any) -> None:
    first = resource(resources={"limits": {"cpu": one}})
    second = resource(resources={"limits": {"cpu": same}})
    assert template_hash(first) == template_hash(second)


def test_the_hash_of_a_release_stays() -> None:
    """Another value here means that an upgrade of the operator restarts every worker."""
    assert template_hash(resource(engine={"kvBlocks": 256})) == "4f637baa75"
