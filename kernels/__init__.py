"""Attention and decoder kernels: tensors in, tensors out; they know no service."""

from kernels.decoder import DecoderShape, Elsewhere, LayerWeights, StepKv
from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from kernels.quantized import QuantizedMatrix, Weight
from kernels.select import select, select_decoder, select_wired
from kernels.wire import Exchanged, WiredKernels, WiredPart

__all__ = [
    "AttentionPartial",
    "DecoderShape",
    "Elsewhere",
    "Exchanged",
    "Kernels",
    "LayerWeights",
    "PagedRows",
    "QuantizedMatrix",
    "StepKv",
    "Weight",
    "WiredKernels",
    "WiredPart",
    "select",
    "select_decoder",
    "select_wired",
]
