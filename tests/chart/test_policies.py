"""What every pod of the chart owes the cluster, whatever the values."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.conftest import VALUES, Helm, name_of

Objects = list[dict[str, Any]]
WRITES = {"create", "update", "patch", "delete"}


@pytest.fixture(scope="module", params=VALUES, ids=name_of)
def objects(helm: Helm, request: pytest.FixtureRequest) -> Objects:
    return helm.render(request.param)


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield item["metadata"]["name"], item["spec"]["template"]["spec"]
        elif item["kind"] == "Pod":
            yield item["metadata"]["name"], item["spec"]


def test_pods_run_without_rights(objects: Objects) -> None:
    for name, pod in pods(objects):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_only_the_operator_has_a_token(objects: Objects) -> None:
    """And the job that brings definitions up to date."""
    with_token = [name for name, pod in pods(objects) if pod["automountServiceAccountToken"]]
    assert all(name.endswith(("-operator", "-definitions")) for name in with_token)


def test_every_container_says_what_it_needs_and_how_it_is(objects: Objects) -> None:
    for name, pod in pods(objects):
        for container in pod["containers"]:
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert "memory" in container["resources"]["limits"], name
            assert not container["image"].endswith(":latest"), name
            if pod.get("restartPolicy") != "Never":
                assert container.keys() >= {"readinessProbe", "livenessProbe"}, name


def test_no_secret_is_in_the_environment(objects: Objects) -> None:
    for name, pod in pods(objects):
        for container in pod["containers"]:
            for variable in container.get("env", []):
                is_secret = any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "KEY"))
                is_plain = "value" in variable and not variable["name"].endswith("_FILE")
                assert not (is_secret and is_plain), (name, variable)


def test_a_router_has_time_to_end(objects: Objects) -> None:
    for name, pod in pods(objects):
        if not name.endswith("-router"):
            continue
        (container,) = pod["containers"]
        environ = {entry["name"]: entry.get("value") for entry in container["env"]}
        pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        shutdown_s = int(environ["INFINITE_LLM_SHUTDOWN_TIMEOUT_S"])
        assert pod["terminationGracePeriodSeconds"] > pre_stop_s + shutdown_s


def test_rights_end_at_what_the_operator_does(objects: Objects) -> None:
    """No secrets, no definitions, nothing of other kinds; writes to what it makes alone."""
    for role in (item for item in objects if item["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            assert "*" not in (*rule["resources"], *rule["verbs"], *rule["apiGroups"])
            assert set(rule["resources"]) <= {
                *("infinitellms", "infinitellms/status"),
                *("pods", "events", "leases", "customresourcedefinitions"),
            }
            if "customresourcedefinitions" in rule["resources"]:
                assert rule["resourceNames"] == ["infinitellms.infinite-llm.io"]
            if "infinitellms" in rule["resources"]:
                assert not WRITES & set(rule["verbs"])


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        ("operator.enabled=true", ["ClusterRole", "Role", "Role"]),
        ("operator.watchNamespaces={a,b}", ["ClusterRole", "Role", "Role", "Role"]),
        ("operator.watchNamespaces={*}", ["ClusterRole", "ClusterRole", "Role"]),
        ("operator.enabled=false,upgradeDefinitions=false", []),
    ],
)
def test_rights_reach_as_far_as_the_operator_watches(
    helm: Helm, setting: str, kinds: list[str]
) -> None:
    """And for the one definition while it is brought up to date."""
    objects = helm.render(None, "--set", setting)
    roles = [item["kind"] for item in objects if item["kind"] in ("Role", "ClusterRole")]
    assert sorted(roles) == kinds


def test_names_and_labels_are_of_the_release(objects: Objects) -> None:
    for item in objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "infinite-llm", item
        assert labels["app.kubernetes.io/instance"] in ("llm", "tenant-a"), item
        if item["kind"] != "Lease":
            assert labels["app.kubernetes.io/instance"] in item["metadata"]["name"], item


def test_two_releases_share_nothing(helm: Helm) -> None:
    """But the operator's Lease: one operator works in a namespace."""
    first, second = (
        {(item["kind"], item["metadata"]["name"]) for item in helm.render(None, *options)}
        for options in ((), ("--set", "fullnameOverride=other"))
    )
    assert first & second == {("Lease", "infinite-llm-operator")}


def test_doors_are_open_to_those_alone_who_need_them(helm: Helm) -> None:
    doors = {
        (policy["metadata"]["name"].removeprefix("llm-"), port["port"]): _components(rule)
        for policy in helm.render()
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    clients = ["router", "gmanager", "worker", "operator"]
    assert doors == {
        ("router", "http"): None,
        ("router", "grpc"): None,
        ("router", "metrics"): None,
        ("worker", "control"): clients,
        ("worker", "data"): ["worker"],
        ("worker", "metrics"): None,
        ("gmanager", "grpc"): ["router", "worker", "operator"],
        ("gmanager", "metrics"): None,
        ("operator", "metrics"): None,
        ("redis", "redis"): ["gmanager"],
    }


def _components(rule: dict[str, Any]) -> list[str] | None:
    """None: everybody."""
    if "from" not in rule:
        return None
    label = "app.kubernetes.io/component"
    return [peer["podSelector"]["matchLabels"][label] for peer in rule["from"]]


def test_a_router_reads_its_keys_from_a_whole_folder(helm: Helm) -> None:
    """A file that is mounted alone would never change."""
    objects = helm.render(None, "--set", "apiKeys.existingSecret=clients,apiKeys.key=hashed")
    pod = next(pod for name, pod in pods(objects) if name.endswith("-router"))
    (container,) = pod["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environ["INFINITE_LLM_API_KEYS_FILE"] == "/etc/api-keys/hashed"
    mount = next(m for m in container["volumeMounts"] if m["mountPath"] == "/etc/api-keys")
    assert "subPath" not in mount and mount["readOnly"]
    volume = next(v for v in pod["volumes"] if v["name"] == mount["name"])
    assert volume["secret"] == {"secretName": "clients"}
    for name, other in pods(objects):
        assert name.endswith("-router") or "clients" not in str(other)
