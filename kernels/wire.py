"""A part of a step's contexts that another process holds, and the socket on which it is asked.

The C++ kernels exchange the queries and partials of all layers by themselves: per layer, a step
through Python costs more than the message. What the heads of the messages say is the caller's.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.partial import PagedRows

#: [num_layers, bytes of a head]
LayerHeads = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WiredPart:
    """One end of it. Only the end that owns the rows has `row_ids`."""

    socket: int
    """Connected, blocking, with timeouts of its own."""
    timeout_s: float
    sent_heads: LayerHeads
    awaited_heads: LayerHeads
    query: Tensor
    """Room for float32 [rows, num_heads, head_dim]."""
    partial: Tensor
    """Room for acc, max and sum of these rows, one after another; float32."""
    row_ids: Tensor | None = None
    """int64 [rows]: which rows of the step they are."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came of a part. With neither `error` nor `head`, nothing went wrong at this end."""

    num_sent: int
    num_received: int
    waited_s: float
    error: OSError | None = None
    head: bytes = b""
    """Of a message that came instead of the awaited one; its payload was not read."""

    @property
    def has_failed(self) -> bool:
        return self.error is not None or bool(self.head)


class WiredKernels(Protocol):
    """Kernels that can be the other end."""

    def answer_layers(
        self, part: WiredPart, pool: Tensor, rows: PagedRows, first: int, patience_s: float
    ) -> Exchanged:
        """Answer the queries of layer `first` and those that follow, until the last layer or until
        none came for `patience_s`; the next one has then still to be read."""
        ...
