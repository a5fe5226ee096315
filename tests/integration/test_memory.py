"""A worker's memory is flat however many requests it has served: many, with a tiny model."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.addresses import free_ports
from services.local.plan import ProcessSpec
from services.local.probe import is_ready
from services.local.process import ManagedProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_WARM_UP, NUM_CLIENTS = 10_000, 2_000, 48
MAX_GROWTH_MB = 8.0


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[tuple[ManagedProcess, str]]:
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")  # workers speak token ids
    port, gmanager = free_ports(2)
    address = f"127.0.0.1:{port}"
    settings = {
        "INFINITE_LLM_INST_ID": "0",
        "INFINITE_LLM_MODEL": str(tmp_path / "model"),
        "INFINITE_LLM_LISTEN_ADDRESS": address,
        "INFINITE_LLM_DATA_ADDRESS": f"unix:{tmp_path}/w.sock",
        "INFINITE_LLM_GMANAGER_ADDRESS": f"127.0.0.1:{gmanager}",
        "INFINITE_LLM_NUM_BLOCKS": "512",
        "INFINITE_LLM_LOG_LEVEL": "warning",
    }
    argv = (sys.executable, "-m", "services.worker")
    process = ManagedProcess(
        ProcessSpec("worker-0", argv, settings, "grpc", address), tmp_path, os.environ
    )
    process.start()
    async with asyncio.timeout(90):
        while not await is_ready(process.spec):
            assert process.is_running, process.describe_end()
            await asyncio.sleep(0.1)
    yield process, address
    await process.stop(15.0)


async def test_memory_is_flat_over_ten_thousand_requests(
    worker: tuple[ManagedProcess, str],
) -> None:
    process, address = worker
    assert process.pid is not None
    served, random = iter(range(NUM_REQUESTS)), Random(3)
    memory = psutil.Process(process.pid).memory_info
    after_warm_up = 0

    async with grpc.aio.insecure_channel(address) as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)

        async def client() -> None:
            nonlocal after_warm_up
            for number in served:
                if number == NUM_WARM_UP:
                    after_warm_up = memory().rss
                request = worker_pb2.GenerateTokensRequest(
                    prompt_token_ids=[random.randrange(97) for _ in range(random.randint(1, 40))],
                    max_tokens=2,
                    sampling=types_pb2.SamplingParams(temperature=number % 2, seed=number),
                )
                async for _ in stub.Generate(request, timeout=60):
                    pass

        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(client())
    growth_mb = (memory().rss - after_warm_up) / 2**20
    assert growth_mb < MAX_GROWTH_MB, f"{growth_mb:.1f} MB over 8,000 requests"
