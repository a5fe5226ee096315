"""Keeps the tokens of one sequence to a grammar. A part of the sequence, used by the sampler.

What it allows follows from the tokens of the output alone: it catches up with them before each
draw, so that a sequence that was preempted, or begun elsewhere, goes on as if nothing had happened.
"""

from collections.abc import Sequence as Seq

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.common.errors import InvalidRequest

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
#: What the logits of eight tokens may be at most, for each byte of a mask. Looking bytes up takes
#: 0.02 ms for 50,000 tokens, and going by bits twenty times as long.
_MOST = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))


class Grammar:
    """Of one sequence alone. `error` is final: no token is right any more."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_followed = 0
        self.error: InvalidRequest | None = None

    def follow(self, token_ids: Seq[int], num_prompt: int) -> None:
        """Take in what is new of the output, which begins at `num_prompt`."""
        new = token_ids[num_prompt + self._num_followed :]
        self._num_followed += len(new)
        if new and not self._matcher.consume_tokens(list(new)):
            self._fail()

    @property
    def has_ended(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._matcher.is_stopped()

    def allows(self, token_id: int) -> bool:
        """May be False of a token that the mask allows, never the other way round."""
        if token_id in self._eos_token_ids:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token_id]) == 1

    def restrict(self, logits: NDArray[np.float32]) -> None:
        """In place, of one row: what may not come next becomes impossible."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail()
            return
        # The tokenizer's vocabulary may be larger than the model's, never the other way round.
        np.minimum(logits, _MOST.take(mask, axis=0).ravel()[: len(logits)], out=logits)
        if logits.max() == -np.inf:
            self.error = InvalidRequest("the grammar allows no token here", "grammar")

    def _fail(self) -> None:
        reason = self._matcher.get_error().partition("\n")[0]
        self.error = InvalidRequest(f"the grammar cannot go on: {reason}", "grammar")
