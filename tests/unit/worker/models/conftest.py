"""Small random models, saved by transformers, which is the oracle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kernels
from kernels import Kernels
from kernels.reference import ReferenceKernels

SaveTiny = Callable[..., Path]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "torch"])
def any_kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each in turn of what can be below a model."""
    return ReferenceKernels() if request.param == "torch" else native_kernels()


def native_kernels() -> Kernels:
    return kernels.select("cpu", 1)


@pytest.fixture
def save_tiny(tmp_path: Path) -> SaveTiny:
    def save(**changes: Any) -> Path:
        torch.manual_seed(7)
        shape: dict[str, Any] = {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "eos_token_id": None,
            "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        }
        save_options = {key: changes.pop(key) for key in ("max_shard_size",) if key in changes}
        model = LlamaForCausalLM(LlamaConfig(**(shape | changes)))
        model.save_pretrained(tmp_path, **save_options)
        return tmp_path

    return save


def load_oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
