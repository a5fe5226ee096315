"""Moves under way, with a map that only the test changes."""

from services.common.ids import InstId, ReqId
from services.gmanager.board import Move
from services.gmanager.cluster import RowKey
from services.gmanager.under_way import UnderWay

MOVE = Move(ReqId(7), 10, InstId(1), InstId(2))


def nothing(key: RowKey) -> int:
    return 0


def ordered() -> UnderWay:
    under_way = UnderWay(cool_down_s=5.0)
    under_way.add(MOVE, held_blocks=0, now_s=0.0)
    return under_way


def test_a_move_is_under_way_until_the_map_shows_it() -> None:
    under_way = ordered()
    under_way.refresh(nothing, now_s=1.0)
    assert under_way.moves == [MOVE]
    under_way.refresh(lambda key: 10 if key == (7, 2) else 0, now_s=1.5)
    assert under_way.moves == []


def test_its_source_rests_also_when_it_has_arrived() -> None:
    under_way = ordered()
    under_way.refresh(lambda key: 10, now_s=4.9)
    assert under_way.resting == {1}


def test_a_refused_move_is_not_under_way_but_its_source_rests() -> None:
    under_way = ordered()
    under_way.end(MOVE)
    assert (under_way.moves, under_way.resting) == ([], {1})


def test_after_the_cool_down_nothing_is_left_of_it() -> None:
    under_way = ordered()
    under_way.refresh(nothing, now_s=5.0)
    assert (under_way.moves, under_way.resting) == ([], set())
    under_way.end(MOVE)
