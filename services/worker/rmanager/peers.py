"""The other instances, as this rManager last heard of them. Pure.

Filled from heartbeat answers and from what peers say of themselves; read by the mover (who could
lend) and, on the engine's thread, by the scheduler (how much): every change replaces the whole
view. A view may be stale: the creditor has the last word.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.common.ids import Incarnation, InstId
from services.common.lendable import lendable_blocks
from services.worker.distattention.wire import Peer


@dataclass(frozen=True, slots=True)
class PeerView:
    """One other instance and the blocks it could lend, at the time of the view."""

    inst_id: InstId
    incarnation: Incarnation
    control_address: str
    data_address: str
    block_size: int
    block_bytes: int
    model: str
    num_blocks: int
    free_blocks: int
    is_draining: bool = False


class Unlisted(NamedTuple):
    """Who could lend, too, but of whom a large cluster's gManager tells no more than this."""

    num_peers: int
    num_blocks: int


NONE_UNLISTED = Unlisted(0, 0)


class Peers:
    """The last view. `keep_free`: blocks that every creditor keeps for itself."""

    def __init__(self, model: str, block_bytes: int, keep_free: int) -> None:
        self._model = model
        self._block_bytes = block_bytes
        self._keep_free = keep_free
        self._views: dict[InstId, PeerView] = {}
        self._most_blocks = 0

    def update(self, views: Iterable[PeerView], unlisted: Unlisted = NONE_UNLISTED) -> None:
        """Replace the view. Instances of another model or block format cannot lend to us."""
        self._views = {view.inst_id: view for view in views if self._can_lend(view)}
        total = sum(
            lendable_blocks(view.num_blocks, self._keep_free) for view in self._views.values()
        )
        total += lendable_blocks(unlisted.num_blocks, unlisted.num_peers * self._keep_free)
        self._most_blocks = max(self._most_blocks, total)

    def forget(self, inst_id: InstId) -> None:
        """It did not answer; the next view says whether it is back."""
        self._views = {key: view for key, view in self._views.items() if key != inst_id}

    def learn_free(self, inst_id: InstId, free_blocks: int) -> None:
        """A peer said itself how much it has."""
        view = self._views.get(inst_id)
        if view is not None:
            self._views = {**self._views, inst_id: replace(view, free_blocks=free_blocks)}

    def doubt(self) -> None:
        """Nobody tells us any more who has room: whoever may have some is worth asking."""
        self._views = {
            inst_id: replace(view, free_blocks=view.num_blocks)
            for inst_id, view in self._views.items()
        }

    @property
    def free_blocks(self) -> int:
        """What could be borrowed now."""
        return sum(self.lendable(view) for view in self._views.values())

    @property
    def total_blocks(self) -> int:
        """What could be borrowed at best, if nobody else needed anything.

        The most ever seen: a peer that is away for a moment is no reason to refuse for good.
        """
        return self._most_blocks

    def as_data_peers(self) -> list[Peer]:
        """As the data plane names them."""
        return [
            Peer(view.inst_id, view.incarnation, view.data_address) for view in self._views.values()
        ]

    def lendable(self, view: PeerView) -> int:
        return 0 if view.is_draining else lendable_blocks(view.free_blocks, self._keep_free)

    @property
    def everyone(self) -> list[PeerView]:
        """Who could give way to a request that cannot go on, most free first."""
        views = [view for view in self._views.values() if not view.is_draining]
        return sorted(views, key=lambda view: (-view.free_blocks, view.inst_id))

    def room_on(self, inst_id: InstId) -> int:
        """What that one could lend, as it was last heard to say itself."""
        view = self._views.get(inst_id)
        return 0 if view is None else self.lendable(view)

    def best_creditors(self, hint: Sequence[PeerView] = ()) -> list[PeerView]:
        """Who to ask: the fresh hint in its own order if there is one, else most free first."""
        known = [view for view in hint if self._can_lend(view)] or sorted(
            self._views.values(), key=lambda view: (-view.free_blocks, view.inst_id)
        )
        return [view for view in known if self.lendable(view) > 0]

    def _can_lend(self, view: PeerView) -> bool:
        return view.model == self._model and view.block_bytes == self._block_bytes
