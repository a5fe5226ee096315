"""Attention kernels: tensors in, tensors out; they know no service."""

from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from kernels.select import select

__all__ = ["AttentionPartial", "Kernels", "PagedRows", "select"]
