import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kvcache.block_pool import BlockPool


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(5) is None
    assert pool.num_free == 4
    assert sorted(pool.try_allocate(4) or ()) == [0, 1, 2, 3]
    assert pool.try_allocate(1) is None
    assert pool.try_allocate(0) == []


def test_keep_free_is_out_of_reach() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(3, keep_free=2) is None
    assert pool.try_allocate(2, keep_free=2) is not None


def test_a_double_free_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1) or []
    pool.free(blocks)
    with pytest.raises(ValueError, match="already free"):
        pool.free(blocks)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_block_is_lost_or_handed_out_twice(operations: list[tuple[bool, int]]) -> None:
    pool, held = BlockPool(10), list[list[int]]()
    for is_allocation, number in operations:
        if is_allocation:
            blocks = pool.try_allocate(number)
            if blocks is not None:
                held.append(blocks)
        elif held:
            pool.free(held.pop(number % len(held)))
        out = [block for blocks in held for block in blocks]
        assert len(set(out)) == len(out)
        assert len(out) + pool.num_free == 10
        pool.check_integrity()
