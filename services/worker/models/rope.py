"""The angles of rotary position embedding, from a table."""

import torch
from torch import Tensor


class RopeTable:
    """Of every position up to the model's longest context."""

    def __init__(
        self, head_dim: int, theta: float, num_positions: int, device: torch.device
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(num_positions).float(), 1.0 / theta**exponents)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def read(self, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Into cos and sin, [T, head_dim / 2] each; once per step for all layers."""
        torch.index_select(self._cos, 0, positions, out=cos)
        torch.index_select(self._sin, 0, positions, out=sin)
