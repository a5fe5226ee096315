"""How fast planned moves go: so many tokens a step of the engine that decoding does not slow.

Pure; used by the mover (paper section 6: movement is overlapped with decoding).
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Pace:
    """After every `steps_per_piece` steps, `blocks_per_piece` blocks."""

    blocks_per_piece: int
    steps_per_piece: int

    @classmethod
    def of(cls, tokens_per_step: int, block_size: int) -> Self:
        """The fastest that is no faster than `tokens_per_step`."""
        return cls(
            blocks_per_piece=max(1, tokens_per_step // block_size),
            steps_per_piece=max(1, -(-block_size // tokens_per_step)),
        )
