"""Reads single tensors from a folder of safetensors, one file or many shards.

Tensors are read one at a time, so that loading needs the model plus one layer, not the model twice.
Of a folder that was converted from a GGUF file, matrices can be had in that file's own blocks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels import QuantizedMatrix, Weight
from services.common.errors import ConfigError
from services.common.model_store.folder import QUANTIZED_FILE

_SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Checkpoint:
    """The weights on disk by name; float32 tensors stay mapped and so are shared by instances."""

    def __init__(self, files: Mapping[str, safe_open], folder: Path) -> None:
        self._files = files
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Shards are found by what they hold, so that the index file is not needed."""
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            shard = _open(path)
            names = shard.keys()  # type: ignore[no-untyped-call]
            files.update(dict.fromkeys(names, shard))
        if not files:
            raise ConfigError(f"{folder} holds no weights in *.safetensors")
        return cls(files, folder)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in float32 (exact for what is stored in 16 bits)."""
        if name not in self._files:
            raise ConfigError(f"the weights in {self._folder} lack {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape or tensor.dtype not in _SERVED_DTYPES:
            raise ConfigError(
                f"{name!r} in {self._folder} is {tensor.dtype} {tuple(tensor.shape)}, not {shape}"
            )
        return tensor.float()

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return self.read(name, shape)


class QuantizedCheckpoint(Checkpoint):
    """Matrices in blocks where the folder has them so, all else in float32."""

    def __init__(self, files: Mapping[str, safe_open], folder: Path) -> None:
        super().__init__(files, folder)
        path = folder / QUANTIZED_FILE
        if not path.is_file():
            raise ConfigError(
                f"{folder} holds no quantised weights: dtype 'quantized' is for models that were "
                "converted from a GGUF file with Q4_1 or Q8_0 matrices"
            )
        self._blocks = _open(path)
        self._kinds: dict[str, Any] = self._blocks.metadata() or {}  # type: ignore[no-untyped-call]

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        if name not in self._kinds:
            return self.read(name, shape)
        try:
            blocks: Tensor = self._blocks.get_tensor(name)  # type: ignore[no-untyped-call]
            matrix = QuantizedMatrix(blocks, self._kinds[name])
        except (SafetensorError, ValueError) as error:
            raise ConfigError(f"{name!r} in {self._folder / QUANTIZED_FILE}: {error}") from error
        if matrix.shape != shape:
            raise ConfigError(
                f"{name!r} in {self._folder / QUANTIZED_FILE} is {tuple(matrix.shape)}, not {shape}"
            )
        return matrix


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
