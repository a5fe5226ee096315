"""Runs a model as the engine does: all sequences packed into one step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import PagedRows, StepKv
from services.worker.models.llama import LlamaFamilyModel, PackedTokens

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 4


class PackedRun:
    """Feeds tokens of several sequences step by step, remembering how far each one is."""

    def __init__(self, model: LlamaFamilyModel, num_sequences: int) -> None:
        self._model = model
        config = model.config
        self._pool = torch.zeros(
            num_sequences * BLOCKS_PER_SEQUENCE,
            config.num_layers,
            2,
            config.num_kv_heads,
            BLOCK_SIZE,
            config.head_dim,
        )
        self._lengths = [0] * num_sequences

    def step(
        self, tokens: Sequence[Sequence[int]], *, all_rows: bool = False, logits: bool = True
    ) -> Tensor:
        """Logits of each sequence's last token, or of every token, or of none."""
        counts = [len(part) for part in tokens]
        starts = list(self._lengths)
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        ends = torch.tensor(counts).cumsum(0)
        packed = PackedTokens(
            token_ids=torch.tensor([token for part in tokens for token in part]),
            positions=torch.cat(positions),
            logits_rows=(torch.arange(int(ends[-1])) if all_rows else ends - 1)[
                : None if logits else 0
            ],
        )
        return self._model.forward(packed, self._kv(counts, positions)).clone()

    def _kv(self, counts: list[int], positions: list[Tensor]) -> StepKv:
        """Each sequence has its blocks in a row, in the order of their ids."""
        per_sequence = BLOCKS_PER_SEQUENCE
        first_slots = range(0, len(counts) * per_sequence * BLOCK_SIZE, per_sequence * BLOCK_SIZE)
        slots = torch.cat([at + first for at, first in zip(positions, first_slots, strict=True)])
        tables = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(len(counts))]
        rows = PagedRows.build(
            counts, tables, self._lengths,
            causal=True, num_blocks=len(self._pool), block_size=BLOCK_SIZE,
        )  # fmt: skip
        return StepKv(self._pool, slots, rows)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        generated: list[list[int]] = [[] for _ in prompts]
        step: Sequence[Sequence[int]] = prompts
        for _ in range(num_tokens):
            newest = self.step(step).argmax(-1).tolist()
            for output, token in zip(generated, newest, strict=True):
                output.append(token)
            step = [[token] for token in newest]
        return generated
