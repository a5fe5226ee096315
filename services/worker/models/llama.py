"""The forward of the Llama family over packed tokens, called by the engine's runner once a step.

Tokens of all sequences lie in one dimension; which belong together says the step's KV. Activations
are float32 whatever the weights are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decoder import Decoder, Elsewhere, StepKv
from services.worker.models.config import ModelConfig
from services.worker.models.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LlamaParts:
    embedding: Tensor
    decoder: Decoder
    rope: RopeTable


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens that one step computes, of all sequences one after the other; int64."""

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    """Whose logits are wanted."""


class LlamaFamilyModel:
    def __init__(self, config: ModelConfig, parts: LlamaParts) -> None:
        self.config = config
        self._parts = parts

    @torch.inference_mode()
    def forward(
        self, tokens: PackedTokens, kv: StepKv, elsewhere: Elsewhere | None = None
    ) -> Tensor:
        """Logits [logits_rows, vocab_size] float32; the next forward overwrites them."""
        hidden = self._parts.embedding[tokens.token_ids].float()
        cos, sin = self._parts.rope.at(tokens.positions)
        self._parts.decoder.run(hidden, cos, sin, kv, elsewhere)
        if tokens.logits_rows.numel() == 0:
            return hidden.new_empty(0, self.config.vocab_size)
        return self._parts.decoder.logits(hidden[tokens.logits_rows])

    def likeliest(self, logits: Tensor) -> list[int]:
        """The token of the greatest logit of each row."""
        return self._parts.decoder.likeliest(logits)
