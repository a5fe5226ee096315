import pytest
import torch

from kernels import PagedRows

SHAPE = {"causal": True, "num_blocks": 4, "block_size": 16}


def test_lists_become_ragged_vectors() -> None:
    rows = PagedRows.build([1, 3], [[2], [0, 3]], [16, 20], **SHAPE)  # type: ignore[arg-type]
    assert rows.row_start.tolist() == [0, 1, 4]
    assert rows.table_start.tolist() == [0, 1, 3]
    assert rows.block_ids.tolist() == [2, 0, 3]
    assert rows.kv_len.tolist() == [16, 20]
    assert rows.num_seqs == 2
    assert {rows.row_start.dtype, rows.block_ids.dtype} == {torch.int32}


def test_there_may_be_no_sequences() -> None:
    rows = PagedRows.build([], [], [], **SHAPE)  # type: ignore[arg-type]
    assert rows.num_seqs == 0
    assert rows.row_start.tolist() == [0]


@pytest.mark.parametrize(
    ("num_rows", "tables", "kv_len", "message"),
    [
        pytest.param([1], [[4]], [1], "block ids must lie in", id="block-beyond-the-pool"),
        pytest.param([1], [[-1]], [1], "block ids must lie in", id="negative-block"),
        pytest.param([1], [[2**31]], [1], "int32", id="block-beyond-int32"),
        pytest.param([1], [[0]], [17], "kv_len exceeds", id="more-tokens-than-slots"),
        pytest.param([-1], [[0]], [1], "row_start must not decrease", id="negative-rows"),
        pytest.param([1, 1], [[0]], [1], "2, 1 and 1 sequences", id="lists-of-different-lengths"),
    ],
)
def test_what_does_not_fit_the_pool_is_refused(
    num_rows: list[int], tables: list[list[int]], kv_len: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagedRows.build(num_rows, tables, kv_len, **SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("row_start", [1, 2], "offsets from 0"),
        ("row_start", [0], "offsets from 0"),
        ("table_start", [0, 2], "must end at"),
        ("kv_len", [[1]], "int32 vector"),
    ],
)
def test_vectors_that_contradict_each_other_are_refused(
    field: str, values: list[int], message: str
) -> None:
    rows = PagedRows.build([1], [[0]], [1], **SHAPE)  # type: ignore[arg-type]
    fields = {name: getattr(rows, name) for name in PagedRows.__slots__}
    fields[field] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        PagedRows(**fields).validate(4, 16)
