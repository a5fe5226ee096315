"""Runs a model as the engine does: all sequences packed into one step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.models.llama import LlamaFamilyModel
from tests.unit.worker.models.dense_attention import DenseAttention


class PackedRun:
    """Feeds tokens of several sequences step by step, remembering how far each one is."""

    def __init__(self, model: LlamaFamilyModel, num_sequences: int) -> None:
        self._model = model
        self._attention = DenseAttention(num_sequences)
        self._lengths = [0] * num_sequences

    def step(self, tokens: Sequence[Sequence[int]], *, all_rows: bool = False) -> Tensor:
        """Logits of each sequence's last token, or of every token."""
        counts = [len(part) for part in tokens]
        starts = list(self._lengths)
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._attention.row_counts = counts
        ends = torch.tensor(counts).cumsum(0)
        logits = self._model.forward(
            torch.tensor([token for part in tokens for token in part]),
            torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]),
            self._attention,
            torch.arange(int(ends[-1])) if all_rows else ends - 1,
        )
        return logits.clone()

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        generated: list[list[int]] = [[] for _ in prompts]
        step: Sequence[Sequence[int]] = prompts
        for _ in range(num_tokens):
            newest = self.step(step).argmax(-1).tolist()
            for output, token in zip(generated, newest, strict=True):
                output.append(token)
            step = [[token] for token in newest]
        return generated
