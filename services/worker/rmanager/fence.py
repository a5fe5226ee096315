"""Refuses the plans of a gManager that leads no more. Pure.

Every gManager that comes to lead has a higher term than all before it. The rManager keeps the
highest it has heard of, in an order or in the answer to a heartbeat; one per process.
"""

from services.common.ids import Term


class Fence:
    def __init__(self) -> None:
        self.highest_term = Term(0)

    def admits(self, term: Term) -> bool:
        """Whether whoever acts in this term may still lead, as far as we have heard."""
        if term < self.highest_term:
            return False
        self.highest_term = term
        return True
