"""Builds a model from a folder, fusing the products that share their input."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.linear import WeightDtype, select_linear
from services.worker.models.llama import LlamaFamilyModel, LlamaLayer, LlamaWeights
from services.worker.models.rope import RopeTable
from services.worker.models.weights import Checkpoint


def load_model(folder: Path, dtype: WeightDtype, device: str | torch.device) -> LlamaFamilyModel:
    """Raises ConfigError where the folder does not hold a model that is served."""
    config = ModelConfig.from_folder(folder)
    loader = _Loader(config, Checkpoint.open(folder), dtype, torch.device(device))
    return LlamaFamilyModel(config, loader.weights())


class _Loader:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: WeightDtype, device: torch.device
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = getattr(torch, dtype)
        self._device = device
        self._linear = select_linear(dtype, device)

    def weights(self) -> LlamaWeights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding = self._checkpoint.read("model.embed_tokens.weight", table)
        tied = config.tie_word_embeddings
        head = embedding if tied else self._checkpoint.read("lm_head.weight", table)
        # Packing float16 runs on one core and takes seconds for a small model already.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            layers = tuple(threads.map(self._layer, range(config.num_layers)))
        return LlamaWeights(
            embedding=embedding.to(self._device, self._dtype),
            layers=layers,
            final_norm=self._norm("model.norm"),
            lm_head=self._linear(head),
            rope=RopeTable(config.head_dim, config.rope_theta, config.max_model_len).to(
                self._device
            ),
        )

    def _layer(self, index: int) -> LlamaLayer:
        config = self._config
        prefix = f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [
            self._read(f"{attention}.q_proj", q_size, hidden),
            self._read(f"{attention}.k_proj", kv_size, hidden),
            self._read(f"{attention}.v_proj", kv_size, hidden),
        ]
        gate_up = [self._read(f"{mlp}.{name}_proj", inner, hidden) for name in ("gate", "up")]
        return LlamaLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._linear(torch.cat(qkv)),
            attention_out=self._linear(self._read(f"{attention}.o_proj", hidden, q_size)),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._linear(torch.cat(gate_up)),
            down=self._linear(self._read(f"{mlp}.down_proj", hidden, inner)),
        )

    def _read(self, name: str, num_out: int, num_in: int) -> Tensor:
        return self._checkpoint.read(f"{name}.weight", (num_out, num_in))

    def _norm(self, name: str) -> Tensor:
        weight = self._checkpoint.read(f"{name}.weight", (self._config.hidden_size,))
        return weight.to(self._device, copy=True)
