"""A GGUF file becomes the folder it was made from."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from services.common.errors import ConfigError
from services.common.model_store.folder import QUANTIZED_FILE
from services.common.model_store.gguf_conversion import convert
from tests.unit.common.model_store.conftest import (
    CHAT_TEMPLATE,
    HEAD_DIM,
    HIDDEN,
    INNER,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOKENS,
    Weights,
    WriteGguf,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "converted"
    target.mkdir()
    return target


def silently(line: str) -> None:
    """A progress that shows nothing."""


@pytest.mark.parametrize("quantisation", [None, gguf.GGMLQuantizationType.F16])
def test_weights_equal_the_original(
    write_gguf: WriteGguf,
    weights: Weights,
    folder: Path,
    quantisation: gguf.GGMLQuantizationType | None,
) -> None:
    convert(write_gguf(quantisation=quantisation), folder, silently)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        assert converted[name].dtype == np.float32
        np.testing.assert_array_equal(converted[name], weight)


def test_quantised_weights_are_close(write_gguf: WriteGguf, weights: Weights, folder: Path) -> None:
    convert(write_gguf(quantisation=gguf.GGMLQuantizationType.Q4_1), folder, silently)
    converted = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        np.testing.assert_allclose(converted[name], weight, atol=0.04)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_blocks_are_kept_in_the_order_of_the_weights(
    write_gguf: WriteGguf, folder: Path, kind: gguf.GGMLQuantizationType
) -> None:
    convert(write_gguf(quantisation=kind), folder, silently)
    converted, blocks = load_file(folder / "model.safetensors"), load_file(folder / QUANTIZED_FILE)
    assert blocks.keys() == {name for name, weight in converted.items() if weight.ndim == 2}
    for name, rows in blocks.items():
        np.testing.assert_array_equal(gguf.quants.dequantize(rows, kind), converted[name])
    with safe_open(str(folder / QUANTIZED_FILE), framework="numpy") as file:
        assert file.metadata() == dict.fromkeys(blocks, kind.name)


def test_without_such_blocks_there_is_no_file_of_them(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf(quantisation=gguf.GGMLQuantizationType.Q4_0), folder, silently)
    assert not (folder / QUANTIZED_FILE).exists()


def test_transformers_loads_the_folder_and_agrees(
    write_gguf: WriteGguf, weights: Weights, folder: Path
) -> None:
    original = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=INNER,
            num_hidden_layers=1, num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM, rms_norm_eps=1e-5, tie_word_embeddings=True,
        )
    )  # fmt: skip
    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    original.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    convert(write_gguf(), folder, silently)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[5, 99, 7, 200, 31, 8]])
    with torch.inference_mode():
        torch.testing.assert_close(
            converted(tokens).logits, original(tokens).logits, atol=1e-5, rtol=0
        )
    assert converted.generation_config.eos_token_id == [2]


def test_config_tells_what_the_file_says(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf(), folder, silently)
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 256
    assert config["head_dim"] == HEAD_DIM


def test_an_output_matrix_unties_the_embeddings(write_gguf: WriteGguf, folder: Path) -> None:
    output = np.ones((len(TOKENS), HIDDEN), dtype=np.float32)
    convert(write_gguf(extra={"output.weight": output}), folder, silently)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


def encode(folder: Path, text: str) -> list[str]:
    tokens: list[str] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("smollm", ["ĠĠ", "3", "1", "Ġlow"]), ("gpt-2", ["Ġ", "Ġ", "3", "1", "Ġlow"])],
)
def test_digits_follow_the_declared_rule(
    write_gguf: WriteGguf, folder: Path, pre: str, expected: list[str]
) -> None:
    convert(write_gguf(pre=pre), folder, silently)
    assert encode(folder, "  31 low") == expected


def test_control_tokens_are_whole_and_special(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf(), folder, silently)
    assert encode(folder, "low<|im_end|>low") == ["low", "<|im_end|>", "low"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("lö 7<|im_end|>").ids
    assert tokenizer.decode(ids) == "lö 7"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "lö 7<|im_end|>"


def test_tokenizer_config_carries_template_and_special_tokens(
    write_gguf: WriteGguf, folder: Path
) -> None:
    convert(write_gguf(), folder, silently)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "low"}], tokenize=False)
    assert rendered == "<|im_start|>low"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"architecture": "qwen2"}, "architecture 'qwen2'", id="architecture"),
        pytest.param({"pre": "tekken"}, "rule 'tekken'", id="pre-tokenizer"),
        pytest.param({"tokenizer_model": "llama"}, "tokenizer model 'llama'", id="tokenizer"),
        pytest.param({"scaling": "yarn"}, "RoPE scaling", id="rope-scaling"),
        pytest.param(
            {"extra": {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}},
            r"'blk\.0\.attn_q\.bias'",
            id="bias",
        ),
    ],
)
def test_what_is_not_served_is_refused(
    write_gguf: WriteGguf, folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(write_gguf(**options), folder, silently)


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all", b"GGUF\x03\x00\x00\x00"])
def test_other_files_are_refused(tmp_path: Path, folder: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        convert(path, folder, silently)
