"""Equation 3: however a context is cut, merging the partials gives attention over the whole."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionPartial
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels, attention_reference, merge
from tests.kernels.problem import assert_same_partial

HEADS, KV_HEADS, DIM = 6, 2, 16
properties = settings(deadline=None, max_examples=25)


def draw_context(length: int, seed: int, magnitude: float) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(2, HEADS, DIM, generator=random) * magnitude / DIM**0.5
    k = torch.randn(length, KV_HEADS, DIM, generator=random)
    v = torch.randn(length, KV_HEADS, DIM, generator=random)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> AttentionPartial:
    return attention_reference(q, k, v, torch.full((q.shape[0],), k.shape[0]))


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """The tokens of a context dealt to parts, some of them empty, in any order."""
    length = draw(st.integers(1, 24))
    num_parts = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, num_parts - 1), min_size=length, max_size=length))
    return [[t for t, owner in enumerate(owners) if owner == part] for part in range(num_parts)]


@properties
@given(partitions(), st.integers(0, 1000), st.sampled_from([1.0, 100.0, 1e4]))
def test_any_partition_merges_to_the_whole(
    parts: list[list[int]], seed: int, magnitude: float
) -> None:
    q, k, v = draw_context(sum(map(len, parts)), seed, magnitude)
    merged = merge([attend(q, k[part], v[part]) for part in parts])
    # Scores of 1e4 are known to 1e-3 only, and their differences are exponents.
    assert_same_partial(merged, attend(q, k, v), tolerance=max(1e-5, 1e-6 * magnitude))


@properties
@given(partitions(), st.randoms(use_true_random=False), st.integers(0, 1000))
def test_the_order_does_not_matter(parts: list[list[int]], random: Random, seed: int) -> None:
    q, k, v = draw_context(sum(map(len, parts)), seed, 3.0)
    partials = [attend(q, k[part], v[part]) for part in parts]
    shuffled = list(partials)
    random.shuffle(shuffled)
    assert_same_partial(merge(shuffled), merge(partials))


@properties
@given(st.integers(0, 8), st.integers(1, 3))
def test_the_empty_part_is_neutral(length: int, num_empty: int) -> None:
    partial = attend(*draw_context(length, 0, 1.0))
    neutral = AttentionPartial.empty(2, HEADS, DIM)
    assert_same_partial(merge([neutral] * num_empty + [partial]), partial)
    assert_same_partial(merge([neutral] * num_empty), neutral)


@properties
@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 1000))
def test_it_is_the_merge_of_normalised_values_and_log_sums(
    first: int, second: int, seed: int
) -> None:
    q, k, v = draw_context(first + second, seed, 2.0)
    parts = [attend(q, k[:first], v[:first]), attend(q, k[first:], v[first:])]
    log_sums = torch.stack([part.max + part.sum.log() for part in parts])
    normalised = torch.stack([part.acc / part.sum[..., None] for part in parts])
    expected = (log_sums.softmax(dim=0)[..., None] * normalised).sum(dim=0)
    merged = merge(parts)
    torch.testing.assert_close(merged.acc / merged.sum[..., None], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged.max + merged.sum.log(), log_sums.logsumexp(dim=0))


@properties
@given(partitions(), st.integers(0, 1000), st.sampled_from([1.0, 1e4]))
def test_merging_rows_in_place_is_merge(
    native: NativeKernels, parts: list[list[int]], seed: int, magnitude: float
) -> None:
    q, k, v = draw_context(sum(map(len, parts)), seed, magnitude)
    partials = [attend(q, k[part], v[part]) for part in parts]
    for kernels in (native, ReferenceKernels()):
        into = AttentionPartial.empty(2, HEADS, DIM)
        for partial in partials:
            kernels.merge_rows(into, torch.tensor([0, 1]), partial)
        assert_same_partial(into, merge(partials))


def test_rows_that_are_not_named_stay_as_they_are(native: NativeKernels) -> None:
    for kernels in (native, ReferenceKernels()):
        into = attend(*draw_context(5, 0, 1.0))
        before = into.acc.clone()
        other = attend(*draw_context(3, 1, 1.0))
        last = AttentionPartial(other.acc[1:], other.max[1:], other.sum[1:])
        kernels.merge_rows(into, torch.tensor([1]), last)
        assert torch.equal(into.acc[0], before[0])
        assert not torch.equal(into.acc[1], before[1])


def test_finalizing_an_empty_part_gives_zero(native: NativeKernels) -> None:
    for kernels in (native, ReferenceKernels()):
        out = torch.full((2, HEADS * DIM), torch.nan)
        kernels.finalize(AttentionPartial.empty(2, HEADS, DIM), out)
        assert not out.any()
