"""Builds a model from a folder, on the kernels that run where it is."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels import DecoderShape, Kernels, LayerWeights, QuantizedMatrix, Weight, select_decoder
from kernels.quantized import concatenate, of_one_kind
from services.worker.models.config import ModelConfig
from services.worker.models.embedding import Embedding
from services.worker.models.llama import LlamaFamilyModel, LlamaParts
from services.worker.models.rope import RopeTable
from services.worker.models.weights import Checkpoint, QuantizedCheckpoint

#: "quantized": as the model's file has them, and multiplied as bfloat16.
WeightDtype = Literal["float32", "float16", "bfloat16", "quantized"]


def load_model(
    folder: Path, dtype: WeightDtype, device: str | torch.device, kernels: Kernels
) -> LlamaFamilyModel:
    """Raises ConfigError where the folder does not hold a model that is served."""
    config = ModelConfig.from_folder(folder)
    kind = QuantizedCheckpoint if dtype == "quantized" else Checkpoint
    number_type = torch.bfloat16 if dtype == "quantized" else getattr(torch, dtype)
    loader = _Loader(config, kind.open(folder), number_type, torch.device(device), kernels)
    return LlamaFamilyModel(config, loader.parts())


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._shape = DecoderShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._decoder = select_decoder(kernels, self._shape, self._dtype, device)

    def parts(self) -> LlamaParts:
        config, shape = self._config, self._shape
        table = (config.vocab_size, config.hidden_size)
        embedding = self._checkpoint.matrix("model.embed_tokens.weight", table)
        tied = config.tie_word_embeddings
        head = embedding if tied else self._checkpoint.matrix("lm_head.weight", table)
        for index in range(config.num_layers):
            self._decoder.add_layer(self._layer(index))
        return LlamaParts(
            embedding=Embedding(self._table(embedding)),
            decoder=self._decoder.build(self._norm("model.norm"), head),
            rope=RopeTable(shape.head_dim, config.rope_theta, config.max_model_len, self._device),
        )

    def _table(self, embedding: Weight) -> Weight:
        if isinstance(embedding, QuantizedMatrix):
            return embedding
        return embedding.to(self._device, self._dtype)

    def _layer(self, index: int) -> LayerWeights:
        shape, prefix = self._shape, f"model.layers.{index}"
        hidden, inner = shape.hidden_size, shape.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [
            self._matrix(f"{attention}.q_proj", shape.q_size, hidden),
            self._matrix(f"{attention}.k_proj", shape.kv_size, hidden),
            self._matrix(f"{attention}.v_proj", shape.kv_size, hidden),
        ]
        gate, up = of_one_kind(
            [
                self._matrix(f"{mlp}.gate_proj", inner, hidden),
                self._matrix(f"{mlp}.up_proj", inner, hidden),
            ]
        )
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=concatenate(qkv),
            attention_out=self._matrix(f"{attention}.o_proj", hidden, shape.q_size),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate=gate,
            up=up,
            down=self._matrix(f"{mlp}.down_proj", hidden, inner),
        )

    def _matrix(self, name: str, num_out: int, num_in: int) -> Weight:
        return self._checkpoint.matrix(f"{name}.weight", (num_out, num_in))

    def _norm(self, name: str) -> Tensor:
        return self._checkpoint.read(f"{name}.weight", (self._config.hidden_size,))
