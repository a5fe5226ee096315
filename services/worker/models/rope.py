"""Rotary position embedding from a table, over query and key heads at once."""

import torch
from torch import Tensor


class RopeTable:
    """The angles of every position up to the model's longest context."""

    def __init__(self, head_dim: int, theta: float, num_positions: int) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(num_positions).float(), 1.0 / theta**exponents)
        self._cos = angles.cos()
        self._sin = angles.sin()

    def to(self, device: torch.device) -> "RopeTable":
        self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [T, 1, head_dim], once per step for all layers."""
        cos, sin = self._cos[positions], self._sin[positions]
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """heads [T, any, head_dim], its halves rotated against each other."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
