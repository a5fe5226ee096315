"""Attention and decoder kernels: tensors in, tensors out; they know no service."""

from kernels.decoder import DecoderShape, LayerWeights
from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from kernels.select import select, select_decoder

__all__ = [
    "AttentionPartial",
    "DecoderShape",
    "Kernels",
    "LayerWeights",
    "PagedRows",
    "select",
    "select_decoder",
]
