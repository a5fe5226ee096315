"""A block as its owner sees it: every state against every event, in docs/protocol.md's table.

Late, doubled and reordered events are those that come in a state in which nobody waits for them.
"""

from collections.abc import Callable
from enum import StrEnum

import pytest

from services.common.ids import InstId, ReqId
from services.worker.engine.sequence import MoveOrder, Sequence
from services.worker.kvcache.block_table import RemoteSpan
from tests.unit.worker.engine.world import CREDITOR, World

NUM_NEW = 8


class State(StrEnum):
    LOCAL = "local"
    COPYING = "copying"
    REMOTE = "remote"
    HOLE = "hole"
    FREED = "freed"


class Life:
    """The first two blocks of a request, and everything that may yet be said about them.

    Before it begins they were ordered to move in vain, and once were on a creditor: whatever is
    said about that order and that span is late.
    """

    def __init__(self) -> None:
        self.world = World(num_blocks=24, remote_blocks=24)
        self.world.add(1, num_prompt=9, max_tokens=NUM_NEW)
        self.world.step()
        self.order = self._new_order()
        self.span = self._grant()
        self.way_home: tuple[RemoteSpan, list[int]] | None = None
        """What is fetched, and into which blocks."""
        self.commit()
        self.take_back()

    @property
    def _sequence(self) -> Sequence | None:
        return self.world.scheduler.find(ReqId(1))

    @property
    def state(self) -> State:
        sequence = self._sequence
        if sequence is None or not sequence.is_running:
            return State.FREED
        if sequence.table.absent.start == 0:
            return State.HOLE
        if sequence.table.local_run(0, 1):
            return State.COPYING if sequence.is_moving and 0 in sequence.moving else State.LOCAL
        return State.REMOTE

    # -- events -----------------------------------------------------------------------------------

    def begin_move(self) -> None:
        order = self.world.scheduler.placement.begin_move(ReqId(1), 2)
        if order is not None:
            self.order, self.span = order, self._grant()

    def acknowledge(self) -> None:
        """All blocks have arrived there: the owner's books know nothing of it."""

    def commit(self) -> None:
        """Again where it has been committed."""
        world, span = self.world, self.span
        world.lent.setdefault(span.move_id, span.num_blocks)
        if self.state is State.COPYING:
            world.kv.commit(span, world.kv.copy_out(self.order.block_ids))
        is_known = span in world.scheduler.blocks.remote_spans
        if not world.scheduler.placement.commit_move(self.order, span) and not is_known:
            del world.lent[span.move_id]
        world.scheduler.placement.end_move(self.order, False, world.now_s)

    def refuse(self) -> None:
        self.world.scheduler.placement.end_move(self.order, True, self.world.now_s)

    def recall(self) -> None:
        creditor = (self.span.inst_id, self.span.incarnation)
        wanted = self.world.scheduler.blocks.recalled(creditor, {self.span.move_id})
        assert wanted == ([self.span] if self.state is State.REMOTE else [])

    def make_room(self) -> None:
        if self.way_home is None:
            blocks = self.world.make_room(self.span)
            self.way_home = None if blocks is None else (self.span, blocks)

    def take_back(self) -> None:
        self.make_room()
        if self.way_home is not None:
            self.world.take_back(*self.way_home)
            self.way_home = None

    def lend_on(self) -> None:
        if self.state is State.REMOTE:
            assert self.world.lend_on(self.span)
            (self.span,) = self.world.scheduler.blocks.remote_spans
            if self.way_home is not None:
                self.take_back()  # void: that copy is nobody's any more
        else:
            assert not self.world.scheduler.placement.lend_on(self.span, [self._grant()])

    def lose(self) -> None:
        self.world.lose(CREDITOR)

    def step(self) -> None:
        """Two: nobody is admitted in one before which somebody was preempted."""
        self.world.step()
        self.world.step()

    def give_up(self) -> None:
        """Preempted: the same request comes back, with other blocks."""
        sequence = self._sequence
        if sequence is not None and sequence.is_running:
            self.world.scheduler._roster.preempt(sequence, self.world.now_s)
            self.world.settle()

    def end(self) -> None:
        """Whatever happened, the request gets all its tokens, and nothing is left anywhere."""
        world = self.world
        world.scheduler.placement.end_move(self.order, False, world.now_s)
        if self.way_home is not None:
            self.take_back()
        world.run()
        assert world.tokens_of(1) == NUM_NEW
        assert world.pool.num_free == 24
        assert world.lent == {}
        assert world.scheduler.placement.lose_parts(InstId(CREDITOR)) == 0

    def _new_order(self) -> MoveOrder:
        order = self.world.scheduler.placement.begin_move(ReqId(1), 2)
        assert order is not None
        return order

    def _grant(self) -> RemoteSpan:
        """A creditor's, which counts as lent once it is committed."""
        span = self.world.new_span(ReqId(1), 2)
        del self.world.lent[span.move_id]
        return span


Event = Callable[[Life], None]

EVENTS: dict[str, Event] = {
    "order": Life.begin_move,
    "acknowledged": Life.acknowledge,
    "commit": Life.commit,
    "refused or failed": Life.refuse,
    "recall": Life.recall,
    "room for it": Life.make_room,
    "fetched": Life.take_back,
    "lent on": Life.lend_on,
    "lost": Life.lose,
    "step": Life.step,
    "preempted": Life.give_up,
}

#: How a block comes into each state; a state of the protocol that the books do not tell from
#: another one is there, too.
WAYS: dict[str, tuple[State, list[str]]] = {
    "local": (State.LOCAL, []),
    "copying": (State.COPYING, ["order"]),
    "remote-ready": (State.COPYING, ["order", "acknowledged"]),
    "remote": (State.REMOTE, ["order", "commit"]),
    "returning": (State.REMOTE, ["order", "commit", "room for it"]),
    "hole": (State.HOLE, ["order", "commit", "lost"]),
    "freed": (State.FREED, ["preempted"]),
    "freed while copying": (State.FREED, ["order", "preempted"]),
    "freed while returning": (State.FREED, ["order", "commit", "room for it", "preempted"]),
}

#: Where an event changes the state; all others leave it as it is.
CHANGES: dict[tuple[State, str], State] = {
    (State.LOCAL, "order"): State.COPYING,
    (State.COPYING, "commit"): State.REMOTE,
    (State.COPYING, "refused or failed"): State.LOCAL,
    (State.REMOTE, "fetched"): State.LOCAL,
    (State.REMOTE, "lost"): State.HOLE,
    (State.HOLE, "step"): State.LOCAL,
    (State.FREED, "step"): State.LOCAL,
    **{(state, "preempted"): State.FREED for state in State},
}


def after(state: State, event: str) -> State:
    return CHANGES.get((state, event), state)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_state_takes_every_event_and_any_other_behind_it(way: str, event: str) -> None:
    for next_event in EVENTS:
        life = Life()
        state, events = WAYS[way]
        for name in events:
            EVENTS[name](life)
        assert life.state is state
        for name in (event, next_event):
            EVENTS[name](life)
            state = after(state, name)
            assert life.state is state, name
        life.end()
