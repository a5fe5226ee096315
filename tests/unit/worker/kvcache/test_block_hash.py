from services.worker.kvcache.block_hash import BlockHash, extend_hashes, root_hash


def hashes_of(tokens: list[int], salt: str = "") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root_hash(salt), tokens, len(tokens), 4)
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_everything_before_it() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == one


def test_growing_step_by_step_gives_the_same_hashes() -> None:
    tokens = list(range(40))
    grown: list[BlockHash] = []
    for count in range(41):
        extend_hashes(grown, root_hash(), tokens, count, 4)
    assert grown == hashes_of(tokens)


def test_salts_keep_tenants_apart() -> None:
    assert hashes_of([1, 2, 3, 4], "a") != hashes_of([1, 2, 3, 4], "b")


def test_hashes_are_the_same_in_every_process() -> None:
    assert hashes_of([1, 2, 3, 4])[0].hex() == "359274c7a740fd9a03f21c0e12306fe5"
