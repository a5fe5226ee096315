from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import AttentionPartial, PagedRows
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from tests.kernels.problem import LAYER, Problem, Shape, assert_same_partial

# Decode, splits of the context, chunks of several row tiles, one token, an empty part, no rows.
ROWS = [1, 1, 2, 150, 40, 1, 1, 3, 0]
KV_LEN = [33, 1077, 1025, 170, 20, 1, 0, -2, 16]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, 16, torch.float32),
        (64, 32, torch.float16),
        (128, 16, torch.float16),
        (128, 32, torch.float32),
        (72, 16, torch.float32),
        (8, 32, torch.float16),
        (64, 16, torch.bfloat16),
        (128, 32, torch.bfloat16),
        (72, 16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(2, 2, id="mha"), pytest.param(6, 2, id="gqa"), pytest.param(8, 1, id="mqa")],
)
def test_it_equals_the_reference(
    native: NativeKernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    causal: bool,
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_dim, block_size, dtype, causal)
    problem = Problem.make(shape, ROWS, KV_LEN)
    # Queries and weights, too, may be rounded where K and V are bfloat16.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert_same_partial(problem.attend(native), problem.attend(ReferenceKernels()), tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1024, 1025])
@pytest.mark.parametrize("num_rows", [1, 24])
def test_every_tail_is_handled(native: NativeKernels, num_rows: int, length: int) -> None:
    problem = Problem.make(Shape(3, 1), [num_rows], [length], seed=length)
    output = problem.output(native)
    torch.testing.assert_close(output.double(), problem.expected_output(), rtol=2e-5, atol=2e-6)


def test_scores_of_ten_thousand_do_not_overflow(native: NativeKernels) -> None:
    problem = Problem.make(Shape(), [1, 20], [300, 300])
    problem.q.mul_(10_000)
    output = problem.output(native)
    torch.testing.assert_close(output, problem.output(ReferenceKernels()), rtol=1e-3, atol=1e-3)


def test_a_score_of_minus_infinity_leaves_no_nan(native: NativeKernels) -> None:
    problem = Problem.make(Shape(1, 1, causal=False), [1], [40])
    problem.pool[problem.slots // 16, LAYER, 0, :, problem.slots % 16] = 1e30
    problem.q.fill_(-1e30)
    assert_same_partial(problem.attend(native), AttentionPartial.empty(1, 1, 64))


def test_neither_the_threads_nor_the_batch_change_a_bit(
    native: NativeKernels, cache_dir: Path
) -> None:
    alone = NativeKernels(num_threads=1, cache_dir=cache_dir)
    problem = Problem.make(Shape(), ROWS, KV_LEN)
    several, one = problem.attend(native), problem.attend(alone)
    assert torch.equal(several.acc, one.acc)
    assert torch.equal(several.sum, one.sum)


def test_threads_may_share_the_kernels(native: NativeKernels) -> None:
    problems = [Problem.make(Shape(), ROWS, KV_LEN, seed=seed) for seed in range(2)]
    expected = [problem.attend(ReferenceKernels()) for problem in problems]

    def attend_often(index: int) -> AttentionPartial:
        for _ in range(30):
            partial = problems[index].attend(native)
        return partial

    with ThreadPoolExecutor(4) as threads:
        partials = list(threads.map(attend_often, [0, 1, 0, 1]))
    for index, partial in enumerate(partials):
        assert_same_partial(partial, expected[index % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_writes_what_the_reference_writes(native: NativeKernels, dtype: torch.dtype) -> None:
    problem = Problem.make(Shape(dtype=dtype), [1, 1], [40, 17])
    pool = torch.full_like(problem.pool, torch.nan)
    problem.write(native, pool)
    torch.testing.assert_close(pool, problem.pool, rtol=0, atol=0, equal_nan=True)


def test_merging_and_finalizing_equal_the_reference(native: NativeKernels) -> None:
    parts = [
        Problem.make(Shape(), [1, 1, 1], lengths, seed=seed).attend(native)
        for seed, lengths in enumerate([[20, 0, 0], [33, 5, 0]])
    ]
    row_ids = torch.tensor([2, 0, 1])
    results = []
    for kernels in (native, ReferenceKernels()):
        into = AttentionPartial(parts[0].acc.clone(), parts[0].max.clone(), parts[0].sum.clone())
        kernels.merge_rows(into, row_ids, parts[1])
        out = torch.full((3, 9 * 64), torch.nan)
        kernels.finalize(into, out)
        results.append((into, out))
    assert_same_partial(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_no_rows_are_no_work(native: NativeKernels) -> None:
    problem = Problem.make(Shape(), [], [])
    assert problem.attend(native).num_rows == 0


class TestBadInput:
    @pytest.fixture
    def problem(self) -> Problem:
        return Problem.make(Shape(), [1], [17])

    def attend(self, native: NativeKernels, problem: Problem, **changes: torch.Tensor) -> None:
        rows = {name: getattr(problem.rows, name) for name in PagedRows.__slots__} | changes
        out = AttentionPartial.allocate(*problem.q.shape)
        native.micro_attention(problem.q, problem.pool, LAYER, PagedRows(**rows), out)

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            ("block_ids", [0, 4], "inside the pool"),
            ("block_ids", [-1, 0], "inside the pool"),
            ("kv_len", [33], "kv_len exceeds"),
            ("row_start", [0, 2], "row_start"),
            ("table_start", [0, 3], "table_start"),
        ],
    )
    def test_indices_outside_the_pool(
        self, native: NativeKernels, problem: Problem, name: str, values: list[int], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            self.attend(native, problem, **{name: torch.tensor(values, dtype=torch.int32)})

    def test_wrong_dtypes(self, native: NativeKernels, problem: Problem) -> None:
        with pytest.raises(ValueError, match=r"block_ids must be contiguous torch\.int32"):
            self.attend(native, problem, block_ids=torch.tensor([0, 1]))

    def test_wrong_shapes(self, native: NativeKernels, problem: Problem) -> None:
        out = AttentionPartial.allocate(2, 9, 64)
        with pytest.raises(ValueError, match=r"out\.acc"):
            native.micro_attention(problem.q, problem.pool, LAYER, problem.rows, out)
        with pytest.raises(ValueError, match="8 query heads over 3 KV heads"):
            q = problem.q[:, :8].contiguous()
            native.micro_attention(q, problem.pool, LAYER, problem.rows, out)

    def test_memory_that_is_not_contiguous(self, native: NativeKernels, problem: Problem) -> None:
        out = AttentionPartial.allocate(1, 9, 64)
        with pytest.raises(ValueError, match="pool must be contiguous"):
            native.micro_attention(
                problem.q, problem.pool.transpose(3, 4), LAYER, problem.rows, out
            )

    @pytest.mark.parametrize("layer", [-1, 3])
    def test_layers_outside_the_pool(
        self, native: NativeKernels, problem: Problem, layer: int
    ) -> None:
        out = AttentionPartial.allocate(1, 9, 64)
        with pytest.raises(ValueError, match=f"layer {layer}"):
            native.micro_attention(problem.q, problem.pool, layer, problem.rows, out)

    @pytest.mark.parametrize("slot", [-1, 64])
    def test_slots_outside_the_pool(
        self, native: NativeKernels, problem: Problem, slot: int
    ) -> None:
        k = torch.zeros(1, 3, 64)
        with pytest.raises(ValueError, match="slots"):
            native.write_kv(problem.pool, LAYER, k, k, torch.tensor([slot]))

    def test_rows_outside_the_partial(self, native: NativeKernels) -> None:
        partial = AttentionPartial.empty(1, 9, 64)
        with pytest.raises(ValueError, match="row_ids"):
            native.merge_rows(partial, torch.tensor([1]), partial)

    @pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (24, 64), (16, 12), (16, 264)])
    def test_sizes_it_does_not_know(
        self, native: NativeKernels, block_size: int, head_dim: int
    ) -> None:
        pool = torch.zeros(1, 1, 2, 1, block_size, head_dim)
        k = torch.zeros(1, 1, head_dim)
        with pytest.raises(ValueError, match=r"block_size|head_dim"):
            native.write_kv(pool, 0, k, k, torch.tensor([0]))

    def test_no_threads(self, cache_dir: Path) -> None:
        with pytest.raises(ValueError, match="num_threads"):
            NativeKernels(num_threads=0, cache_dir=cache_dir)
