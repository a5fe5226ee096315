"""The bytes of a step are those of the model that is served."""

import pytest
import torch

from benchmarks.bandwidth import read_bytes_per_s, weight_bytes
from services.worker.models.config import ModelConfig

_SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)


def test_weights_of_the_built_in_model() -> None:
    # 134,515,008 parameters, less two norms a layer and a last one.
    num_weights = 134_515_008 - 61 * 576
    assert weight_bytes(_SMOLLM2, torch.float32) == 4 * num_weights
    assert weight_bytes(_SMOLLM2, torch.float16) == 2 * num_weights


@pytest.fixture
def keep_threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keep_threads")
def test_a_buffer_is_read_at_some_rate() -> None:
    assert read_bytes_per_s(num_threads=1, buffer_bytes=1 << 20) > 1e6
