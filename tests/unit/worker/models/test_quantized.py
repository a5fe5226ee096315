"""Folders with matrices in blocks, and folders without."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from kernels import Kernels
from kernels.reference import ReferenceKernels
from services.common.errors import ConfigError
from services.common.model_store.folder import QUANTIZED_FILE
from services.worker.models.load import load_model
from tests.unit.worker.models.conftest import SaveTiny, load_oracle
from tests.unit.worker.models.packed import PackedRun

PROMPTS = [[5, 17, 3, 88, 41], [9], [60, 61, 2, 7, 7, 7, 30, 11, 12, 13, 14]]
#: Whole blocks.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
KINDS = {"embed_tokens": "Q8_0", "v_proj": "Q8_0", "up_proj": "Q8_0"}


def tensor_names(file: Any) -> list[str]:
    names: list[str] = file.keys()
    return names


@pytest.fixture
def folder(save_tiny: SaveTiny) -> Path:
    """Its weights are what its blocks hold; some matrices of a layer are of another kind."""
    folder = save_tiny(tie_word_embeddings=True, **SIZES)
    blocks: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    weights: dict[str, Any] = {}
    path = folder / "model.safetensors"
    with safe_open(str(path), framework="numpy") as file:
        for name in tensor_names(file):
            weights[name] = weight = file.get_tensor(name)
            if weight.ndim < 2 or "layers.1.mlp.down" in name:
                continue
            kinds[name] = next((kind for part, kind in KINDS.items() if part in name), "Q4_1")
            kind = gguf.GGMLQuantizationType[kinds[name]]
            blocks[name] = gguf.quants.quantize(weight, kind)
            weights[name] = gguf.quants.dequantize(blocks[name], kind)
    save_file(weights, path, metadata={"format": "pt"})
    (folder / QUANTIZED_FILE).parent.mkdir()
    save_file(blocks, folder / QUANTIZED_FILE, metadata=kinds)
    return folder


def oracle_logits(folder: Path) -> Tensor:
    oracle = load_oracle(folder)
    with torch.inference_mode():
        return torch.cat([oracle(torch.tensor([prompt])).logits[0, -1:] for prompt in PROMPTS])


def test_logits_are_close_to_transformers(folder: Path, any_kernels: Kernels) -> None:
    expected = oracle_logits(folder)
    logits = PackedRun(load_model(folder, "quantized", "cpu", any_kernels), 3).step(PROMPTS)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_only_the_compiled_kernels_keep_blocks(folder: Path, any_kernels: Kernels) -> None:
    model = load_model(folder, "quantized", "cpu", any_kernels)
    whole = load_model(folder, "bfloat16", "cpu", any_kernels)
    share = model.weight_bytes / whole.weight_bytes
    assert share == 1 if isinstance(any_kernels, ReferenceKernels) else share < 1


def test_a_folder_without_blocks_is_refused(save_tiny: SaveTiny, any_kernels: Kernels) -> None:
    with pytest.raises(ConfigError, match="holds no quantised weights: dtype 'quantized' is for"):
        load_model(save_tiny(), "quantized", "cpu", any_kernels)


@pytest.mark.parametrize(
    ("kind", "row_bytes", "message"),
    [
        ("Q9_9", 40, "kind 'Q9_9' are unknown"),
        ("Q4_1", 39, "are no Q4_1 blocks"),
        ("Q4_1", 60, r"is \(97, 96\), not \(97, 64\)"),
    ],
)
def test_other_blocks_are_refused_by_name(
    folder: Path, any_kernels: Kernels, kind: str, row_bytes: int, message: str
) -> None:
    name = "model.embed_tokens.weight"
    blocks = torch.zeros(97, row_bytes, dtype=torch.uint8).numpy()
    save_file({name: blocks}, folder / QUANTIZED_FILE, metadata={name: kind})
    with pytest.raises(ConfigError, match=rf"^'model\.embed_tokens\.weight' in .*{message}"):
        load_model(folder, "quantized", "cpu", any_kernels)


def test_a_broken_file_of_blocks_is_a_config_error(folder: Path, any_kernels: Kernels) -> None:
    (folder / QUANTIZED_FILE).write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="cannot read"):
        load_model(folder, "quantized", "cpu", any_kernels)
