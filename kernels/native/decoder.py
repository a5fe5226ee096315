"""A decoder's layers for CPUs: C++ over packed weights, on the threads of the attention kernels."""

from collections.abc import Sequence
from ctypes import Array, byref
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_attention
from kernels.decoder import DecoderShape, Elsewhere, LayerWeights, StepKv
from kernels.native.kernels import NativeKernels, raise_if, view_pool, view_rows
from kernels.native.library import BLOCK_FORMATS, FORMATS, Layer, Matrix, Step
from kernels.native.library import WiredPart as WiredPartView
from kernels.native.memory import Arena
from kernels.native.wires import NativePart
from kernels.partial import AttentionPartial, check_tensor
from kernels.quantized import QuantizedMatrix, Weight
from kernels.wire import Exchanged, WiredPart

#: What the sizes of a decoder have to be a multiple of: the widest vector.
MULTIPLE = 16


def supports(shape: DecoderShape) -> bool:
    sizes = (shape.hidden_size, shape.intermediate_size, shape.q_size)
    return all(size % MULTIPLE == 0 for size in sizes) and shape.head_dim % 2 == 0


@dataclass(frozen=True, slots=True)
class _Head:
    norm: Tensor
    matrix: Matrix


class NativeDecoderBuilder:
    def __init__(self, kernels: NativeKernels, shape: DecoderShape, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._shape = shape
        self._dtype = dtype
        self._arena = Arena()
        self._norms: list[Tensor] = []
        self._layers: list[Layer] = []

    def add_layer(self, weights: LayerWeights) -> None:
        shape = self._shape
        norms = weights.attention_norm.clone(), weights.mlp_norm.clone()
        layer = Layer(
            norms[0].data_ptr(),
            norms[1].data_ptr(),
            self._pack(weights.qkv),
            self._pack(weights.attention_out),
            self._pack(weights.gate, weights.up),
            self._pack(weights.down),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.rms_norm_eps,
        )
        self._norms += norms
        self._layers.append(layer)

    def build(self, norm: Tensor, head: Weight) -> "NativeDecoder":
        layers = (Layer * len(self._layers))(*self._layers)
        packed = _Head(norm.clone(), self._pack(head))
        memory = (self._arena, self._norms)
        return NativeDecoder(self._kernels, self._shape, layers, packed, memory)

    def _pack(self, weight: Weight, second: Weight | None = None) -> Matrix:
        _check_weight("weight", weight, like=weight)
        if second is not None:
            _check_weight("second", second, like=weight)
        library, (num_rows, num_in) = self._kernels.library, weight.shape
        num_out = num_rows * (1 if second is None else 2)
        matrix = Matrix(None, num_out, num_in, library.fastest_format(self._format_of(weight)))
        matrix.data = self._arena.take(library.matrix_bytes(byref(matrix)))
        library.pack(
            self._kernels.threads,
            byref(matrix),
            weight.data_ptr(),
            None if second is None else second.data_ptr(),
        )
        return matrix

    def _format_of(self, weight: Weight) -> int:
        if isinstance(weight, QuantizedMatrix):
            return BLOCK_FORMATS[weight.kind]
        return FORMATS[self._dtype]


def _check_weight(name: str, weight: Weight, like: Weight) -> None:
    if not isinstance(weight, QuantizedMatrix):
        check_tensor(name, weight, torch.float32, like.shape)
    elif isinstance(like, QuantizedMatrix) and like.kind == weight.kind:
        check_tensor(name, weight.blocks, torch.uint8, like.blocks.shape)
    else:
        raise ValueError(f"{name} must not be {weight.kind} beside another kind")


class NativeDecoder:
    """One step at a time: its buffers are used again."""

    def __init__(
        self,
        kernels: NativeKernels,
        shape: DecoderShape,
        layers: Array[Layer],
        head: _Head,
        memory: object,
    ) -> None:
        """`memory` is what the layers point into."""
        self._kernels = kernels
        self._shape = shape
        self._layers = layers
        self._head = head
        self._memory = memory
        self._room = _Room.allocate(shape, 0)
        self._logits = torch.empty(0, head.matrix.num_out)
        self.attention_s = 0.0
        """Seconds that attention over this pool took in all steps so far."""

    @property
    def weight_bytes(self) -> int:
        matrices = [self._head.matrix]
        for layer in self._layers:
            matrices += layer.qkv, layer.attention_out, layer.gate_up, layer.down
        return sum(self._kernels.library.matrix_bytes(byref(matrix)) for matrix in matrices)

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: StepKv, elsewhere: Elsewhere | None
    ) -> None:
        if len(hidden) > len(self._room.query):
            self._room = _Room.allocate(self._shape, len(hidden))
        room = self._room.first(len(hidden))
        step = self._step(hidden, cos, sin, kv, room)
        wired = () if elsewhere is None else elsewhere.wired()
        if elsewhere is None or wired is not None:
            exchanged = self._run_layers(step, wired or ())
            if elsewhere is not None:
                elsewhere.finish(exchanged)
        else:
            self._run_layer_by_layer(step, room, elsewhere)
        self.attention_s += step.attention_s

    def _run_layers(self, step: Step, wired: Sequence[WiredPart]) -> list[Exchanged]:
        parts = [NativePart(part, len(self._layers)) for part in wired]
        for part in parts:
            part.check_rows(step.num_rows)
        views = (WiredPartView * len(parts))(*(part.view for part in parts))
        self._kernels.library.run_layers(
            self._kernels.threads, self._layers, len(self._layers), byref(step), views, len(parts)
        )
        return [part.exchanged(view) for part, view in zip(parts, views, strict=True)]

    def _run_layer_by_layer(self, step: Step, room: "_Room", elsewhere: Elsewhere) -> None:
        functions, arguments = self._kernels.library, (self._kernels.threads, self._layers)
        for index in range(len(self._layers)):
            functions.begin_layer(*arguments, index, byref(step))
            elsewhere.ask(index, room.query)
            functions.attend(*arguments, index, byref(step))
            elsewhere.merge_into(index, room.partial)
            functions.end_layer(*arguments, index, byref(step))

    def _step(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: StepKv, room: "_Room") -> Step:
        num_rows, shape = len(hidden), self._shape
        check_tensor("hidden", hidden, torch.float32, torch.Size((num_rows, shape.hidden_size)))
        angles = torch.Size((num_rows, shape.head_dim // 2))
        check_tensor("cos", cos, torch.float32, angles)
        check_tensor("sin", sin, torch.float32, angles)
        check_tensor("slots", kv.slots, torch.int64, torch.Size((num_rows,)))
        check_attention(room.query, kv.pool, len(self._layers) - 1, kv.rows, room.partial)
        if kv.pool.shape[3] != shape.num_kv_heads:
            raise ValueError(f"a pool of {kv.pool.shape[3]} KV heads, not {shape.num_kv_heads}")
        step = Step(
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            room.query.data_ptr(),
            room.partial.acc.data_ptr(),
            room.partial.max.data_ptr(),
            room.partial.sum.data_ptr(),
            kv.slots.data_ptr(),
            view_rows(kv.rows),
            view_pool(kv.pool),
            num_rows,
        )
        raise_if(self._kernels.library.check_step(byref(step), kv.rows.block_ids.shape[0]))
        return step

    def logits(self, hidden: Tensor) -> Tensor:
        num_rows, matrix = len(hidden), self._head.matrix
        check_tensor("hidden", hidden, torch.float32, torch.Size((num_rows, matrix.num_in)))
        # Fresh memory for this much costs as much as filling it.
        if len(self._logits) < num_rows:
            self._logits = torch.empty(num_rows, matrix.num_out)
        self._kernels.library.compute_logits(
            self._kernels.threads,
            self._head.norm.data_ptr(),
            self._shape.rms_norm_eps,
            byref(matrix),
            hidden.data_ptr(),
            num_rows,
            self._logits.data_ptr(),
        )
        return self._logits[:num_rows]

    def likeliest(self, logits: Tensor) -> list[int]:
        num_rows, vocab_size = logits.shape
        check_tensor("logits", logits, torch.float32)
        found = torch.empty(num_rows, dtype=torch.int64)
        self._kernels.library.find_likeliest(
            self._kernels.threads, logits.data_ptr(), num_rows, vocab_size, found.data_ptr()
        )
        return found.tolist()


@dataclass(frozen=True, slots=True)
class _Room:
    """The queries of the layer at hand, and their partial."""

    query: Tensor
    partial: AttentionPartial

    @classmethod
    def allocate(cls, shape: DecoderShape, num_rows: int) -> "_Room":
        heads = (num_rows, shape.num_heads, shape.head_dim)
        return cls(torch.empty(heads), AttentionPartial.allocate(*heads))

    def first(self, num_rows: int) -> "_Room":
        partial = self.partial
        rows = (partial.acc[:num_rows], partial.max[:num_rows], partial.sum[:num_rows])
        return _Room(self.query[:num_rows], AttentionPartial(*rows))
