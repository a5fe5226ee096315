"""Short requests with a few long ones among them, in the measure of one instance's memory. Pure.

What varies is the tail: how long the long ones are, and whether one instance could hold them.
"""

import random
from dataclasses import dataclass
from typing import Self

UNIFORM = "uniform"
#: The shares of one instance's memory that the long requests fill, from the least to the most.
TAILS = {"low": (0.3, 0.6), "middle": (0.5, 1.0), "high": (0.5, 1.6)}
_SHARE_OF_LONG = 0.12
#: Of a long request the rest is generated.
_SHARE_OF_PROMPT = 0.75
_SHORT_PROMPT = (24, 72)
_SHORT_OUTPUT = (48, 112)
_MEAN_GAP_S = 0.1
VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace."""

    at_s: float
    prompt: tuple[int, ...]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    jobs: tuple[Job, ...]

    @classmethod
    def generate(cls, name: str, num_jobs: int, capacity_tokens: int, seed: int = 0) -> Self:
        """The same for the same arguments. Long requests come spread over the first two thirds, so
        that none runs alone at the end."""
        source = random.Random(f"{name} {num_jobs} {capacity_tokens} {seed}")
        num_long = 0 if name == UNIFORM else round(_SHARE_OF_LONG * num_jobs)
        places = source.sample(range(2 * num_jobs // 3), num_long)
        at_s, jobs = 0.0, []
        for index in range(num_jobs):
            at_s += source.expovariate(1 / _MEAN_GAP_S)
            num_prompt, num_output = _size(name, index in places, capacity_tokens, source)
            prompt = tuple(source.randrange(VOCABULARY) for _ in range(num_prompt))
            jobs.append(Job(at_s, prompt, num_output))
        return cls(name, tuple(jobs))


def _size(name: str, is_long: bool, capacity_tokens: int, source: random.Random) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    if name == UNIFORM:
        return sum(_SHORT_PROMPT) // 2, sum(_SHORT_OUTPUT) // 2
    if not is_long:
        return source.randint(*_SHORT_PROMPT), source.randint(*_SHORT_OUTPUT)
    num_tokens = int(capacity_tokens * source.uniform(*TAILS[name]))
    num_prompt = int(num_tokens * _SHARE_OF_PROMPT)
    return num_prompt, num_tokens - num_prompt
