"""The interface of a decoder of the Llama family: all of its layers, and the head.

The models' loader hands weights over, one layer at a time; the model calls what it gets for them.
DistAttention happens in here: per layer, queries go to whoever holds other parts, the part that
lies here is attended to meanwhile, and then the others' partials are merged (paper section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.partial import AttentionPartial, PagedRows
from kernels.quantized import Weight
from kernels.wire import Exchanged, WiredPart


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
    """Of one layer; float32 or in blocks, contiguous, on the CPU; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Weight
    """Of queries, keys and values, one after the other."""
    attention_out: Weight
    mlp_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class StepKv:
    """Where the rows of one step write their K and V, and what of this pool they attend to."""

    pool: Tensor
    """As `interface` has it."""
    slots: Tensor
    """int64 [rows]"""
    rows: PagedRows


class Elsewhere(Protocol):
    """The parts of a step's contexts that lie outside its pool. A decoder that can asks the wired
    ones by itself and calls `finish`; else it calls the other two in every layer."""

    def wired(self) -> Sequence[WiredPart] | None:
        """All parts; None where one cannot be asked over a plain socket."""
        ...

    def finish(self, exchanged: Sequence[Exchanged]) -> None:
        """What came of them, in the same order; raises where one was lost."""
        ...

    def ask(self, layer: int, query: Tensor) -> None:
        """Send what others need of query [rows, num_heads, head_dim], roped and scaled."""
        ...

    def merge_into(self, layer: int, partial: AttentionPartial) -> None:
        """Add what they answered to the partial of all rows."""
        ...


class Decoder(Protocol):
    """Activations are float32 and contiguous. Raises ValueError where sizes do not fit together."""

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the matrices, those of the layers and the head."""
        ...

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: StepKv, elsewhere: Elsewhere | None
    ) -> None:
        """All layers, in place: hidden [rows, hidden_size]; cos, sin [rows, head_dim / 2]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] float32 of hidden [rows, hidden_size]; overwritten by the next."""
        ...

    def likeliest(self, logits: Tensor) -> list[int]:
        """The token of the greatest logit of each row of `logits`, the first of equals."""
        ...


class DecoderBuilder(Protocol):
    def add_layer(self, weights: LayerWeights) -> None:
        """Lays the weights out as they are read; the originals are not needed any more."""
        ...

    def build(self, norm: Tensor, head: Weight) -> Decoder:
        """Of the layers so far, the final norm, and the product with head [vocab, hidden_size]."""
        ...
