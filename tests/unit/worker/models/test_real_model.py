"""The built-in model, converted once, against transformers on the same folder."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.common.model_store.folder import QUANTIZED_FILE
from services.worker.models.config import ModelConfig
from services.worker.models.load import WeightDtype, load_model
from tests.unit.worker.models.conftest import load_oracle, native_kernels
from tests.unit.worker.models.packed import PackedRun

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
PROMPTS = ["The capital of France is", "  3 apples and 12 pears make", "def fibonacci(n):\n"]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve(DEFAULT_MODEL, default_cache_dir(os.environ), print)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_config_is_the_published_one(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_model_len) == (49152, 8192)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_logits_equal_transformers(folder: Path, oracle: Any, tokenizer: Any) -> None:
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    logits = PackedRun(load_model(folder, "float32", "cpu", native_kernels()), len(prompts)).step(
        prompts
    )
    with torch.inference_mode():
        expected = torch.cat([oracle(torch.tensor([ids])).logits[:, -1] for ids in prompts])
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)


@pytest.fixture(scope="module")
def oracle_tokens(oracle: Any, tokenizer: Any) -> list[list[int]]:
    return [generate(oracle, tokenizer(prompt).input_ids) for prompt in PROMPTS]


def generate(oracle: Any, ids: list[int]) -> list[int]:
    output = oracle.generate(
        torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_greedy_tokens_equal_generate(
    folder: Path, oracle_tokens: list[list[int]], tokenizer: Any, dtype: WeightDtype
) -> None:
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    run = PackedRun(load_model(folder, dtype, "cpu", native_kernels()), len(prompts))
    assert run.greedy(prompts, NUM_TOKENS) == oracle_tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "quantized"])
def test_bfloat16_stays_close_to_float32(
    folder: Path, oracle: Any, tokenizer: Any, dtype: WeightDtype
) -> None:
    """Logits within a few hundredths of their spread; the same token wherever that is clear."""
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = load_model(folder, dtype, "cpu", native_kernels())
    logits = PackedRun(model, len(prompts)).step(prompts, all_rows=True)
    with torch.inference_mode():
        expected = torch.cat([oracle(torch.tensor([ids])).logits[0] for ids in prompts])
    assert (logits - expected).square().mean() < (0.05 * expected.std()) ** 2
    best = expected.topk(2, dim=-1)
    is_clear = best.values[:, 0] - best.values[:, 1] > 0.5
    assert is_clear.sum() > len(is_clear) // 2
    assert torch.equal(logits.argmax(-1)[is_clear], best.indices[is_clear, 0])


def test_quantized_weights_lie_in_memory_as_in_the_file(folder: Path) -> None:
    model = load_model(folder, "quantized", "cpu", native_kernels())
    with safe_open(str(folder / QUANTIZED_FILE), framework="pt") as file:
        names = file.keys()
        assert model.weight_bytes == sum(file.get_tensor(name).nbytes for name in names)


@pytest.mark.parametrize("dtype", ["bfloat16", "quantized"])
def test_bfloat16_does_not_depend_on_the_batch(
    folder: Path, tokenizer: Any, dtype: WeightDtype
) -> None:
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = load_model(folder, dtype, "cpu", native_kernels())
    together = PackedRun(model, len(prompts)).greedy(prompts, NUM_TOKENS)
    assert together == [PackedRun(model, 1).greedy([ids], NUM_TOKENS)[0] for ids in prompts]


def test_digits_stand_alone(tokenizer: Any) -> None:
    assert tokenizer.tokenize("  3 apples") == ["ĠĠ", "3", "Ġapples"]
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n\t x", "  3 apples", "naïve café – 東京 😀", "a<|im_end|>b", "x" * 300],
)
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_renders(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("one word.<|im_end|>\n<|im_start|>assistant\n")


def test_it_answers_and_stops(folder: Path, tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    model = load_model(folder, "float32", "cpu", native_kernels())
    [answer] = PackedRun(model, 1).greedy([tokenizer(rendered).input_ids], 8)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] in model.config.eos_token_ids
