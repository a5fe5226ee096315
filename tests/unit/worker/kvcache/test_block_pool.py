import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kvcache.block_hash import BlockHash
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


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def pool_with(*names: str, num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(num_blocks)
    blocks = pool.try_allocate(len(names)) or []
    for block, text in zip(blocks, names, strict=True):
        pool.name(block, name(text))
    return pool, blocks


def test_a_freed_block_keeps_its_content_until_the_memory_is_needed() -> None:
    pool, blocks = pool_with("a", "b")
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.reuse([name("a"), name("b"), name("c")]) == blocks
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_empty_blocks_are_taken_before_cached_ones_and_prefix_ends_before_beginnings() -> None:
    pool, blocks = pool_with("a", "b")
    pool.free(blocks)
    pool.try_allocate(2)
    assert pool.num_known([name("a"), name("b")]) == 2
    pool.try_allocate(1)
    assert pool.num_known([name("a"), name("b")]) == 1


def test_a_shared_block_is_free_when_its_last_holder_left() -> None:
    pool, blocks = pool_with("a")
    assert pool.reuse([name("a")]) == blocks
    pool.free(blocks)
    assert pool.num_free == 3
    pool.free(blocks)
    assert pool.num_free == 4


def test_the_first_of_equal_blocks_keeps_the_name() -> None:
    pool, blocks = pool_with("a")
    (second,) = pool.try_allocate(1) or []
    pool.name(second, name("a"))
    assert pool.reuse([name("a")]) == blocks


def test_content_is_reported_as_given_up_only_when_it_cannot_be_found_any_more() -> None:
    given_up: list[int] = []
    pool = BlockPool(2, given_up.extend)
    named, unnamed = pool.try_allocate(2) or []
    pool.name(named, name("a"))
    pool.free([named, unnamed])
    assert given_up == [unnamed]
    pool.try_allocate(2)
    assert given_up == [unnamed, named]


def test_a_free_block_has_no_content_to_name() -> None:
    with pytest.raises(ValueError, match="no content"):
        BlockPool(1).name(0, name("a"))


def test_a_shared_block_is_free_when_all_who_hold_it_have_let_go() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1) or []
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks)
    pool.check_integrity()
