"""The forward of the Llama family over packed tokens, called by the engine's runner once a step.

Tokens of all sequences lie in one dimension; which belong together is the business of the Attention
that the runner gives. Activations are float32 whatever the weights are.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.models.config import ModelConfig
from services.worker.models.linear import Linear
from services.worker.models.rope import RopeTable, rotate


class Attention(Protocol):
    """Writes K and V, attends locally and remotely, merges."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim] and k, v [T, num_kv_heads, head_dim], all contiguous.

        q and k are roped, q is not scaled. Returns [T, num_heads * head_dim]. All float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    lm_head: Linear
    rope: RopeTable


class LlamaFamilyModel:
    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_rows: Tensor
    ) -> Tensor:
        """token_ids, positions int64 [T]; logits_rows int64 [R]; logits [R, vocab_size] float32."""
        hidden = self._weights.embedding[token_ids].float()
        cos, signed_sin = self._weights.rope.at(positions)
        for index, layer in enumerate(self._weights.layers):
            q, k, v = self._qkv(layer, hidden, cos, signed_sin)
            hidden += layer.attention_out(attention(index, q, k, v))
            hidden += self._mlp(layer, hidden)
        if logits_rows.numel() == 0:
            return hidden.new_empty(0, self.config.vocab_size)
        return self._weights.lm_head(self._norm(hidden[logits_rows], self._weights.final_norm))

    def _qkv(
        self, layer: LlamaLayer, hidden: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        num_rotary = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        heads = qkv.view(len(hidden), num_rotary + config.num_kv_heads, config.head_dim)
        roped = rotate(heads[:, :num_rotary], cos, signed_sin)
        q, k = roped[:, : config.num_heads], roped[:, config.num_heads :]
        return q.contiguous(), k.contiguous(), heads[:, num_rotary:].contiguous()

    def _mlp(self, layer: LlamaLayer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return layer.down(functional.silu(gate).mul_(up))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)
