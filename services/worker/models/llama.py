"""The forward of the Llama family over packed tokens, called by the engine's runner once a step.

Tokens of all sequences lie in one dimension; which belong together is the business of the Attention
that the runner gives. Activations are float32 whatever the weights are.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.decoder import DecoderHead, DecoderLayer
from services.worker.models.config import ModelConfig
from services.worker.models.rope import RopeTable


class Attention(Protocol):
    """Writes K and V, attends locally and remotely, merges."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim] and k, v [T, num_kv_heads, head_dim], all contiguous.

        q and k are roped, q is not scaled; the next layer's overwrite them.
        Returns [T, num_heads * head_dim]. All float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class LlamaParts:
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    head: DecoderHead
    rope: RopeTable


class LlamaFamilyModel:
    def __init__(self, config: ModelConfig, parts: LlamaParts) -> None:
        self.config = config
        self._parts = parts

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_rows: Tensor
    ) -> Tensor:
        """token_ids, positions int64 [T]; logits_rows int64 [R]; logits [R, vocab_size] float32.

        The next forward overwrites the logits.
        """
        hidden = self._parts.embedding[token_ids].float()
        cos, sin = self._parts.rope.at(positions)
        for index, layer in enumerate(self._parts.layers):
            q, k, v = layer.before_attention(hidden, cos, sin)
            layer.after_attention(hidden, attention(index, q, k, v))
        if logits_rows.numel() == 0:
            return hidden.new_empty(0, self.config.vocab_size)
        return self._parts.head.logits(hidden[logits_rows])
