"""A model of random weights, small enough to run in milliseconds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 61
_HIDDEN, _INNER, _HEADS, _HEAD_DIM, _LAYERS = 16, 32, 2, 8, 2


def save_tiny_model(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for index in range(_LAYERS):
        prefix = f"model.layers.{index}"
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(_HIDDEN, _HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = random(_INNER, _HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(_HIDDEN, _INNER)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}.{name}_layernorm.weight"] = torch.ones(_HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder
