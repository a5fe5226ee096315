"""A decoder's layers in plain torch: on GPUs, and what the C++ must equal.

Activations take the type of the weights for each product, and are float32 otherwise.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.decoder import DecoderShape, LayerWeights


class TorchDecoder:
    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device

    def layer(self, weights: LayerWeights) -> "TorchLayer":
        return TorchLayer(
            self._shape,
            norms=(self._norm(weights.attention_norm), self._norm(weights.mlp_norm)),
            qkv=self._matrix(weights.qkv),
            attention_out=self._matrix(weights.attention_out),
            gate_up=self._matrix(torch.cat((weights.gate, weights.up))),
            down=self._matrix(weights.down),
        )

    def head(self, norm: Tensor, weight: Tensor) -> "TorchHead":
        return TorchHead(self._norm(norm), self._matrix(weight), self._shape.rms_norm_eps)

    def _norm(self, weight: Tensor) -> Tensor:
        return weight.to(self._device)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, self._dtype)


class TorchLayer:
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

    def before_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        normed = _normalize(hidden, self._attention_norm, shape.rms_norm_eps)
        heads = _multiply(normed, self._qkv).view(len(hidden), -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous()

    def after_attention(self, hidden: Tensor, attended: Tensor) -> None:
        hidden += _multiply(attended, self._attention_out)
        normed = _normalize(hidden, self._mlp_norm, self._shape.rms_norm_eps)
        gate, up = _multiply(normed, self._gate_up).chunk(2, -1)
        hidden += _multiply(functional.silu(gate).mul_(up), self._down)


class TorchHead:
    def __init__(self, norm: Tensor, weight: Tensor, eps: float) -> None:
        self._norm = norm
        self._weight = weight
        self._eps = eps

    def logits(self, hidden: Tensor) -> Tensor:
        return _multiply(_normalize(hidden, self._norm, self._eps), self._weight)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.to(weight.dtype), weight).float()


def _normalize(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [rows, any, head_dim], the halves of each rotated against each other."""
    first, second = heads.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
