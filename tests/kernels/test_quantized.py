"""Weights that stay in blocks give bit by bit what they give as bfloat16."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kernels import DecoderShape, LayerWeights, QuantizedMatrix
from kernels.native.decoder import NativeDecoder, NativeDecoderBuilder
from kernels.native.kernels import NativeKernels
from kernels.quantized import BlockKind, concatenate, of_one_kind
from kernels.reference import ReferenceKernels
from kernels.torch_decoder import TorchDecoderBuilder
from tests.kernels.test_decoder import SHAPE as ODD_SHAPE
from tests.kernels.test_decoder import Rows, random

KINDS = pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
#: Whole blocks, but neither whole panels nor pairs of tiles.
SHAPE = replace(ODD_SHAPE, hidden_size=96, intermediate_size=160, num_heads=4, head_dim=24)

MakeKernels = Callable[[int], NativeKernels]


def quantize(weight: Tensor, kind: BlockKind) -> QuantizedMatrix:
    blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return QuantizedMatrix(torch.from_numpy(blocks), kind)


def matrix(num_out: int, num_in: int, kind: BlockKind, seed: int = 1) -> QuantizedMatrix:
    return quantize(random(num_out, num_in, seed=seed) / sqrt(num_in), kind)


@pytest.fixture(params=["fastest", "plain"])
def make_kernels(request: pytest.FixtureRequest, cache_dir: Path) -> MakeKernels:
    """By their number of threads; laid out for the CPU's matrix unit, if any, and without."""

    def make(num_threads: int) -> NativeKernels:
        kernels = NativeKernels(num_threads, cache_dir)
        if request.param == "plain":
            kernels.library = replace(kernels.library, fastest_format=lambda format: format)
        return kernels

    return make


def head_of(kernels: NativeKernels, head: QuantizedMatrix | Tensor) -> NativeDecoder:
    """A decoder without layers, whose logits are a norm's product with the head."""
    hidden_size = head.shape[1]
    shape = replace(SHAPE, hidden_size=hidden_size)
    builder = NativeDecoderBuilder(kernels, shape, torch.bfloat16)
    return builder.build(torch.ones(hidden_size), head)


@KINDS
def test_the_numbers_are_those_of_gguf(kind: BlockKind) -> None:
    quantized = matrix(5, 96, kind)
    expected = gguf.quants.dequantize(quantized.blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(quantized.float(), torch.from_numpy(expected))
    some = torch.tensor([3, 0, 3])
    assert torch.equal(quantized[some].float(), quantized.float()[some])


@KINDS
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 32), (37, 96), (64, 64), (101, 1504)])
def test_products_equal_those_of_bfloat16_and_come_close_to_float64(
    make_kernels: MakeKernels, kind: BlockKind, num_out: int, num_in: int
) -> None:
    head, kernels = matrix(num_out, num_in, kind), make_kernels(2)
    quantized, expanded = head_of(kernels, head), head_of(kernels, head.float())
    for num_rows in range(1, 41):
        hidden = random(num_rows, num_in, seed=num_rows)
        logits = quantized.logits(hidden)
        assert torch.equal(logits, expanded.logits(hidden))
        normed = torch.nn.functional.rms_norm(hidden.double(), (num_in,), eps=1e-5)
        exact = normed @ head.float().double().T
        torch.testing.assert_close(logits.double(), exact, rtol=0, atol=2e-2)


@KINDS
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_neither_other_rows_nor_threads_change_a_bit(
    make_kernels: MakeKernels, kind: BlockKind, num_threads: int
) -> None:
    head = matrix(101, 160, kind)
    hidden = random(70, 160, seed=3)
    together = head_of(make_kernels(num_threads), head).logits(hidden)
    alone = head_of(make_kernels(1), head)
    for row in (0, 15, 16, 33, 69):
        assert torch.equal(alone.logits(hidden[row : row + 1])[0], together[row])


def make_layer(shape: DecoderShape, kind: BlockKind) -> LayerWeights:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return LayerWeights(
        attention_norm=random(hidden, seed=1),
        qkv=matrix(shape.q_size + 2 * shape.kv_size, hidden, kind, 2),
        attention_out=matrix(hidden, shape.q_size, kind, 3),
        mlp_norm=random(hidden, seed=4),
        gate=matrix(inner, hidden, kind, 5),
        up=matrix(inner, hidden, kind, 6),
        down=matrix(hidden, inner, kind, 7),
    )


def expanded(layer: LayerWeights) -> LayerWeights:
    names = ("qkv", "attention_out", "gate", "up", "down")
    return replace(layer, **{name: getattr(layer, name).float() for name in names})


def build(builder: Any, layers: list[LayerWeights]) -> Any:
    for layer in layers:
        builder.add_layer(layer)
    return builder.build(random(SHAPE.hidden_size, seed=1), matrix(7, SHAPE.hidden_size, "Q8_0"))


class ShapedRows(Rows):
    """Rows of a step of SHAPE."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.hidden = random(num_rows, SHAPE.hidden_size, seed=9)


@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_layers_of_mixed_kinds_equal_those_of_bfloat16(
    make_kernels: MakeKernels, num_rows: int
) -> None:
    layers = [make_layer(SHAPE, "Q4_1"), make_layer(SHAPE, "Q8_0")]
    kernels, rows = make_kernels(2), ShapedRows(num_rows)
    builders = [NativeDecoderBuilder(kernels, SHAPE, torch.bfloat16) for _ in range(2)]
    quantized = rows.run(build(builders[0], layers))
    assert torch.equal(quantized, rows.run(build(builders[1], [expanded(x) for x in layers])))
    plain = TorchDecoderBuilder(ReferenceKernels(), SHAPE, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(quantized, rows.run(build(plain, layers)), rtol=0, atol=5e-2)


def test_they_take_no_more_memory_than_in_the_file(native: NativeKernels) -> None:
    layer = make_layer(SHAPE, "Q4_1")
    head = matrix(64, SHAPE.hidden_size, "Q8_0")
    builder = NativeDecoderBuilder(native, SHAPE, torch.bfloat16)
    builder.add_layer(layer)
    matrices = (layer.qkv, layer.attention_out, layer.gate, layer.up, layer.down, head)
    file_bytes = sum(m.blocks.nbytes for m in matrices if isinstance(m, QuantizedMatrix))
    assert builder.build(layer.mlp_norm, head).weight_bytes == file_bytes


def test_parts_of_different_kinds_become_numbers() -> None:
    four, eight = matrix(3, 64, "Q4_1"), matrix(2, 64, "Q8_0")
    whole = concatenate([four, four])
    assert isinstance(whole, QuantizedMatrix)
    assert torch.equal(whole.float(), torch.cat([four.float(), four.float()]))
    mixed = concatenate([four, eight])
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed, torch.cat([four.float(), eight.float()]))
    assert all(isinstance(part, Tensor) for part in of_one_kind([four, eight.float()]))


def test_what_are_no_blocks_is_refused(native: NativeKernels) -> None:
    with pytest.raises(ValueError, match="kind 'Q9_9' are unknown"):
        QuantizedMatrix(torch.zeros(2, 40, dtype=torch.uint8), "Q9_9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are no Q4_1 blocks"):
        QuantizedMatrix(torch.zeros(2, 41, dtype=torch.uint8), "Q4_1")
    layer = make_layer(SHAPE, "Q4_1")
    builder = NativeDecoderBuilder(native, SHAPE, torch.bfloat16)
    up = matrix(SHAPE.intermediate_size, SHAPE.hidden_size, "Q8_0", 6)
    with pytest.raises(ValueError, match="second must not be Q8_0 beside another kind"):
        builder.add_layer(replace(layer, up=up))
