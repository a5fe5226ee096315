import pytest
import torch

from services.worker.engine.sampler import sample
from services.worker.engine.sequence import SamplingParams

GREEDY = SamplingParams()


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw_many(params: SamplingParams, logits: torch.Tensor, count: int) -> torch.Tensor:
    rows = logits.expand(count, -1)
    tokens = sample(rows, [params] * count, list(range(count)))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


def test_greedy_takes_the_largest() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), [GREEDY] * 2, [0, 0]) == [1, 0]


def test_frequencies_follow_the_distribution() -> None:
    wanted = [0.5, 0.3, 0.15, 0.05]
    seen = draw_many(SamplingParams(1.0, seed=3), logits_of(wanted), 20_000)
    assert seen.tolist() == pytest.approx(wanted, abs=0.012)  # 3.4 standard deviations


def test_temperature_sharpens() -> None:
    seen = draw_many(SamplingParams(0.5, seed=3), logits_of([0.8, 0.2]), 20_000)
    assert seen[0].item() == pytest.approx(0.64 / 0.68, abs=0.01)


def test_top_k_keeps_the_k_likeliest() -> None:
    seen = draw_many(SamplingParams(1.0, top_k=2, seed=3), logits_of([0.2, 0.5, 0.3]), 2_000)
    assert seen[0].item() == 0.0


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = logits_of([0.5, 0.3, 0.2])
    assert draw_many(SamplingParams(1.0, top_p=0.5, seed=3), logits, 500)[0].item() == 1.0
    seen = draw_many(SamplingParams(1.0, top_p=0.51, seed=3), logits, 4_000)
    assert seen[2].item() == 0.0
    assert seen[1].item() == pytest.approx(3 / 8, abs=0.03)


def test_a_tiny_top_p_still_leaves_one_token() -> None:
    params = SamplingParams(1.0, top_p=1e-9, seed=3)
    assert sample(logits_of([0.3, 0.7]), [params], [0]) == [1]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    params = SamplingParams(1.0, seed=11)
    alone = [sample(logits[:1], [params], [index])[0] for index in range(20)]
    others = [SamplingParams(0.7, seed=5), GREEDY]
    together = [
        sample(logits[[1, 0, 2]], [others[0], params, others[1]], [3, index, 9])[1]
        for index in range(20)
    ]
    assert alone == together
    assert len(set(alone)) > 1


def test_another_seed_gives_other_tokens() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {sample(logits, [SamplingParams(1.0, seed=s)], [0])[0] for s in range(20)}
    assert len(tokens) > 15
