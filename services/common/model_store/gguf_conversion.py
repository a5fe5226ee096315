"""Reads a Llama GGUF once and writes the folder that everything else reads.

The weights become float32 under their Hugging Face names; matrices of the kinds that can be served
in their blocks are kept so, too. What llama.cpp changed is undone: it interleaves the two rotary
halves of the query and key rows.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from services.common.errors import ConfigError
from services.common.model_store.folder import QUANTIZED_FILE
from services.common.model_store.gguf_tokenizer import write_tokenizer

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


_KEPT_KINDS = (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0)


class _Reader(gguf.GGUFReader):
    """A GGUFReader over a plain view of the mapped file.

    It slices its data a million times for the token lists, and slicing a numpy.memmap runs Python
    code each time.
    """

    @property
    def data(self) -> Any:
        return self._view

    @data.setter
    def data(self, mapped: Any) -> None:
        self._view = np.asarray(mapped)


def convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Fills `folder` with config, weights and tokenizer; raises ConfigError where we cannot."""
    progress(f"reading {source.name}")
    try:
        reader = _Reader(source)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{str(source)!r} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata.get("general.architecture") != "llama":
        raise ConfigError(
            f"GGUF architecture {metadata.get('general.architecture')!r} is not supported"
        )
    try:
        config = model_config(metadata, [tensor.name for tensor in reader.tensors])
        progress("writing the tokenizer")
        write_tokenizer(metadata, folder)
    except KeyError as error:
        raise ConfigError(f"{str(source)!r} lacks the GGUF field {error.args[0]!r}") from error
    progress(f"writing {len(reader.tensors)} tensors as float32")
    _save(_weights(reader, config), folder / "model.safetensors", {"format": "pt"})
    if blocks := _blocks(reader, config):
        kinds = {_name_of(tensor): tensor.tensor_type.name for tensor in reader.tensors}
        (folder / QUANTIZED_FILE).parent.mkdir()
        _save(blocks, folder / QUANTIZED_FILE, {name: kinds[name] for name in blocks})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def model_config(metadata: Mapping[str, Any], tensor_names: list[str]) -> dict[str, Any]:
    """config.json in the terms of transformers' LlamaConfig."""
    if any(name.startswith("llama.rope.scaling.") for name in metadata):
        raise ConfigError("GGUF with RoPE scaling is not supported")
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    eos_ids = {metadata["tokenizer.ggml.eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(eos_ids - {None}),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-5 as a float32, 9.99999974e-06."""
    return float(str(np.float32(value)))


def _weights(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    weights = {}
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = np.asarray(numbers, dtype=np.float32)
        weights[_name_of(tensor)] = _in_order(tensor.name, weight, config)
    return weights


def _blocks(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    return {
        _name_of(tensor): _in_order(tensor.name, np.asarray(tensor.data), config)
        for tensor in reader.tensors
        if tensor.tensor_type in _KEPT_KINDS
    }


def _name_of(tensor: gguf.ReaderTensor) -> str:
    return hugging_face_name(tensor.name)


def _in_order(name: str, rows: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Rows of numbers or of blocks, in the order of Hugging Face; contiguous."""
    num_rotary_heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    num_heads = num_rotary_heads.get(name.split(".", 2)[-1])
    return np.ascontiguousarray(separate_rotary_halves(rows, num_heads) if num_heads else rows)


def separate_rotary_halves(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of a head go from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ..., d - 1)."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _save(tensors: dict[str, NDArray[Any]], path: Path, metadata: dict[str, str]) -> None:
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)  # the library keeps it to the owner; images convert as root


def hugging_face_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or rest not in _LAYER_NAMES:
        raise ConfigError(f"GGUF tensor {name!r} belongs to a model that is not supported")
    return f"model.layers.{block}.{_LAYER_NAMES[rest]}"


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
