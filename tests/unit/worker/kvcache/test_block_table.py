import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.block_table import BlockTable, RemoteSpan

BLOCK = 4


def span(num_blocks: int, inst_id: int = 2, move_id: int = 7) -> RemoteSpan:
    return RemoteSpan(ReqId(1), InstId(inst_id), Incarnation(1), MoveId(move_id), num_blocks)


def table_of(*block_ids: int) -> BlockTable:
    table = BlockTable(BLOCK)
    table.grow(block_ids)
    return table


def test_blocks_to_reach_counts_what_is_missing() -> None:
    table = BlockTable(BLOCK)
    assert table.blocks_to_reach(0) == 0
    assert table.blocks_to_reach(1) == 1
    table.grow([9, 3])
    assert table.blocks_to_reach(8) == 0
    assert table.blocks_to_reach(9) == 1
    table.commit_move(0, span(1))
    table.lose([MoveId(7)])
    assert [table.blocks_to_reach(n) for n in (0, 8, 9)] == [1, 1, 2]


def test_a_move_leaves_every_block_at_its_index() -> None:
    table = table_of(9, 3, 5)
    assert table.slot(4) == 3 * 4
    assert table.commit_move(0, span(1)) == [9]
    assert table.local == [3, 5]
    assert table.num_blocks == 3
    assert table.slot(4) == 3 * 4  # the same position, the same bytes
    assert table.local_run(0, 3) == range(1, 3)
    with pytest.raises(IndexError):
        table.slot(3)


def test_spans_are_kept_in_the_order_of_the_sequence_not_of_their_moves() -> None:
    table = table_of(0, 1, 2, 3)
    later, earlier = span(1, inst_id=2, move_id=7), span(2, inst_id=3, move_id=8)
    table.commit_move(2, later)
    table.commit_move(0, earlier)
    assert table.remote == [earlier, later]
    assert table.clear() == ([3], [earlier, later])
    assert (table.num_blocks, table.local, table.remote) == (0, [], [])


def test_a_chunk_attends_to_what_lies_before_its_end_alone() -> None:
    table = table_of(0, 1, 2, 3, 4, 5)
    first, second = span(1, move_id=7), span(2, move_id=8)
    table.commit_move(0, first)
    table.commit_move(3, second)
    assert table.context(2 * BLOCK + 1) == ([1, 2], BLOCK, [first])
    assert table.context(6 * BLOCK) == ([1, 2, 5], 3 * BLOCK, [first, second])


def test_nothing_attends_across_a_hole() -> None:
    table = table_of(0, 1, 2)
    table.commit_move(1, span(1))
    table.lose([MoveId(7)])
    assert table.context(BLOCK) == ([0], 0, [])
    with pytest.raises(ValueError, match="hole"):
        table.context(3 * BLOCK)
    table.grow([8])
    assert table.context(3 * BLOCK) == ([0, 8, 2], 0, [])


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    table = table_of(0, 1, 2)
    table.commit_move(1, span(1))
    for first in (0, 1, 2):
        with pytest.raises(ValueError, match="cannot commit"):
            table.commit_move(first, span(2, move_id=8))
    with pytest.raises(ValueError, match="in place of"):
        table.take_back(span(1), [5, 6])
    for by in ([], [span(2, move_id=8)], [span(1, move_id=8), span(1, move_id=9)]):
        with pytest.raises(ValueError, match="in place of"):
            table.lend_on(span(1), by)
    table.lose([MoveId(7)])
    with pytest.raises(ValueError, match="2 blocks do not fit"):
        table.grow([5, 6])
    assert (table.local, table.remote, table.absent) == ([0, 2], [], range(1, 2))


@dataclass(frozen=True, slots=True)
class Cell:
    """One block of the model: local, of a span, or nowhere."""

    block_id: int | None = None
    span: RemoteSpan | None = None


@dataclass
class Model:
    """The table as a plain list, read anew for every answer."""

    cells: list[Cell] = field(default_factory=list)

    @property
    def local(self) -> list[int]:
        return [cell.block_id for cell in self.cells if cell.block_id is not None]

    @property
    def remote(self) -> list[RemoteSpan]:
        return list(dict.fromkeys(cell.span for cell in self.cells if cell.span is not None))

    def put(self, first: int, cells: list[Cell]) -> None:
        self.cells[first : first + len(cells)] = cells

    def first_of(self, span: RemoteSpan) -> int:
        return self.cells.index(Cell(span=span))

    @property
    def absent(self) -> range:
        if Cell() not in self.cells:
            return range(len(self.cells), sys.maxsize)
        first = self.cells.index(Cell())
        size = next((n for n, cell in enumerate(self.cells[first:]) if cell != Cell()), None)
        return range(first, len(self.cells) if size is None else first + size)

    def run(self, start: int, stop: int) -> list[int]:
        found: list[int] = []
        for index in range(start, min(stop, len(self.cells))):
            if self.cells[index].block_id is not None:
                found.append(index)
            elif found:
                break
        return found


class TableMachine(RuleBasedStateMachine):
    """Any changes in any order: the table says what a plain list of blocks says."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.model = BlockTable(BLOCK), Model()
        self._next_id = 0

    def _ids(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    @precondition(lambda self: not self.model.local)
    @rule(sizes=st.lists(st.integers(1, 3), max_size=3))
    def attach(self, sizes: list[int]) -> None:
        spans = [span(size, move_id=self._ids(1)[0]) for size in sizes]
        self.table.attach(spans)
        self.model.cells += [Cell(span=s) for s in spans for _ in range(s.num_blocks)]

    @rule(count=st.integers(0, 4))
    def grow(self, count: int) -> None:
        absent = self.table.absent
        block_ids = self._ids(min(count, len(absent)))
        self.table.grow(block_ids)
        self.model.put(absent.start, [Cell(block_id) for block_id in block_ids])

    @precondition(lambda self: self.model.local)
    @rule(start=st.integers(0, 20), size=st.integers(1, 3))
    def move(self, start: int, size: int) -> None:
        run = self.table.local_run(start, self.table.num_blocks)[:size]
        if run:
            moved = span(len(run), move_id=self._ids(1)[0])
            expected = [self.model.cells[index].block_id for index in run]
            assert self.table.commit_move(run.start, moved) == expected
            self.model.put(run.start, [Cell(span=moved)] * len(run))

    @precondition(lambda self: self.model.remote)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(self.model.remote)))
        places = [(self.model.first_of(span), span.num_blocks) for span in lost]
        expected = [range(first, first + count) for first, count in sorted(places)]
        assert self.table.lose({span.move_id for span in lost}) == expected
        for first, count in places:
            self.model.put(first, [Cell()] * count)

    @precondition(lambda self: self.model.remote)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.model.remote))
        first, block_ids = self.model.first_of(taken), self._ids(taken.num_blocks)
        self.table.take_back(taken, block_ids)
        self.model.put(first, [Cell(block_id) for block_id in block_ids])

    @precondition(lambda self: self.model.remote)
    @rule(data=st.data())
    def lend_on(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.model.remote))
        num_first = data.draw(st.integers(1, taken.num_blocks))
        sizes = [size for size in (num_first, taken.num_blocks - num_first) if size]
        by = [span(size, inst_id=3, move_id=self._ids(1)[0]) for size in sizes]
        self.table.lend_on(taken, by)
        cells = [Cell(span=part) for part in by for _ in range(part.num_blocks)]
        self.model.put(self.model.first_of(taken), cells)

    @rule()
    def clear(self) -> None:
        assert self.table.clear() == (self.model.local, self.model.remote)
        self.model.cells = []

    @invariant()
    def agrees(self) -> None:
        table, cells = self.table, self.model.cells
        assert (table.local, table.remote) == (self.model.local, self.model.remote)
        assert table.num_blocks == len(cells)
        assert table.absent == self.model.absent
        assert table.blocks_to_reach(BLOCK * len(cells) + 1) == cells.count(Cell()) + 1

    @invariant()
    def places_agree(self) -> None:
        table, model = self.table, self.model
        for index, cell in enumerate(model.cells):
            assert list(table.local_run(index, len(model.cells))) == model.run(index, 99)
            assert list(table.local_run(0, index)) == model.run(0, index)
            if cell.block_id is not None:
                assert table.slot(index * BLOCK + 1) == cell.block_id * BLOCK + 1
            if index < table.absent.start:
                before = Model(model.cells[: index + 1])
                num_remote = index + 1 - len(before.local)
                expected = (before.local, num_remote * BLOCK, before.remote)
                assert table.context(index * BLOCK + 1) == expected


TestTableAgreesWithAPlainList = TableMachine.TestCase
TestTableAgreesWithAPlainList.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=30
)
