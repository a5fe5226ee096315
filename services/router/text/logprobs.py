"""Log probabilities with the text of their tokens. Pure; used by the choices of a request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.router.token_job import TokenLogprobs

#: JSON has no infinity; this is as good as impossible, and what clients know.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Candidate:
    token_id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ShownToken:
    chosen: Candidate
    top: tuple[Candidate, ...]
    """The likeliest in its place, best first."""
    offset: int
    """Where its text begins in the text of all tokens shown."""
    is_first: bool = False
    """The first token of a prompt: nothing says how likely it was."""


class LogprobTexts:
    """Shows the tokens of one text; owner of the offset."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs]
    ) -> tuple[ShownToken, ...]:
        """`logprobs` are those of the second token and on."""
        first = self._show(self._candidate(token_ids[0], 0.0), is_first=True)
        return (first, *self.tokens(token_ids[1:], logprobs))

    def tokens(
        self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs]
    ) -> tuple[ShownToken, ...]:
        """`logprobs` may go on beyond the tokens."""
        return tuple(
            self._show(
                self._candidate(token_id, one.chosen),
                tuple(self._candidate(other, logprob) for other, logprob in one.top),
            )
            for token_id, one in zip(token_ids, logprobs, strict=False)
        )

    def _show(
        self, chosen: Candidate, top: tuple[Candidate, ...] = (), is_first: bool = False
    ) -> ShownToken:
        offset, self._offset = self._offset, self._offset + len(chosen.text)
        return ShownToken(chosen, top, offset, is_first)

    def _candidate(self, token_id: int, logprob: float) -> Candidate:
        # In this order what is not a number becomes the least, too.
        return Candidate(token_id, self._bytes_of(token_id), max(LEAST_LOGPROB, logprob))
