"""Which processes make up a local cluster, with their arguments and settings. Pure.

`cluster` starts what is planned here.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from services.common.config import variable_name

HOST = "127.0.0.1"
#: Of the gManager that leads, where there are several.
LEADER_LEASE_S = 3.0
#: Shorter than the time between SIGTERM and SIGKILL.
WORKER_DRAIN_S = 10.0
ProbeKind = Literal["redis", "grpc", "http"]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What a cluster should be. A port of 0 means any free one."""

    model: Path
    model_name: str
    num_instances: int = 2
    num_gmanagers: int = 1
    num_blocks: int = 96
    block_size: int = 16
    dtype: str = "float32"
    move_tokens_per_step: int = 16
    pooling: bool = True
    num_cores: int = 2
    #: Which CPUs these are. Where there is one for each instance, nobody is woken on another's.
    cores: tuple[int, ...] = ()
    http_port: int = 0
    grpc_port: int = 0
    log_level: str = "info"
    otlp_endpoint: str = ""
    heartbeat_period_s: float = 0.2
    #: More settings by role ("gmanager", "worker", "router") and config field.
    overrides: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def instance_capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_threads(self) -> int:
        """Threads of one worker: the instances share the machine."""
        return max(1, self.num_cores // self.num_instances)

    def cores_of(self, inst_id: int) -> tuple[int, ...]:
        """Those of one instance alone; none where there are too few for all."""
        share = len(self.cores) // self.num_instances
        return self.cores[inst_id * share : (inst_id + 1) * share]


@dataclass(frozen=True, slots=True)
class Ports:
    """Every TCP port of a cluster; the workers' are in order of inst_id."""

    http: int
    grpc: int
    redis: int
    gmanagers: tuple[int, ...]
    gmanager_metrics: tuple[int, ...]
    workers: tuple[int, ...]
    worker_metrics: tuple[int, ...]

    @property
    def gmanager_addresses(self) -> str:
        """As clients of the gManager are told."""
        return ",".join(f"{HOST}:{port}" for port in self.gmanagers)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: how to start it, and how to ask whether it is ready."""

    name: str
    argv: tuple[str, ...]
    settings: Mapping[str, str]
    probe: ProbeKind
    address: str
    #: Set for workers: ready only once the map lists this instance.
    inst_id: int | None = None


def worker_name(inst_id: int) -> str:
    return f"worker-{inst_id}"


def plan_stages(
    spec: ClusterSpec, ports: Ports, folder: Path, redis_server: str
) -> list[list[ProcessSpec]]:
    """The processes in start order; those of one stage start together. Stop in reverse."""
    return [
        [_redis(ports, folder, redis_server)],
        [_gmanager(spec, ports, number) for number in range(spec.num_gmanagers)],
        [_worker(spec, ports, folder, inst_id) for inst_id in range(spec.num_instances)],
        [_router(spec, ports)],
    ]


def _redis(ports: Ports, folder: Path, redis_server: str) -> ProcessSpec:
    argv = (
        redis_server,
        *("--port", str(ports.redis)),
        *("--bind", HOST),
        *("--dir", str(folder)),
        # The map of a local cluster need not outlive the cluster.
        *("--save", ""),
        *("--appendonly", "no"),
    )
    return ProcessSpec("redis", argv, {}, "redis", f"{HOST}:{ports.redis}")


def _gmanager(spec: ClusterSpec, ports: Ports, number: int) -> ProcessSpec:
    is_sole = spec.num_gmanagers == 1
    name = "gmanager" if is_sole else f"gmanager-{number}"
    address = f"{HOST}:{ports.gmanagers[number]}"
    fields = {
        "listen_address": address,
        "redis_url": f"redis://{HOST}:{ports.redis}/0",
        "heartbeat_period_s": spec.heartbeat_period_s,
        "leader_lease_s": 0 if is_sole else LEADER_LEASE_S,
        "metrics_port": ports.gmanager_metrics[number],
    }
    return _service(spec, "gmanager", name, address, fields)


def _worker(spec: ClusterSpec, ports: Ports, folder: Path, inst_id: int) -> ProcessSpec:
    name = worker_name(inst_id)
    address = f"{HOST}:{ports.workers[inst_id]}"
    fields = {
        "inst_id": inst_id,
        "model": spec.model,
        "model_name": spec.model_name,
        "listen_address": address,
        "data_address": f"unix:{folder / name}.sock",
        "gmanager_address": ports.gmanager_addresses,
        "num_blocks": spec.num_blocks,
        "block_size": spec.block_size,
        "dtype": spec.dtype,
        "move_tokens_per_step": spec.move_tokens_per_step,
        "num_threads": spec.num_threads,
        "cores": ",".join(map(str, spec.cores_of(inst_id))),
        "metrics_port": ports.worker_metrics[inst_id],
        "drain_timeout_s": WORKER_DRAIN_S,
    }
    return replace(_service(spec, "worker", name, address, fields), inst_id=inst_id)


def _router(spec: ClusterSpec, ports: Ports) -> ProcessSpec:
    fields = {
        "http_host": HOST,
        "http_port": ports.http,
        "grpc_port": ports.grpc,
        "gmanager_address": ports.gmanager_addresses,
        "model": spec.model,
        "model_name": spec.model_name,
    }
    return _service(spec, "router", "router", f"http://{HOST}:{ports.http}", fields)


def _service(
    spec: ClusterSpec, role: str, name: str, address: str, fields: Mapping[str, object]
) -> ProcessSpec:
    shared: dict[str, object] = {
        "log_level": spec.log_level,
        "otlp_endpoint": spec.otlp_endpoint,
        "pooling": spec.pooling,
    }
    values = {**shared, **fields, **spec.overrides.get(role, {})}
    settings = {variable_name(key): str(value) for key, value in values.items()}
    argv = (sys.executable, "-m", f"services.{role}")
    return ProcessSpec(name, argv, settings, "http" if role == "router" else "grpc", address)
