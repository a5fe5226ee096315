"""Tensors as bytes, and the memory that a connection allocates once.

Sockets read straight into these and write straight from them; nothing is copied in between.
"""

import torch

from kernels.partial import AttentionPartial
from services.worker.distattention.wire import FLOAT32_BYTES, Geometry, KvDtype

_KV_DTYPES = {
    torch.float32: KvDtype.FLOAT32,
    torch.float16: KvDtype.FLOAT16,
    torch.bfloat16: KvDtype.BFLOAT16,
}


def geometry_of(pool: torch.Tensor, num_heads: int) -> Geometry:
    """`pool` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    kv_dtype = _KV_DTYPES[pool.dtype]
    return Geometry(num_layers, num_heads, num_kv_heads, head_dim, block_size, kv_dtype)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor is."""
    return tensor.view(torch.uint8).view(-1).numpy().data


class QueryBuffer:
    """Room for the queries of up to `max_rows` rows."""

    def __init__(self, geometry: Geometry, max_rows: int) -> None:
        self._rows = torch.empty((max_rows, geometry.num_heads, geometry.head_dim))
        self._bytes = tensor_bytes(self._rows)
        self._geometry = geometry

    def view(self, num_rows: int) -> tuple[torch.Tensor, memoryview]:
        return self._rows[:num_rows], self._bytes[: self._geometry.query_bytes(num_rows)]


class PartialBuffer:
    """Room for one partial of up to `max_rows` rows: acc, max and sum in one run of bytes."""

    def __init__(self, geometry: Geometry, max_rows: int) -> None:
        self._values = torch.empty(geometry.partial_bytes(max_rows) // FLOAT32_BYTES)
        self._bytes = tensor_bytes(self._values)
        self._geometry = geometry

    def view(self, num_rows: int) -> tuple[AttentionPartial, memoryview]:
        """Views of the same memory for any number of rows, laid out as the wire has it."""
        num_heads, head_dim = self._geometry.num_heads, self._geometry.head_dim
        num_states = num_rows * num_heads
        at_max = num_states * head_dim
        at_sum = at_max + num_states
        partial = AttentionPartial(
            acc=self._values[:at_max].view(num_rows, num_heads, head_dim),
            max=self._values[at_max:at_sum].view(num_rows, num_heads),
            sum=self._values[at_sum : at_sum + num_states].view(num_rows, num_heads),
        )
        return partial, self._bytes[: self._geometry.partial_bytes(num_rows)]

    def values(self, num_rows: int) -> torch.Tensor:
        """What `view` shows, in one run."""
        return self._values[: self._geometry.partial_bytes(num_rows) // FLOAT32_BYTES]
