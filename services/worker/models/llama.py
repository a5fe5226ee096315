"""The forward of the Llama family over packed tokens, called by the engine's runner once a step.

Tokens of all sequences lie in one dimension; which belong together says the step's KV. Activations
are float32 whatever the weights are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decoder import Decoder, Elsewhere, StepKv
from services.worker.models.config import ModelConfig
from services.worker.models.embedding import Embedding
from services.worker.models.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LlamaParts:
    embedding: Embedding
    decoder: Decoder
    rope: RopeTable


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens that one step computes, of all sequences one after the other; int64."""

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    """Whose logits are wanted."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What lies between the parts, for so many tokens; used again by every forward."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    last: Tensor
    """Rows of `hidden` whose logits are wanted."""

    @classmethod
    def allocate(cls, config: ModelConfig, device: torch.device, num_tokens: int) -> "_Room":
        def floats(size: int) -> Tensor:
            return torch.empty(num_tokens, size, device=device)

        hidden, half = config.hidden_size, config.head_dim // 2
        return cls(floats(hidden), floats(half), floats(half), floats(hidden))

    def first(self, num_tokens: int, num_last: int) -> "_Room":
        return _Room(
            self.hidden[:num_tokens],
            self.cos[:num_tokens],
            self.sin[:num_tokens],
            self.last[:num_last],
        )


class LlamaFamilyModel:
    def __init__(self, config: ModelConfig, parts: LlamaParts) -> None:
        self.config = config
        self._parts = parts
        self._room = _Room.allocate(config, parts.embedding.device, 0)

    @torch.inference_mode()
    def forward(
        self, tokens: PackedTokens, kv: StepKv, elsewhere: Elsewhere | None = None
    ) -> Tensor:
        """Logits [logits_rows, vocab_size] float32; the next forward overwrites them."""
        parts, token_ids, wanted = self._parts, tokens.token_ids, tokens.logits_rows
        if len(token_ids) > len(self._room.hidden):
            self._room = _Room.allocate(self.config, parts.embedding.device, len(token_ids))
        room = self._room.first(len(token_ids), len(wanted))
        parts.embedding.read(token_ids, room.hidden)
        parts.rope.read(tokens.positions, room.cos, room.sin)
        parts.decoder.run(room.hidden, room.cos, room.sin, kv, elsewhere)
        if len(wanted) == 0:
            return room.hidden.new_empty(0, self.config.vocab_size)
        torch.index_select(room.hidden, 0, wanted, out=room.last)
        return parts.decoder.logits(room.last)

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the matrices."""
        return self._parts.decoder.weight_bytes

    def likeliest(self, logits: Tensor) -> list[int]:
        """The token of the greatest logit of each row."""
        return self._parts.decoder.likeliest(logits)
