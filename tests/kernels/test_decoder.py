"""The C++ decoder says what plain torch says, whatever else is in the batch."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import (
    AttentionPartial,
    DecoderShape,
    Elsewhere,
    Exchanged,
    LayerWeights,
    PagedRows,
    StepKv,
    select_decoder,
)
from kernels.decoder import Decoder, DecoderBuilder
from kernels.native.decoder import NativeDecoder, NativeDecoderBuilder, supports
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from kernels.torch_decoder import TorchDecoder, TorchDecoderBuilder

CPU = torch.device("cpu")
#: Sizes that fill no panel, no tile and no block of rows.
SHAPE = DecoderShape(
    hidden_size=80,
    intermediate_size=144,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    rms_norm_eps=1e-5,
)
VOCAB_SIZE = 101
NUM_LAYERS = 2
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 3
#: With bfloat16, activations may be rounded to it as well.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_weights(shape: DecoderShape, dtype: torch.dtype, layer: int) -> LayerWeights:
    """Exact in `dtype`, so that the implementations differ in their sums only."""

    def matrix(num_out: int, num_in: int, seed: int) -> Tensor:
        values = random(num_out, num_in, seed=seed + 20 * layer)
        return (values / sqrt(num_in)).to(dtype).float()

    hidden, inner = shape.hidden_size, shape.intermediate_size
    return LayerWeights(
        attention_norm=random(hidden, seed=1),
        qkv=matrix(shape.q_size + 2 * shape.kv_size, hidden, 2),
        attention_out=matrix(hidden, shape.q_size, 3),
        mlp_norm=random(hidden, seed=4),
        gate=matrix(inner, hidden, 5),
        up=matrix(inner, hidden, 6),
        down=matrix(hidden, inner, 7),
    )


def angles(num_rows: int) -> tuple[Tensor, Tensor]:
    angle = random(num_rows, SHAPE.head_dim // 2, seed=8)
    return angle.cos(), angle.sin()


class Rows:
    """Rows of a step, each a sequence of its own whose context lies in blocks of its own."""

    def __init__(self, num_rows: int) -> None:
        self.hidden = random(num_rows, SHAPE.hidden_size, seed=9)
        self.cos, self.sin = angles(num_rows)
        blocks = num_rows * BLOCKS_PER_ROW
        self.pool = random(blocks, NUM_LAYERS, 2, 2, BLOCK_SIZE, SHAPE.head_dim, seed=11)
        self.kv_len = [1 + row * 7 % (BLOCKS_PER_ROW * BLOCK_SIZE) for row in range(num_rows)]

    def run(self, decoder: Decoder, first: int = 0, elsewhere: Elsewhere | None = None) -> Tensor:
        """The hidden states of rows first.. after all layers."""
        num_rows = len(self.hidden) - first
        rows = PagedRows.build(
            [1] * num_rows,
            [self._blocks(row) for row in range(first, len(self.hidden))],
            self.kv_len[first:],
            causal=True,
            num_blocks=len(self.pool),
            block_size=BLOCK_SIZE,
        )
        hidden, cos, sin = (part[first:].clone() for part in (self.hidden, self.cos, self.sin))
        kv = StepKv(self.pool.clone(), self._slots()[first:], rows)
        decoder.run(hidden, cos, sin, kv, elsewhere)
        return hidden

    def _slots(self) -> Tensor:
        """Of each row's own token, the last of its context."""
        first = torch.arange(len(self.hidden)) * BLOCKS_PER_ROW * BLOCK_SIZE
        return first + torch.tensor(self.kv_len, dtype=torch.int64) - 1

    def _blocks(self, row: int) -> range:
        return range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW)


class Creditor:
    """Holds the same for every row; remembers what it was asked."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []

    def wired(self) -> None:
        return None

    def finish(self, exchanged: Sequence[Exchanged]) -> None:
        raise AssertionError("nothing is wired")

    def ask(self, layer: int, query: Tensor) -> None:
        assert layer == len(self.queries)
        self.queries.append(query.clone())

    def merge_into(self, layer: int, partial: AttentionPartial) -> None:
        rows, heads, dim = partial.acc.shape
        values = random(heads, dim, seed=layer)
        held = AttentionPartial(
            values.expand(rows, heads, dim).contiguous(),
            self.queries[layer].sum(-1),
            torch.ones(rows, heads),
        )
        ReferenceKernels().merge_rows(partial, torch.arange(rows), held)


def build(builder: DecoderBuilder, dtype: torch.dtype, shape: DecoderShape = SHAPE) -> Any:
    for layer in range(NUM_LAYERS):
        builder.add_layer(make_weights(shape, dtype, layer))
    head = random(VOCAB_SIZE, shape.hidden_size, seed=2).to(dtype).float() / 9
    return builder.build(random(shape.hidden_size, seed=1), head)


def plain(dtype: torch.dtype) -> TorchDecoder:
    decoder = build(TorchDecoderBuilder(ReferenceKernels(), SHAPE, torch.float32, CPU), dtype)
    assert isinstance(decoder, TorchDecoder)
    return decoder


def compiled(native: NativeKernels, dtype: torch.dtype) -> NativeDecoder:
    decoder = build(NativeDecoderBuilder(native, SHAPE, dtype), dtype)
    assert isinstance(decoder, NativeDecoder)
    return decoder


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 17, 33, 70])
def test_the_layers_equal_torch(native: NativeKernels, dtype: torch.dtype, num_rows: int) -> None:
    rows = Rows(num_rows)
    actual, expected = rows.run(compiled(native, dtype)), rows.run(plain(dtype))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[dtype])


@DTYPES
def test_parts_elsewhere_are_merged_in_every_layer(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    rows, creditors = Rows(5), (Creditor(), Creditor())
    actual = rows.run(compiled(native, dtype), elsewhere=creditors[0])
    expected = rows.run(plain(dtype), elsewhere=creditors[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[dtype])
    assert len(creditors[0].queries) == len(creditors[1].queries) == NUM_LAYERS
    assert not torch.allclose(actual, rows.run(compiled(native, dtype)), atol=0.1)


def test_nothing_elsewhere_changes_no_bit(native: NativeKernels) -> None:
    """One call for all layers, or one for each part of each, is the same."""

    class Nobody(Creditor):
        def merge_into(self, layer: int, partial: AttentionPartial) -> None:
            pass

    rows, decoder = Rows(20), compiled(native, torch.bfloat16)
    assert torch.equal(rows.run(decoder, elsewhere=Nobody()), rows.run(decoder))


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_head_equals_torch(native: NativeKernels, dtype: torch.dtype, num_rows: int) -> None:
    hidden = random(num_rows, SHAPE.hidden_size, seed=3)
    actual, expected = compiled(native, dtype).logits(hidden), plain(dtype).logits(hidden)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 37, 101])
def test_the_likeliest_token_is_the_first_of_the_greatest(
    native: NativeKernels, vocab_size: int
) -> None:
    logits = random(9, vocab_size, seed=4).round(decimals=1)  # so that there are equals
    logits[0, :] = -torch.inf
    logits[1, -1] = torch.inf
    expected = plain(torch.float32).likeliest(logits)
    assert compiled(native, torch.float32).likeliest(logits) == expected
    logits[1, 0] = torch.nan
    assert compiled(native, torch.float32).likeliest(logits[1:2]) == [vocab_size - 1]


@DTYPES
def test_neither_other_rows_nor_threads_change_a_bit(
    native: NativeKernels, cache_dir: Path, dtype: torch.dtype
) -> None:
    rows = Rows(70)
    batched = rows.run(compiled(native, dtype))
    alone = compiled(NativeKernels(1, cache_dir), dtype)
    for first in (0, 7, 33, 69):
        assert torch.equal(rows.run(alone, first), batched[first:])


def test_rows_of_nan_stay_alone(native: NativeKernels) -> None:
    rows, decoder = Rows(5), compiled(native, torch.bfloat16)
    clean = rows.run(decoder)
    rows.hidden[2] = torch.nan
    spoilt = rows.run(decoder)
    assert spoilt[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(spoilt[kept], clean[kept])


def test_no_rows_are_no_work(native: NativeKernels) -> None:
    decoder = compiled(native, torch.float32)
    assert len(Rows(1).run(decoder, first=1)) == 0


def test_the_time_of_attention_is_kept_apart(native: NativeKernels) -> None:
    decoder = compiled(native, torch.float32)
    Rows(3).run(decoder)
    first_s = decoder.attention_s
    Rows(3).run(decoder)
    assert 0 < first_s < decoder.attention_s


def test_sizes_that_vectors_do_not_divide_are_left_to_torch(native: NativeKernels) -> None:
    odd = replace(SHAPE, intermediate_size=150)
    assert not supports(odd)
    assert isinstance(select_decoder(native, odd, torch.float32, CPU), TorchDecoderBuilder)
    assert isinstance(select_decoder(native, SHAPE, torch.float32, CPU), NativeDecoderBuilder)


def test_other_kernels_leave_layers_to_torch() -> None:
    chosen = select_decoder(ReferenceKernels(), SHAPE, torch.bfloat16, CPU)
    assert isinstance(chosen, TorchDecoderBuilder)


def test_wrong_shapes_are_refused(native: NativeKernels) -> None:
    decoder, rows = compiled(native, torch.float32), Rows(2)

    def refused(message: str, **changes: Any) -> None:
        wrong = copy(rows)
        wrong.__dict__.update(changes)
        with pytest.raises(ValueError, match=message):
            wrong.run(decoder)

    refused("hidden must be", hidden=rows.hidden[:, 1:])
    refused("cos must be", cos=rows.cos[:1])
    refused("sin must be", sin=rows.sin.double())
    refused("a pool of 1 KV heads, not 2", pool=rows.pool[:, :, :, :1].contiguous())
    refused("of a pool of 1 layers", pool=rows.pool[:, :1].contiguous())
    refused("block ids must lie", pool=rows.pool[:2])
    with pytest.raises(ValueError, match="hidden must be"):
        decoder.logits(rows.hidden[:, 1:])
    builder = NativeDecoderBuilder(native, SHAPE, torch.float32)
    with pytest.raises(ValueError, match="second must be"):
        builder.add_layer(replace(make_weights(SHAPE, torch.float32, 0), up=random(3, 80, seed=1)))
