"""What a model's config.json says, narrowed to the models that are served exactly.

Whatever would silently change the numbers (an unknown architecture, RoPE scaling, biases) is
refused here, before any weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common.errors import ConfigError

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads config.json, and the stop tokens from generation_config.json where there is one."""
        path = folder / "config.json"
        raw = _read_json(path)
        generation = folder / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        try:
            return cls._from_json(raw, raw.get("eos_token_id") if eos is None else eos)
        except KeyError as error:
            raise ConfigError(f"{path} lacks {error.args[0]!r}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from error

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any], eos: int | list[int] | None) -> Self:
        _refuse_unserved(raw)
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly"
            )
        rope = raw.get("rope_parameters") or {}
        return cls(
            architecture=raw["architectures"][0],
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
            vocab_size=raw["vocab_size"],
            max_model_len=_max_model_len(raw),
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_ROPE_THETA,
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=_as_tuple(eos),
        )


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not served, only {', '.join(_ARCHITECTURES)}"
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(f"RoPE scaling {rope_type!r} is not supported")
    for bias in ("attention_bias", "mlp_bias"):
        if raw.get(bias):
            raise ConfigError(f"{bias} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"activation {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        raise ConfigError("quantised weights are not supported")


def _max_model_len(raw: Mapping[str, Any]) -> int:
    """Up to its window, a model with sliding-window attention attends to everything."""
    longest: int = raw["max_position_embeddings"]
    return min(longest, raw.get("sliding_window") or longest)


def _as_tuple(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content
