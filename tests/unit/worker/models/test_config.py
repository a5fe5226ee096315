"""config.json in its old and new shapes, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.worker.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return ModelConfig.from_folder(folder)


def test_what_is_left_out_takes_the_family_defaults(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=1000,
        max_model_len=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_theta": 5e5}, id="old"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": None}, id="old-without-scaling"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, id="new"),
    ],
)
def test_rope_theta_is_found_in_either_place(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).rope_theta == 5e5


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": [7, 9]}, (7, 9)),
        ([3, 4], {"eos_token_id": 0}, (0,)),
        (None, None, ()),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path,
    in_config: int | list[int] | None,
    in_generation_config: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    if in_generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation_config))
    assert read(tmp_path, eos_token_id=in_config).eos_token_ids == expected


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, **mistral, sliding_window=256).max_model_len == 256
    assert read(tmp_path, **mistral, sliding_window=None).max_model_len == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not served"),
        ({"architectures": None}, "architecture None is not served"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "RoPE scaling 'llama3'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3 KV heads evenly"),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read(tmp_path, **changes)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json lacks 'hidden_size'"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{not json", "[]"])
def test_a_broken_file_is_a_config_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ModelConfig.from_folder(tmp_path)
