"""The GPU's kernels under Triton's interpreter, which takes milliseconds a tile: tiny shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import AttentionPartial
from kernels.reference import ReferenceKernels
from kernels.triton_kernels import TritonKernels
from tests.kernels.problem import Problem, Shape, assert_same_partial

WHOLE = TritonKernels(num_programs=1)
SPLIT = TritonKernels(num_programs=16)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        pytest.param(Shape(2, 2, 64, 16), WHOLE, id="mha"),
        pytest.param(Shape(3, 1, 64, 32, torch.float16), WHOLE, id="gqa-float16"),
        pytest.param(Shape(3, 1, 64, 16, torch.bfloat16), WHOLE, id="gqa-bfloat16"),
        pytest.param(Shape(4, 1, 128, 16), SPLIT, id="mqa-split"),
        pytest.param(Shape(3, 1, 72, 16, causal=False), SPLIT, id="not-causal-split"),
        pytest.param(Shape(20, 1, 16, 32), WHOLE, id="group-beyond-a-tile"),
    ],
)
def test_it_equals_the_reference(shape: Shape, kernels: TritonKernels) -> None:
    problem = Problem.make(shape, [1, 6, 1, 2], [70, 21, 0, -1])
    assert_same_partial(problem.attend(kernels), problem.attend(ReferenceKernels()))


def test_a_prefill_chunk_takes_larger_tiles() -> None:
    problem = Problem.make(Shape(3, 1), [30], [35])
    assert_same_partial(problem.attend(WHOLE), problem.attend(ReferenceKernels()))


def test_no_rows_are_no_work() -> None:
    assert Problem.make(Shape(), [], []).attend(WHOLE).num_rows == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_writes_what_the_reference_writes(dtype: torch.dtype) -> None:
    problem = Problem.make(Shape(1, 1, 72, dtype=dtype), [1], [18])
    pool = torch.full_like(problem.pool, torch.nan)
    problem.write(WHOLE, pool)
    torch.testing.assert_close(pool, problem.pool, rtol=0, atol=0, equal_nan=True)


def test_merging_and_finalizing_equal_the_reference() -> None:
    problem = Problem.make(Shape(2, 1), [1, 1, 1], [5, 0, 0])
    other = Problem.make(Shape(2, 1), [1, 1], [3, 0], seed=1).attend(ReferenceKernels())
    results = []
    for kernels in (WHOLE, ReferenceKernels()):
        into = problem.attend(ReferenceKernels())
        kernels.merge_rows(into, torch.tensor([2, 1]), other)
        out = torch.full((3, 2 * 64), torch.nan)
        kernels.finalize(into, out)
        results.append((into, out))
    assert_same_partial(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert_same_partial(
        AttentionPartial(results[0][0].acc[1:2], results[0][0].max[1:2], results[0][0].sum[1:2]),
        AttentionPartial.empty(1, 2, 64),
    )


def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert all(int(size) > 0 for size in done.stdout.split())
