"""A cluster's processes, as planned: who starts when, and with which settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.config import from_env
from services.gmanager.config import GManagerConfig
from services.local.plan import LEADER_LEASE_S, ClusterSpec, Ports, ProcessSpec, plan_stages
from services.router.config import RouterConfig
from services.worker.config import Config as WorkerConfig

SPEC = ClusterSpec(model=Path("/models/m"), model_name="m", num_instances=2, num_cores=4)
PORTS = Ports(
    http=1,
    grpc=2,
    redis=3,
    gmanagers=(4,),
    gmanager_metrics=(5,),
    workers=(6, 7),
    worker_metrics=(8, 9),
)


def plan(spec: ClusterSpec = SPEC, ports: Ports = PORTS) -> list[list[ProcessSpec]]:
    return plan_stages(spec, ports, Path("/run"), "/usr/bin/redis-server")


def settings(name: str, spec: ClusterSpec = SPEC) -> dict[str, str]:
    (process,) = (process for stage in plan(spec) for process in stage if process.name == name)
    return dict(process.settings)


def test_each_stage_needs_the_one_before() -> None:
    names = [[process.name for process in stage] for stage in plan()]
    assert names == [["redis"], ["gmanager"], ["worker-0", "worker-1"], ["router"]]


def test_redis_keeps_nothing_and_listens_here_only() -> None:
    ((redis,), *_) = plan()
    assert redis.argv == (
        *("/usr/bin/redis-server", "--port", "3", "--bind", "127.0.0.1", "--dir", "/run"),
        *("--save", "", "--appendonly", "no"),
    )


def test_the_services_accept_their_settings() -> None:
    gmanager = from_env(GManagerConfig, settings("gmanager"))
    assert (gmanager.listen_address, gmanager.redis_url) == (
        "127.0.0.1:4",
        "redis://127.0.0.1:3/0",
    )
    router = from_env(RouterConfig, settings("router"))
    assert (router.http_port, router.grpc_port, router.model_name) == (1, 2, "m")
    worker = from_env(WorkerConfig, settings("worker-1"))
    assert (worker.inst_id, worker.listen_address) == (1, "127.0.0.1:7")
    assert worker.data_address == "unix:/run/worker-1.sock"
    assert worker.gmanager_address == gmanager.listen_address == router.gmanager_address


def test_two_gmanagers_share_a_lease_and_everybody_knows_both() -> None:
    spec = replace(SPEC, num_gmanagers=2)
    ports = replace(PORTS, gmanagers=(4, 10), gmanager_metrics=(5, 11))
    stages = plan(spec, ports)
    assert [process.name for process in stages[1]] == ["gmanager-0", "gmanager-1"]
    configs = [from_env(GManagerConfig, process.settings) for process in stages[1]]
    assert [config.listen_address for config in configs] == ["127.0.0.1:4", "127.0.0.1:10"]
    assert {config.leader_lease_s for config in configs} == {LEADER_LEASE_S}
    assert from_env(GManagerConfig, settings("gmanager")).leader_lease_s == 0
    for process in (*stages[2], *stages[3]):
        addresses = process.settings["INFINITE_LLM_GMANAGER_ADDRESS"]
        assert addresses == "127.0.0.1:4,127.0.0.1:10"


def test_the_instances_share_the_cores() -> None:
    assert SPEC.num_threads == 2
    assert replace(SPEC, num_instances=8).num_threads == 1


def test_every_instance_keeps_to_cores_of_its_own() -> None:
    spec = replace(SPEC, cores=(0, 1, 4, 5, 6))
    workers = [from_env(WorkerConfig, settings(f"worker-{i}", spec)) for i in (0, 1)]
    assert [worker.core_numbers for worker in workers] == [{0, 1}, {4, 5}]


def test_too_few_cores_are_everybodys() -> None:
    spec = replace(SPEC, cores=(3,))
    assert from_env(WorkerConfig, settings("worker-1", spec)).core_numbers == frozenset()


def test_a_cluster_without_pooling_says_so_to_everybody() -> None:
    spec = replace(SPEC, pooling=False)
    assert not from_env(GManagerConfig, settings("gmanager", spec)).pooling
    assert not from_env(WorkerConfig, settings("worker-0", spec)).pooling
    assert not from_env(RouterConfig, settings("router", spec)).pooling


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_an_override_reaches_every_process_of_its_role(name: str) -> None:
    spec = replace(SPEC, overrides={"worker": {"max_running": 3}})
    assert settings(name, spec)["INFINITE_LLM_MAX_RUNNING"] == "3"
    assert "INFINITE_LLM_MAX_RUNNING" not in settings("router", spec)
