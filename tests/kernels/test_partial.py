import pytest
import torch

from kernels import AttentionPartial, PagedRows

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
        pytest.param([-1], [[0]], [1], "not decrease", id="negative-rows"),
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
        ("row_start", [1, 2], "begin with 0"),
        ("row_start", [0], r"row_start must be contiguous torch\.int32 of \[2\]"),
        ("table_start", [0, 2], "must end at"),
        ("kv_len", [[1]], "kv_len must be"),
        ("block_ids", [[0]], "block_ids must be"),
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


@pytest.mark.parametrize(
    ("acc", "maximum", "total", "message"),
    [
        pytest.param((2, 3, 4), (2, 2), (2, 3), "acc must be", id="heads-differ"),
        pytest.param((2, 3), (2, 3), (2, 3), "acc must be", id="no-head-dim"),
        pytest.param((2, 3, 4), (2, 3), (1, 3), "sum must be", id="rows-differ"),
    ],
)
def test_a_partial_checks_its_shapes(
    acc: tuple[int, ...], maximum: tuple[int, ...], total: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionPartial(torch.zeros(acc), torch.zeros(maximum), torch.zeros(total))


def test_a_partial_is_contiguous_float32() -> None:
    heads = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="acc must be contiguous"):
        AttentionPartial(torch.zeros(2, 4, 3).transpose(1, 2), heads, heads)
    with pytest.raises(ValueError, match="sum must be contiguous"):
        AttentionPartial(torch.zeros(2, 3, 4), heads, heads.double())
