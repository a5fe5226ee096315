import pytest
import torch

from kernels import AttentionPartial
from kernels.reference import ReferenceKernels
from tests.kernels.problem import LAYER, Problem, Shape

ROWS = [1, 4, 1, 2, 1, 3]
KV_LEN = [17, 40, 0, -1, 32, 2]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(4, 4, id="mha"), pytest.param(9, 3, id="gqa"), pytest.param(5, 1, id="mqa")],
)
def test_it_is_softmax_attention(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, causal: bool
) -> None:
    shape = Shape(num_heads, num_kv_heads, dtype=dtype, causal=causal)
    problem = Problem.make(shape, ROWS, KV_LEN)
    output = problem.output(ReferenceKernels())
    torch.testing.assert_close(output.double(), problem.expected_output(), rtol=1e-5, atol=1e-5)


def test_the_maximum_and_the_sum_are_those_of_the_scores() -> None:
    problem = Problem.make(Shape(2, 1, causal=False), [1], [21])
    partial = problem.attend(ReferenceKernels())
    scores = torch.einsum("hd,td->ht", problem.q[0], problem.keys[0][:, 0])
    torch.testing.assert_close(partial.max[0], scores.amax(1))
    torch.testing.assert_close(partial.sum[0].log() + partial.max[0], scores.logsumexp(1))


def test_a_score_that_overflows_to_minus_infinity_counts_as_unseen() -> None:
    problem = Problem.make(Shape(1, 1, causal=False), [1], [1])
    problem.pool[problem.slots // 16, LAYER, 0, :, problem.slots % 16] = 1e30
    problem.q.fill_(-1e30)
    partial = problem.attend(ReferenceKernels())
    assert partial.max.item() == -torch.inf
    assert partial.sum.item() == 0.0
    assert not partial.acc.any()


def test_rows_that_no_sequence_names_are_refused() -> None:
    problem = Problem.make(Shape(), [1], [16])
    q = torch.zeros(2, 9, 64)
    out = AttentionPartial.allocate(2, 9, 64)
    with pytest.raises(ValueError, match="1 rows"):
        ReferenceKernels().micro_attention(q, problem.pool, LAYER, problem.rows, out)
