"""What sampling keeps of one sequence from step to step. Pure; a part of the sequence.

It follows from the sequence's tokens alone, not from its blocks, so that a sequence that was
preempted goes on as if nothing had happened.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model itself held one token, and the likeliest ones in its place."""

    chosen: float
    top_token_ids: tuple[int, ...] = ()
    """Best first."""
    top: tuple[float, ...] = ()


class TokenCounts:
    """The distinct tokens of one sequence, with how often each is in the output.

    Grows with the sequence: a step costs one dictionary access, not a pass over the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num_distinct = len(distinct)
        self._token_ids = np.empty(_room_for(len(distinct)), dtype=np.int64)
        self._token_ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._index_of = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        self.num_output_tokens = 0
        """How many were counted."""

    def add(self, output_token_ids: Iterable[int]) -> None:
        for token_id in output_token_ids:
            index = self._index_of.setdefault(token_id, self._num_distinct)
            if index == self._num_distinct:
                self._append(token_id)
            self._counts[index] += 1.0
            self.num_output_tokens += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._token_ids[: self._num_distinct]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """How often each of `token_ids` is in the output."""
        return self._counts[: self._num_distinct]

    def _append(self, token_id: int) -> None:
        if self._num_distinct == len(self._token_ids):
            room = _room_for(self._num_distinct)
            self._token_ids = np.resize(self._token_ids, room)
            counts = np.zeros(room, dtype=np.float32)
            counts[: self._num_distinct] = self._counts
            self._counts = counts
        self._token_ids[self._num_distinct] = token_id
        self._num_distinct += 1


def _room_for(num_tokens: int) -> int:
    return max(64, 2 * num_tokens)


@dataclass(slots=True)
class SamplingState:
    counts: TokenCounts | None = None
    """Of a sequence with penalties, from its first sampled token on."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they were computed."""
    last_logprobs: TokenLogprobs | None = None
    """Of the token that was sampled last, where they are asked for."""
