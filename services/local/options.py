"""What the command line may change, and what follows from it. Read by every command."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.addresses import free_ports
from services.common.errors import ConfigError
from services.local.cluster import LocalCluster
from services.local.plan import ClusterSpec
from services.local.preflight import find_redis_server, runtime_folder
from services.local.tool import build_kernels, resolve_model

#: Two instances of 1536 tokens each: small, so that a prompt of one page does not fit one.
DEFAULT_KV_BLOCKS = 96
DEFAULT_INSTANCES = 2
DEFAULT_PORT = 8000
DTYPES = ("float32", "float16", "bfloat16", "quantized")


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    instances: int
    gmanagers: int
    kv_blocks: int
    dtype: str
    max_new_tokens: int
    move_tokens_per_step: int
    pooling: bool
    otlp_endpoint: str
    environ: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError("the number of instances must be at least 1")
        if self.gmanagers < 1:
            raise ConfigError("the number of gManagers must be at least 1")
        if self.kv_blocks < 2:
            raise ConfigError("the number of KV blocks must be at least 2")
        if self.move_tokens_per_step < 1:
            raise ConfigError("the tokens moved in a step must be at least 1")

    async def prepare(self, say: Callable[[str], None]) -> ClusterSpec:
        """Gets the model and the kernels ready; what is there already is used as it is."""
        model = await resolve_model(self.model, say, self.environ)
        await build_kernels(say, self.environ)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return ClusterSpec(
            model=model,
            model_name=model_name_of(self.model),
            num_instances=self.instances,
            num_gmanagers=self.gmanagers,
            num_blocks=self.kv_blocks,
            dtype=self.dtype,
            move_tokens_per_step=self.move_tokens_per_step,
            pooling=self.pooling,
            otlp_endpoint=self.otlp_endpoint,
            num_cores=len(cores),
            cores=cores,
        )

    def new_cluster(self, spec: ClusterSpec) -> LocalCluster:
        """Its runtime folder goes by its HTTP port, which is therefore chosen first."""
        spec = replace(spec, http_port=spec.http_port or free_ports(1)[0])
        folder = runtime_folder(spec.http_port)
        return LocalCluster(spec, folder, find_redis_server(self.environ), self.environ)


def model_name_of(model: str) -> str:
    """The name clients use: a folder's or file's own name; a hub id as it is."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
