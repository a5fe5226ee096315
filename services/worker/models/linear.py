"""The matrix products of a model, each by what is fastest where it runs.

On a CPU, float32 weights are packed for oneDNN: a third faster than a plain product at the batches
of decoding (8 to 32 rows), a quarter slower at one row. Float16 weights multiply float32
activations in fbgemm: half the memory, and the fastest of all up to 32 rows.
"""

import logging
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

WeightDtype = Literal["float32", "float16"]

_logger = logging.getLogger(__name__)

#: The number of rows that oneDNN lays the packed weights out for.
_PACKED_ROWS = 32


class Linear(Protocol):
    """x [rows, in] float32 to [rows, out] float32, without bias."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """Activations take the type of the weights for the product."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self._weight.dtype), self._weight).float()


class OneDnnLinear:
    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return product


class Float16Linear:
    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def select_linear(dtype: WeightDtype, device: torch.device) -> Callable[[Tensor], Linear]:
    """How to make a Linear of a float32 [out, in] weight."""
    if device.type != "cpu":
        on_device = getattr(torch, dtype)
        return lambda weight: PlainLinear(weight.to(device, on_device))
    if dtype == "float16":
        if "fbgemm" in torch.backends.quantized.supported_engines:
            return Float16Linear
        _logger.warning("no float16 products on this CPU; the weights stay float32")
    return OneDnnLinear if torch._C._has_mkldnn else PlainLinear
