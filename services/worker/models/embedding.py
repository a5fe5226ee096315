"""The vectors of tokens, from a table in the type of the weights."""

import torch
from torch import Tensor

from kernels import QuantizedMatrix, Weight


class Embedding:
    """Tables of numbers are read without new memory; of blocks, rows are expanded."""

    def __init__(self, table: Weight) -> None:
        self._table = table
        numbers = table.blocks if isinstance(table, QuantizedMatrix) else table
        self.device = numbers.device
        self._picked = torch.empty(0)

    def read(self, token_ids: Tensor, out: Tensor) -> None:
        """out [tokens, hidden_size] float32"""
        if isinstance(self._table, QuantizedMatrix):
            out.copy_(self._table[token_ids].float())
        elif self._table.dtype == out.dtype:
            torch.index_select(self._table, 0, token_ids, out=out)
        else:
            if len(token_ids) > len(self._picked):
                self._picked = torch.empty_like(out, dtype=self._table.dtype)
            picked = self._picked[: len(token_ids)]
            torch.index_select(self._table, 0, token_ids, out=picked)
            out.copy_(picked)
