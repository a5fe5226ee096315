"""A decoder's layers in plain torch: on GPUs, and what the C++ must equal.

Activations take the type of the weights for each product, and are float32 otherwise. Quantised
weights are expanded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.decoder import DecoderShape, Elsewhere, LayerWeights, StepKv
from kernels.interface import Kernels
from kernels.partial import AttentionPartial
from kernels.quantized import Weight, concatenate


class TorchDecoderBuilder:
    def __init__(
        self, kernels: Kernels, shape: DecoderShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._layers: list[_Layer] = []

    def add_layer(self, weights: LayerWeights) -> None:
        layer = _Layer(
            self._shape,
            norms=(self._norm(weights.attention_norm), self._norm(weights.mlp_norm)),
            qkv=self._matrix(weights.qkv),
            attention_out=self._matrix(weights.attention_out),
            gate_up=self._matrix(concatenate((weights.gate, weights.up))),
            down=self._matrix(weights.down),
        )
        self._layers.append(layer)

    def build(self, norm: Tensor, head: Weight) -> "TorchDecoder":
        return TorchDecoder(
            self._kernels, self._shape, self._layers, (self._norm(norm), self._matrix(head))
        )

    def _norm(self, weight: Tensor) -> Tensor:
        return weight.to(self._device)

    def _matrix(self, weight: Weight) -> Tensor:
        return weight.float().to(self._device, self._dtype)


class TorchDecoder:
    def __init__(
        self,
        kernels: Kernels,
        shape: DecoderShape,
        layers: list["_Layer"],
        head: tuple[Tensor, Tensor],
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._layers = layers
        self._norm, self._head = head

    @property
    def weight_bytes(self) -> int:
        return self._head.nbytes + sum(layer.weight_bytes for layer in self._layers)

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: StepKv, elsewhere: Elsewhere | None
    ) -> None:
        heads = (len(hidden), self._shape.num_heads, self._shape.head_dim)
        partial = AttentionPartial.allocate(*heads, hidden.device)
        attended = hidden.new_empty(len(hidden), self._shape.q_size)
        scale = self._shape.head_dim**-0.5
        for index, layer in enumerate(self._layers):
            q, k, v = layer.before_attention(hidden, cos, sin)
            self._kernels.write_kv(kv.pool, index, k, v, kv.slots)
            query = q * scale
            if elsewhere is not None:
                elsewhere.ask(index, query)
            self._kernels.micro_attention(query, kv.pool, index, kv.rows, partial)
            if elsewhere is not None:
                elsewhere.merge_into(index, partial)
            self._kernels.finalize(partial, attended)
            layer.after_attention(hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        return _multiply(_normalize(hidden, self._norm, self._shape.rms_norm_eps), self._head)

    def likeliest(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()


class _Layer:
    def __init__(
        self,
        shape: DecoderShape,
        norms: tuple[Tensor, Tensor],
        qkv: Tensor,
        attention_out: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> None:
        self._shape = shape
        self._attention_norm, self._mlp_norm = norms
        self._qkv = qkv
        self._attention_out = attention_out
        self._gate_up = gate_up
        self._down = down

    @property
    def weight_bytes(self) -> int:
        matrices = (self._qkv, self._attention_out, self._gate_up, self._down)
        return sum(matrix.nbytes for matrix in matrices)

    def before_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, num_heads, head_dim] and k, v [rows, num_kv_heads, head_dim], q and k roped."""
        shape = self._shape
        normed = _normalize(hidden, self._attention_norm, shape.rms_norm_eps)
        heads = _multiply(normed, self._qkv).view(len(hidden), -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous()

    def after_attention(self, hidden: Tensor, attended: Tensor) -> None:
        """Adds the projection of attended [rows, num_heads * head_dim], then the MLP, to hidden."""
        hidden += _multiply(attended, self._attention_out)
        normed = _normalize(hidden, self._mlp_norm, self._shape.rms_norm_eps)
        gate, up = _multiply(normed, self._gate_up).chunk(2, -1)
        hidden += _multiply(functional.silu(gate).mul_(up), self._down)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.to(weight.dtype), weight).float()


def _normalize(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [rows, any, head_dim], the halves of each rotated against each other."""
    first, second = heads.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
