"""Users with short requests, and a few with long ones, measured by one instance's memory. Pure.

What varies is the tail: how much of one instance the long requests fill. The sizes follow the
paper's section 1: the batch at which an instance of short requests is full (`MAX_BATCH`) uses half
of its memory, and a long request leaves little of it for others.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

UNIFORM = "uniform"
#: The shares of one instance's memory that the long requests fill, from the least to the most.
TAILS = {"low": (0.5, 0.7), "middle": (0.7, 0.9), "high": (0.9, 0.99)}
#: Requests that an instance runs at once.
MAX_BATCH = 8
#: Of an instance; eight short requests use 96 tokens each, a partly filled block included.
NUM_BLOCKS = 96
VOCABULARY = 49_000
#: Of a long request the rest is generated.
_SHARE_OF_PROMPT = 0.85
_SHORT_PROMPT = (24, 72)
_SHORT_OUTPUT = (48, 112)
#: More than the batches hold, so that somebody always waits.
_SHORT_USERS_PER_PLACE = 1.5


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output


@dataclass(frozen=True, slots=True)
class Trace:
    """Each user asks again once answered. Half as many as instances ask long requests."""

    name: str
    num_instances: int
    capacity_tokens: int
    """Of one instance."""
    seed: int = 0

    @property
    def num_long_users(self) -> int:
        return 0 if self.name == UNIFORM else self.num_instances // 2

    @property
    def num_users(self) -> int:
        num_places = self.num_instances * MAX_BATCH
        return self.num_long_users + int(_SHORT_USERS_PER_PLACE * num_places)

    def jobs_of(self, user: int) -> Iterator[Job]:
        """Without end, the same for the same trace; the first users are those with long ones."""
        source = random.Random(f"{self.name} {self.num_instances} {self.seed} {user}")
        while True:
            num_prompt, num_output = self._size(user < self.num_long_users, source)
            prompt = tuple(source.randrange(VOCABULARY) for _ in range(num_prompt))
            yield Job(prompt, num_output)

    def _size(self, is_long: bool, source: random.Random) -> tuple[int, int]:
        """Tokens of the prompt and of the answer."""
        if self.name == UNIFORM:
            return sum(_SHORT_PROMPT) // 2, sum(_SHORT_OUTPUT) // 2
        if not is_long:
            return source.randint(*_SHORT_PROMPT), source.randint(*_SHORT_OUTPUT)
        num_tokens = int(self.capacity_tokens * source.uniform(*TAILS[self.name]))
        num_prompt = int(num_tokens * _SHARE_OF_PROMPT)
        return num_prompt, num_tokens - num_prompt
