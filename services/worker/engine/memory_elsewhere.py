"""What the memory of other instances means to this one now. Made by `assembly` for every step."""

from typing import NamedTuple

from services.worker.rank import Rank


class MemoryElsewhere(NamedTuple):
    free_blocks: int = 0
    """That creditors could still lend, as last heard."""
    most_blocks: int = 0
    """That they could lend at best, if everybody there gave way."""
    recallable_blocks: int = 0
    """That this instance lends and could ask back."""
    oldest_guest: Rank | None = None
    """The highest in rank of those to whom it lends."""
