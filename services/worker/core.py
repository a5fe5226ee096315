"""The part of an instance that computes: model, KV memory, kernels, scheduler and runner.

`assembly` puts an instance around it; the benchmarks drive it alone.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
from kernels.interface import Kernels
from services.common.errors import ConfigError
from services.worker.config import Config
from services.worker.engine.attention import ChannelPool, RemoteAttention
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.engine.step_tensors import StepTensors
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.storage import KvShape, KvStorage
from services.worker.models.llama import LlamaFamilyModel
from services.worker.models.load import load_model


@dataclass(frozen=True, slots=True)
class Core:
    """What has to exist once per process; both the engine and the creditor read the storage."""

    model: LlamaFamilyModel
    storage: KvStorage
    kernels: Kernels
    pool: BlockPool


def build_core(config: Config, folder: Path) -> Core:
    """Loads the model, which takes a while, and sets the number of torch's threads."""
    torch.set_num_threads(config.num_threads)
    chosen = kernels.select(config.device, config.num_threads)
    model = load_model(folder, config.dtype, config.device, chosen)
    storage = _allocate(config, model)
    pool = BlockPool(config.num_blocks, storage.poison if config.poison_freed_blocks else None)
    return Core(model, storage, chosen, pool)


def build_scheduler(config: Config, core: Core) -> Scheduler:
    limits = SchedulerConfig(
        block_size=config.block_size,
        max_batched_tokens=config.max_batched_tokens,
        max_running=_max_running(config),
        max_waiting=config.max_waiting,
        stall_timeout_s=config.stall_timeout_s,
        queue_timeout_s=config.queue_timeout_s,
    )
    blocks = SequenceBlocks(core.pool, config.keep_remote_prefix_s, config.prefix_caching)
    return Scheduler(limits, blocks)


def build_runner(config: Config, core: Core, channels: ChannelPool) -> Runner:
    tensors = StepTensors(core.storage.pool, config.max_batched_tokens, _max_running(config))
    return Runner(core.model, tensors, RemoteAttention(core.kernels, channels))


def _max_running(config: Config) -> int:
    return min(config.max_running, config.max_batched_tokens)


def _allocate(config: Config, model: LlamaFamilyModel) -> KvStorage:
    shape = KvShape(
        model.config.num_layers,
        model.config.num_kv_heads,
        config.block_size,
        model.config.head_dim,
        getattr(torch, config.kv_dtype),
    )
    try:
        return KvStorage(config.num_blocks, shape)
    except OSError as error:
        size_gib = config.num_blocks * shape.block_bytes / 2**30
        raise ConfigError(
            f"INFINITE_LLM_NUM_BLOCKS={config.num_blocks} needs {size_gib:.1f} GiB: "
            f"{error.strerror}"
        ) from error
