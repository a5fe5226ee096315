"""The C++ decoder says what plain torch says, whatever else is in the batch."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import DecoderShape, LayerWeights, select_decoder
from kernels.decoder import DecoderKernels, DecoderLayer
from kernels.native.decoder import NativeDecoder, supports
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels
from kernels.torch_decoder import TorchDecoder

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
#: With bfloat16, activations may be rounded to it as well.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_weights(shape: DecoderShape, dtype: torch.dtype) -> LayerWeights:
    """Exact in `dtype`, so that the implementations differ in their sums only."""

    def matrix(num_out: int, num_in: int, seed: int) -> Tensor:
        return (random(num_out, num_in, seed=seed) / sqrt(num_in)).to(dtype).float()

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


def run(layer: DecoderLayer, num_rows: int, first: int = 0) -> list[Tensor]:
    """Everything that a layer computes of rows first..num_rows of the same input."""
    hidden = random(num_rows, SHAPE.hidden_size, seed=9)[first:].clone()
    attended = random(num_rows, SHAPE.q_size, seed=10)[first:]
    cos, sin = angles(num_rows)
    heads = [part.clone() for part in layer.before_attention(hidden, cos[first:], sin[first:])]
    layer.after_attention(hidden, attended)
    return [*heads, hidden]


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 17, 33, 70])
def test_a_layer_equals_torch(native: NativeKernels, dtype: torch.dtype, num_rows: int) -> None:
    weights = make_weights(SHAPE, dtype)
    actual = run(NativeDecoder(native, SHAPE, dtype).layer(weights), num_rows)
    expected = run(TorchDecoder(SHAPE, torch.float32, CPU).layer(weights), num_rows)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_head_equals_torch(native: NativeKernels, dtype: torch.dtype, num_rows: int) -> None:
    norm = random(SHAPE.hidden_size, seed=1)
    weight = random(VOCAB_SIZE, SHAPE.hidden_size, seed=2).to(dtype).float() / 9
    hidden = random(num_rows, SHAPE.hidden_size, seed=3)
    decoders: list[DecoderKernels] = [
        NativeDecoder(native, SHAPE, dtype),
        TorchDecoder(SHAPE, torch.float32, CPU),
    ]
    actual, expected = (decoder.head(norm, weight).logits(hidden) for decoder in decoders)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCES[dtype])


@DTYPES
def test_neither_other_rows_nor_threads_change_a_bit(
    native: NativeKernels, cache_dir: Path, dtype: torch.dtype
) -> None:
    weights = make_weights(SHAPE, dtype)
    batched = run(NativeDecoder(native, SHAPE, dtype).layer(weights), 70)
    alone = NativeDecoder(NativeKernels(1, cache_dir), SHAPE, dtype).layer(weights)
    for first in (0, 7, 33, 69):
        for one, all_rows in zip(run(alone, 70, first), batched, strict=True):
            assert torch.equal(one, all_rows[first:])


def test_rows_of_nan_stay_alone(native: NativeKernels) -> None:
    layer = NativeDecoder(native, SHAPE, torch.bfloat16).layer(make_weights(SHAPE, torch.bfloat16))
    clean = run(layer, 5)[-1]
    hidden = random(5, SHAPE.hidden_size, seed=9)
    hidden[2] = torch.nan
    layer.after_attention(hidden, random(5, SHAPE.q_size, seed=10))
    assert hidden[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(hidden[kept], clean[kept])


def test_no_rows_are_no_work(native: NativeKernels) -> None:
    layer = NativeDecoder(native, SHAPE, torch.float32).layer(make_weights(SHAPE, torch.float32))
    assert all(len(part) == 0 for part in run(layer, 0))


def test_sizes_that_vectors_do_not_divide_are_left_to_torch(native: NativeKernels) -> None:
    odd = replace(SHAPE, intermediate_size=150)
    assert not supports(odd)
    assert isinstance(select_decoder(native, odd, torch.float32, CPU), TorchDecoder)
    assert isinstance(select_decoder(native, SHAPE, torch.float32, CPU), NativeDecoder)


def test_other_kernels_leave_layers_to_torch() -> None:
    chosen = select_decoder(ReferenceKernels(), SHAPE, torch.bfloat16, CPU)
    assert isinstance(chosen, TorchDecoder)


def test_wrong_shapes_are_refused(native: NativeKernels) -> None:
    decoder = NativeDecoder(native, SHAPE, torch.float32)
    layer = decoder.layer(make_weights(SHAPE, torch.float32))
    hidden, (cos, sin) = random(2, SHAPE.hidden_size, seed=1), angles(2)
    with pytest.raises(ValueError, match="hidden must be"):
        layer.before_attention(hidden[:, 1:], cos, sin)
    with pytest.raises(ValueError, match="cos must be"):
        layer.before_attention(hidden, cos[:1], sin)
    with pytest.raises(ValueError, match="sin must be"):
        layer.before_attention(hidden, cos, sin.double())
    with pytest.raises(ValueError, match="attended must be"):
        layer.after_attention(hidden, random(3, SHAPE.q_size, seed=1))
    head = decoder.head(random(SHAPE.hidden_size, seed=1), random(5, SHAPE.hidden_size, seed=2))
    with pytest.raises(ValueError, match="hidden must be"):
        head.logits(hidden[:, 1:])
    with pytest.raises(ValueError, match="second must be"):
        decoder.layer(replace(make_weights(SHAPE, torch.float32), up=random(3, 80, seed=1)))
