"""Matrices in blocks of few bits, as GGUF has them: what a decoder may keep as it is.

The models' loader reads them; a decoder's builder lays them out, and the model takes single rows of
an embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

BLOCK_SIZE = 32
"""Inputs that share a scale."""

BlockKind = Literal["Q4_1", "Q8_0"]

#: A float16 scale, for Q4_1 also the least number, and 32 numbers.
BLOCK_BYTES: dict[BlockKind, int] = {"Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """[out, in] numbers."""

    blocks: Tensor
    """uint8 [out, in / 32 * bytes of a block], contiguous."""
    kind: BlockKind

    def __post_init__(self) -> None:
        if self.kind not in BLOCK_BYTES:
            raise ValueError(f"blocks of kind {self.kind!r} are unknown")
        row_bytes = self.blocks.shape[-1]
        if self.blocks.dtype != torch.uint8 or row_bytes % BLOCK_BYTES[self.kind]:
            raise ValueError(f"rows of {row_bytes} {self.blocks.dtype} are no {self.kind} blocks")

    @property
    def shape(self) -> torch.Size:
        num_out, row_bytes = self.blocks.shape
        return torch.Size((num_out, row_bytes // BLOCK_BYTES[self.kind] * BLOCK_SIZE))

    def __getitem__(self, rows: Tensor) -> Self:
        return type(self)(self.blocks[rows], self.kind)

    def float(self) -> Tensor:
        """The numbers in float32, exactly."""
        blocks = self.blocks.view(len(self.blocks), -1, BLOCK_BYTES[self.kind])
        scales = _halves(blocks[..., :2])
        if self.kind == "Q8_0":
            numbers = blocks[..., 2:].view(torch.int8) * scales
        else:
            pairs = blocks[..., 4:]
            numbers = torch.cat((pairs & 15, pairs >> 4), -1) * scales + _halves(blocks[..., 2:4])
        return numbers.view(self.shape)

    def data_ptr(self) -> int:
        return self.blocks.data_ptr()


Weight = Tensor | QuantizedMatrix


def of_one_kind(parts: Sequence[Weight]) -> Sequence[Weight]:
    """The parts as they are, or all in float32 where they differ in kind."""
    kinds = {part.kind if isinstance(part, QuantizedMatrix) else None for part in parts}
    return parts if len(kinds) == 1 else [part.float() for part in parts]


def concatenate(parts: Sequence[Weight]) -> Weight:
    """One below the other; in float32 where they differ in kind."""
    alike = of_one_kind(parts)
    quantized = [part for part in alike if isinstance(part, QuantizedMatrix)]
    if quantized:
        return QuantizedMatrix(torch.cat([part.blocks for part in quantized]), quantized[0].kind)
    return torch.cat([part.float() for part in alike])


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).float()
