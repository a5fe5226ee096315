"""The interface of what surrounds the attention in a decoder of the Llama family.

The models' loader hands weights over, one layer at a time; the model calls what it gets for them.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; float32, contiguous, on the CPU; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    """Of queries, keys and values, one after the other."""
    attention_out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class DecoderLayer(Protocol):
    """Activations are float32 and contiguous. Results are overwritten by the next layer's."""

    def before_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [rows, hidden_size]; cos, sin [rows, head_dim / 2] of the rows' positions.

        Returns q [rows, num_heads, head_dim] and k, v [rows, num_kv_heads, head_dim], q and k
        roped.
        """
        ...

    def after_attention(self, hidden: Tensor, attended: Tensor) -> None:
        """Adds the projection of attended [rows, num_heads * head_dim], then the MLP, to hidden."""
        ...


class DecoderHead(Protocol):
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] float32 of hidden [rows, hidden_size]; overwritten by the next."""
        ...


class DecoderKernels(Protocol):
    def layer(self, weights: LayerWeights) -> DecoderLayer:
        """Lays the weights out as they are read; the originals are not needed any more."""
        ...

    def head(self, norm: Tensor, weight: Tensor) -> DecoderHead:
        """The final norm, and the product with weight [vocab_size, hidden_size]."""
        ...
