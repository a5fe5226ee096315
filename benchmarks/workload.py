"""What every engine is asked to do, and how long it took. Plain Python: peers run it, too."""

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Workload:
    decode_batches: tuple[int, ...] = (1, 8, 32)
    context_tokens: int = 256
    """In the middle of the measured decode steps."""
    prefill_tokens: tuple[int, ...] = (512, 4096)
    num_warmup_steps: int = 4
    num_steps: int = 48
    num_prefills: int = 3
    vocab_size: int = 49152

    @classmethod
    def quick(cls) -> Self:
        return replace(cls(), num_steps=12, num_prefills=1)

    @property
    def prompt_tokens(self) -> int:
        """Of a decode: the context without what is generated until the middle."""
        return self.context_tokens - self.num_warmup_steps - self.num_steps // 2

    @property
    def max_new_tokens(self) -> int:
        """More than a decode is run for, so that no sequence ends while others are measured."""
        return 2 * (self.num_warmup_steps + self.num_steps) + max(self.decode_batches)

    @property
    def max_sequence_tokens(self) -> int:
        return max(self.prompt_tokens + self.max_new_tokens, max(self.prefill_tokens) + 1)

    def blocks_needed(self, block_size: int) -> int:
        """KV memory for whatever runs at once, and a block each to spare."""
        num_sequences = max(self.decode_batches)
        decode_tokens = num_sequences * (self.prompt_tokens + self.max_new_tokens)
        tokens = max(decode_tokens, max(self.prefill_tokens))
        return -(-tokens // block_size) + 2 * num_sequences

    def prompts(self, num: int, num_tokens: int, seed: int) -> list[list[int]]:
        """Random tokens: no two prompts share a prefix that a cache could use."""
        source = random.Random(f"{seed} {num} {num_tokens}")
        return [[source.randrange(self.vocab_size) for _ in range(num_tokens)] for _ in range(num)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        for name in ("decode_batches", "prefill_tokens"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds: of one decode step by batch size, of one prefill by its tokens."""

    step_s: dict[int, float]
    prefill_s: dict[int, float]

    @property
    def decode_tokens_per_s(self) -> dict[int, float]:
        return {batch: batch / step_s for batch, step_s in self.step_s.items()}

    @property
    def prefill_tokens_per_s(self) -> dict[int, float]:
        return {num_tokens: num_tokens / s for num_tokens, s in self.prefill_s.items()}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(*({int(k): float(v) for k, v in fields[f].items()} for f in cls.__slots__))
