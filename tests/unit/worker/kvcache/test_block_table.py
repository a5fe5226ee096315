import pytest

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.block_table import BlockTable, RemoteSpan


def span(num_blocks: int, inst_id: int = 2, move_id: int = 7) -> RemoteSpan:
    return RemoteSpan(ReqId(1), InstId(inst_id), Incarnation(1), MoveId(move_id), num_blocks)


def test_blocks_to_reach_counts_what_is_missing() -> None:
    table = BlockTable(4)
    assert table.blocks_to_reach(0) == 0
    assert table.blocks_to_reach(1) == 1
    table.append([9, 3])
    assert table.blocks_to_reach(8) == 0
    assert table.blocks_to_reach(9) == 1


def test_only_full_blocks_are_movable() -> None:
    table = BlockTable(4)
    table.append([9, 3, 5])
    assert [table.num_movable(n) for n in (0, 3, 4, 7, 8, 12)] == [0, 0, 1, 1, 2, 3]


def test_a_move_takes_the_oldest_and_shifts_slots() -> None:
    table = BlockTable(4)
    table.append([9, 3, 5])
    assert table.slot(4) == 3 * 4
    assert table.commit_move(span(1)) == [9]
    assert table.local == [3, 5]
    assert table.num_blocks == 3
    assert table.slot(4) == 3 * 4  # the same position, the same bytes
    assert table.num_movable(12) == 2
    with pytest.raises(IndexError):
        table.slot(3)


def test_spans_of_several_creditors_keep_their_order() -> None:
    table = BlockTable(4)
    table.append([0, 1, 2, 3])
    table.commit_move(span(1, inst_id=2, move_id=7))
    table.commit_move(span(2, inst_id=3, move_id=8))
    assert [s.inst_id for s in table.remote] == [2, 3]
    assert table.num_remote_tokens == 12
    local, remote = table.clear()
    assert (local, len(remote), table.num_blocks) == ([3], 2, 0)


def test_more_than_is_local_cannot_be_committed() -> None:
    table = BlockTable(4)
    table.append([1])
    with pytest.raises(ValueError, match="only 1 local"):
        table.commit_move(span(2))
