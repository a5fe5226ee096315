"""A decoder's layers for CPUs: C++ over packed weights, on the threads of the attention kernels."""

from ctypes import byref

import torch
from torch import Tensor

from kernels.decoder import DecoderShape, LayerWeights
from kernels.native.kernels import NativeKernels
from kernels.native.library import FORMATS, Layer, Matrix
from kernels.native.memory import Arena
from kernels.partial import check_tensor

#: What the sizes of a decoder have to be a multiple of: the widest vector.
MULTIPLE = 16


def supports(shape: DecoderShape) -> bool:
    sizes = (shape.hidden_size, shape.intermediate_size, shape.q_size)
    return all(size % MULTIPLE == 0 for size in sizes) and shape.head_dim % 2 == 0


class NativeDecoder:
    def __init__(self, kernels: NativeKernels, shape: DecoderShape, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._shape = shape
        self._format = kernels.library.fastest_format(FORMATS[dtype])
        self._arena = Arena()
        self._heads = _Heads(shape)

    def layer(self, weights: LayerWeights) -> "NativeLayer":
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
        return NativeLayer(self._kernels, layer, (self._arena, norms), self._heads)

    def head(self, norm: Tensor, weight: Tensor) -> "NativeHead":
        return NativeHead(
            self._kernels, norm.clone(), self._pack(weight), self._arena, self._shape.rms_norm_eps
        )

    def _pack(self, weight: Tensor, second: Tensor | None = None) -> Matrix:
        check_tensor("weight", weight, torch.float32)
        if second is not None:
            check_tensor("second", second, torch.float32, weight.shape)
        num_out = weight.shape[0] * (1 if second is None else 2)
        matrix = Matrix(None, num_out, weight.shape[1], self._format)
        matrix.data = self._arena.take(self._kernels.library.matrix_bytes(byref(matrix)))
        self._kernels.library.pack(
            self._kernels.threads,
            byref(matrix),
            weight.data_ptr(),
            None if second is None else second.data_ptr(),
        )
        return matrix


class _Heads:
    """q, k and v of whichever layer is being computed."""

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape
        self._tensors = self._of(0)

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        if len(self._tensors[0]) != num_rows:
            self._tensors = self._of(num_rows)
        return self._tensors

    def _of(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        q = torch.empty(num_rows, shape.num_heads, shape.head_dim)
        k, v = (torch.empty(num_rows, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        return q, k, v


class NativeLayer:
    def __init__(self, kernels: NativeKernels, layer: Layer, memory: object, heads: _Heads) -> None:
        """`memory` is what the layer points into."""
        self._kernels = kernels
        self._layer = layer
        self._memory = memory
        self._heads = heads
        self._hidden_size = layer.qkv.num_in
        self._half_dim = layer.head_dim // 2
        self._q_size = layer.attention_out.num_in

    def before_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = len(hidden)
        check_tensor("hidden", hidden, torch.float32, torch.Size((num_rows, self._hidden_size)))
        angles = torch.Size((num_rows, self._half_dim))
        check_tensor("cos", cos, torch.float32, angles)
        check_tensor("sin", sin, torch.float32, angles)
        q, k, v = self._heads.rows(num_rows)
        self._kernels.library.before_attention(
            self._kernels.threads,
            byref(self._layer),
            hidden.data_ptr(),
            num_rows,
            cos.data_ptr(),
            sin.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
        )
        return q, k, v

    def after_attention(self, hidden: Tensor, attended: Tensor) -> None:
        num_rows = len(hidden)
        check_tensor("hidden", hidden, torch.float32, torch.Size((num_rows, self._hidden_size)))
        check_tensor("attended", attended, torch.float32, torch.Size((num_rows, self._q_size)))
        self._kernels.library.after_attention(
            self._kernels.threads,
            byref(self._layer),
            hidden.data_ptr(),
            num_rows,
            attended.data_ptr(),
        )


class NativeHead:
    def __init__(
        self, kernels: NativeKernels, norm: Tensor, matrix: Matrix, memory: object, eps: float
    ) -> None:
        self._kernels = kernels
        self._norm = norm
        self._matrix = matrix
        self._memory = memory
        self._eps = eps
        self._logits = torch.empty(0, matrix.num_out)

    def logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        size = torch.Size((num_rows, self._matrix.num_in))
        check_tensor("hidden", hidden, torch.float32, size)
        # Fresh memory for this much costs as much as filling it.
        if len(self._logits) < num_rows:
            self._logits = torch.empty(num_rows, self._matrix.num_out)
        self._kernels.library.compute_logits(
            self._kernels.threads,
            self._norm.data_ptr(),
            self._eps,
            byref(self._matrix),
            hidden.data_ptr(),
            num_rows,
            self._logits.data_ptr(),
        )
        return self._logits[:num_rows]
