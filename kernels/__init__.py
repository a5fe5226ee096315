"""Attention and decoder kernels: tensors in, tensors out; they know no service."""

from kernels.decoder import DecoderShape, Elsewhere, LayerWeights, StepKv
from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from kernels.select import select, select_decoder

__all__ = [
    "AttentionPartial",
    "DecoderShape",
    "Elsewhere",
    "Kernels",
    "LayerWeights",
    "PagedRows",
    "StepKv",
    "select",
    "select_decoder",
]
