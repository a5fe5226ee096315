"""The packed forward says what transformers says, sequence by sequence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import Kernels
from kernels.native.decoder import NativeDecoder
from services.common.errors import ConfigError
from services.worker.models.load import WeightDtype, load_model
from tests.unit.worker.models.conftest import SaveTiny, load_oracle, native_kernels
from tests.unit.worker.models.packed import PackedRun

PROMPTS = [[5, 17, 3, 88, 41], [9], [60, 61, 2, 7, 7, 7, 30, 11, 12, 13, 14]]

MODELS = [
    pytest.param({"tie_word_embeddings": True}, id="tied"),
    pytest.param({"tie_word_embeddings": False}, id="untied"),
    pytest.param({"num_key_value_heads": 6}, id="multi-head"),
    pytest.param({"num_key_value_heads": 1, "head_dim": 16}, id="multi-query-wide-heads"),
]


def oracle_logits(oracle: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.parametrize("changes", MODELS)
def test_packed_logits_equal_transformers(
    save_tiny: SaveTiny, any_kernels: Kernels, changes: dict[str, Any]
) -> None:
    folder = save_tiny(**changes)
    oracle = load_oracle(folder)
    run = PackedRun(load_model(folder, "float32", "cpu", any_kernels), len(PROMPTS))
    expected = torch.cat([oracle_logits(oracle, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(run.step(PROMPTS, all_rows=True), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", MODELS)
def test_greedy_tokens_equal_generate(
    save_tiny: SaveTiny, any_kernels: Kernels, changes: dict[str, Any]
) -> None:
    folder = save_tiny(**changes)
    oracle = load_oracle(folder)
    run = PackedRun(load_model(folder, "float32", "cpu", any_kernels), len(PROMPTS))
    generated = run.greedy(PROMPTS, 12)
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_a_prompt_in_chunks_gives_the_same_logits(
    save_tiny: SaveTiny, any_kernels: Kernels
) -> None:
    model = load_model(save_tiny(), "float32", "cpu", any_kernels)
    whole = PackedRun(model, 1).step([PROMPTS[2]])
    chunked = PackedRun(model, 1)
    chunked.step([PROMPTS[2][:4]])
    chunked.step([PROMPTS[2][4:5]])
    torch.testing.assert_close(chunked.step([PROMPTS[2][5:]]), whole, atol=1e-4, rtol=0)


def test_no_logits_rows_give_no_logits(save_tiny: SaveTiny, any_kernels: Kernels) -> None:
    model = load_model(save_tiny(), "float32", "cpu", any_kernels)
    assert PackedRun(model, 1).step([PROMPTS[0]], logits=False).shape == (
        0,
        model.config.vocab_size,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_weights_of_16_bits_stay_close(
    save_tiny: SaveTiny, any_kernels: Kernels, dtype: WeightDtype, tolerance: float
) -> None:
    folder = save_tiny()
    exact = PackedRun(load_model(folder, "float32", "cpu", any_kernels), 3).step(PROMPTS)
    half = PackedRun(load_model(folder, dtype, "cpu", any_kernels), 3).step(PROMPTS)
    assert half.dtype == torch.float32
    assert (half - exact).abs().max() < tolerance * exact.abs().max()


def test_sharded_weights_are_read_alike(save_tiny: SaveTiny, any_kernels: Kernels) -> None:
    folder = save_tiny(max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    logits = PackedRun(load_model(folder, "float32", "cpu", any_kernels), 1).step(
        [PROMPTS[0]], all_rows=True
    )
    expected = oracle_logits(load_oracle(folder), PROMPTS[0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_mistral_is_served(save_tiny: SaveTiny, any_kernels: Kernels, tmp_path: Path) -> None:
    folder = save_tiny()
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    }
    path.write_text(json.dumps(config))
    logits = PackedRun(load_model(folder, "float32", "cpu", any_kernels), 1).step(
        [PROMPTS[0]], all_rows=True
    )
    expected = oracle_logits(load_oracle(folder), PROMPTS[0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_missing_and_misshapen_weights_are_named(save_tiny: SaveTiny, any_kernels: Kernels) -> None:
    folder = save_tiny()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"lack 'model\.layers\.3\.self_attn\.q_proj\.weight'"):
        load_model(folder, "float32", "cpu", any_kernels)
    path.write_text(json.dumps(config | {"intermediate_size": 81}))
    with pytest.raises(ConfigError, match=r"gate_proj.*not \(81, 48\)"):
        load_model(folder, "float32", "cpu", any_kernels)


def test_a_broken_weights_file_is_a_config_error(save_tiny: SaveTiny, any_kernels: Kernels) -> None:
    folder = save_tiny()
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="cannot read"):
        load_model(folder, "float32", "cpu", any_kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_one_size_use_the_same_memory(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch, dtype: WeightDtype
) -> None:
    """What a step was given is kept here, so that its memory cannot be had twice by chance."""
    given: list[tuple[torch.Tensor, ...]] = []
    run_layers, compute_logits = NativeDecoder.run, NativeDecoder.logits

    def run(self: NativeDecoder, hidden: torch.Tensor, *others: Any) -> None:
        given.append((hidden, *others[:2]))
        run_layers(self, hidden, *others)

    def logits(self: NativeDecoder, hidden: torch.Tensor) -> torch.Tensor:
        found = compute_logits(self, hidden)
        given.append((hidden, found))
        return found

    monkeypatch.setattr(NativeDecoder, "run", run)
    monkeypatch.setattr(NativeDecoder, "logits", logits)
    steps = PackedRun(load_model(save_tiny(), dtype, "cpu", native_kernels()), 3)
    for _ in range(20):
        steps.step([[5], [9], [60]])
    for part in (given[0::2], given[1::2]):
        for tensors in zip(*part, strict=True):
            assert len({tensor.data_ptr() for tensor in tensors}) == 1
