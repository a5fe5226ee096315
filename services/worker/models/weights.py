"""Reads single tensors from a folder of safetensors, one file or many shards.

Tensors are read one at a time, so that loading needs the model plus one layer, not the model twice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.errors import ConfigError

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
            try:
                shard = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
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
