"""Parts on sockets as the C++ library takes them, and what it says of them."""

import ctypes
import os

import numpy as np
import torch

from kernels.native import library
from kernels.partial import check_tensor
from kernels.wire import Exchanged, LayerHeads, WiredPart

_CLOSED, _OTHER_HEAD = -1, -2


class NativePart:
    """One part during one call; keeps the memory that the library reads and writes."""

    def __init__(self, part: WiredPart, num_layers: int) -> None:
        num_rows, num_heads, head_dim = part.query.shape
        check_tensor("query", part.query, torch.float32)
        size = torch.Size((num_rows * num_heads * (head_dim + 2),))
        check_tensor("partial", part.partial, torch.float32, size)
        head_bytes = part.sent_heads.shape[1]
        for heads in (part.sent_heads, part.awaited_heads):
            _check_heads(heads, (num_layers, head_bytes))
        self._part = part
        self._head = ctypes.create_string_buffer(head_bytes)
        wire = library.Wire(
            part.socket,
            head_bytes,
            part.sent_heads.ctypes.data,
            part.awaited_heads.ctypes.data,
            ctypes.addressof(self._head),
            part.timeout_s,
        )
        row_ids = None if part.row_ids is None else part.row_ids.data_ptr()
        self.view = library.WiredPart(
            wire, row_ids, num_rows, part.query.data_ptr(), part.partial.data_ptr()
        )

    def check_rows(self, num_rows: int) -> None:
        """Raises ValueError where the part is not one of a step of so many rows."""
        row_ids = self._part.row_ids
        if row_ids is None:
            raise ValueError("a part without row_ids")
        check_tensor("row_ids", row_ids, torch.int64, self._part.query.shape[:1])
        if not 0 <= int(row_ids.min()) <= int(row_ids.max()) < num_rows:
            raise ValueError(f"row_ids must lie in 0..{num_rows - 1}")

    def exchanged(self, view: library.WiredPart) -> Exchanged:
        """`view`: of this part, after the call."""
        wire = view.wire
        counts = (wire.num_sent, wire.num_received, wire.waited_s)
        if wire.status == _OTHER_HEAD:
            return Exchanged(*counts, head=self._head.raw)
        if wire.status == _CLOSED:
            return Exchanged(*counts, ConnectionResetError("the connection was closed"))
        if wire.status > 0:
            return Exchanged(*counts, OSError(wire.status, os.strerror(wire.status)))
        return Exchanged(*counts)


def _check_heads(heads: LayerHeads, shape: tuple[int, int]) -> None:
    if heads.shape != shape or heads.dtype != np.uint8 or not heads.flags.c_contiguous:
        raise ValueError(f"heads must be contiguous bytes {shape}, not {heads.dtype} {heads.shape}")
