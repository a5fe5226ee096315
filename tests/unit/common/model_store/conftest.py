"""A tiny Llama as GGUF, with what llama.cpp's converter does to it, beside the original weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"

Weights = dict[str, NDArray[np.float32]]
WriteGguf = Callable[..., Path]

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "l o", "lo w", "Ġ low"]
TOKENS = [
    *CONTROL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]


@pytest.fixture
def weights() -> Weights:
    """By their Hugging Face names; small multiples of 1/64, so that 16 bits hold them exactly."""
    generator = np.random.default_rng(3)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (generator.integers(-32, 32, shape) / 64).astype(np.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN),
        "model.norm.weight": matrix(HIDDEN),
        f"{layer}input_layernorm.weight": matrix(HIDDEN),
        f"{layer}post_attention_layernorm.weight": matrix(HIDDEN),
        f"{layer}self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.o_proj.weight": matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": matrix(HIDDEN, INNER),
    }


def interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Row by row what llama.cpp does: the halves (a0 a1 .. b0 b1 ..) become (a0 b0 a1 b1 ..)."""
    rows = []
    for head in np.split(weight, num_heads):
        first, second = np.split(head, 2)
        rows += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)


def gguf_tensors(weights: Weights) -> Weights:
    layer = "model.layers.0."
    return {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "blk.0.attn_norm.weight": weights[f"{layer}input_layernorm.weight"],
        "blk.0.ffn_norm.weight": weights[f"{layer}post_attention_layernorm.weight"],
        "blk.0.attn_q.weight": interleaved(weights[f"{layer}self_attn.q_proj.weight"], NUM_HEADS),
        "blk.0.attn_k.weight": interleaved(
            weights[f"{layer}self_attn.k_proj.weight"], NUM_KV_HEADS
        ),
        "blk.0.attn_v.weight": weights[f"{layer}self_attn.v_proj.weight"],
        "blk.0.attn_output.weight": weights[f"{layer}self_attn.o_proj.weight"],
        "blk.0.ffn_gate.weight": weights[f"{layer}mlp.gate_proj.weight"],
        "blk.0.ffn_up.weight": weights[f"{layer}mlp.up_proj.weight"],
        "blk.0.ffn_down.weight": weights[f"{layer}mlp.down_proj.weight"],
    }


def _add_tokenizer(writer: Any, pre: str, model: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(TOKENS) - len(CONTROL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture
def write_gguf(tmp_path: Path, weights: Weights) -> WriteGguf:
    def write(
        architecture: str = "llama",
        pre: str = "smollm",
        tokenizer_model: str = "gpt2",
        scaling: str | None = None,
        extra: Weights | None = None,
        quantisation: gguf.GGMLQuantizationType | None = None,
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(1)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(NUM_HEADS)
        writer.add_head_count_kv(NUM_KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        if scaling is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        _add_tokenizer(writer, pre, tokenizer_model)
        for name, tensor in (gguf_tensors(weights) | (extra or {})).items():
            if quantisation is None or tensor.ndim == 1:
                writer.add_tensor(name, tensor)
            else:
                packed = gguf.quants.quantize(tensor, quantisation)
                writer.add_tensor(name, packed, raw_dtype=quantisation)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
