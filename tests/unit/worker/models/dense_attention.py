"""The plainest Attention: keys and values of each sequence in one growing tensor."""

import torch
from torch import Tensor
from torch.nn import functional


class DenseAttention:
    """Causal attention over packed sequences, whose rows come in the order of `row_counts`."""

    def __init__(self, num_sequences: int) -> None:
        self.row_counts = [0] * num_sequences
        self._keys: dict[tuple[int, int], Tensor] = {}
        self._values: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(torch.split(tensor, self.row_counts) for tensor in (q, k, v)), strict=True)
        rows = [self._attend(layer, sequence, *part) for sequence, part in enumerate(parts)]
        return torch.cat(rows).flatten(1)

    def _attend(self, layer: int, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = self._grow(self._keys, (layer, sequence), k)
        values = self._grow(self._values, (layer, sequence), v)
        mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        group = q.shape[1] // k.shape[1]
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(group, 0),
            values.transpose(0, 1).repeat_interleave(group, 0),
            attn_mask=mask,
        )
        return attended.transpose(0, 1)

    @staticmethod
    def _grow(store: dict[tuple[int, int], Tensor], at: tuple[int, int], rows: Tensor) -> Tensor:
        store[at] = torch.cat((store[at], rows)) if at in store else rows.clone()
        return store[at]
