"""What the creditor's side asks of the owner of the instance's blocks (`kvcache.lender`).

Called by the connection threads, many at once.
"""

from typing import Protocol

from services.common.ids import Incarnation, InstId, MoveId
from services.worker.kvcache.lending import LentPart


class Lender(Protocol):
    def begin_receive(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_id: MoveId,
        index: int,
    ) -> int:
        """The block that the copy goes into, pinned. Raises PartLost."""
        ...

    def end_receive(self, move_id: MoveId, index: int, ok: bool) -> None: ...

    def open_part(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_ids: tuple[MoveId, ...],
    ) -> LentPart:
        """Looks the part up. Raises PartLost."""
        ...

    def begin_use(self, part: LentPart) -> None:
        """Pins the part and renews its lease. Raises PartLost."""
        ...

    def end_use(self, part: LentPart) -> None: ...
