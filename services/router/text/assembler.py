"""One sequence's way from token ids to the text a client may see. Pure; used by generation."""

from collections.abc import Callable, Sequence

from services.router.text.detokenizer import Detokenizer
from services.router.text.stop_strings import StopStrings


class TextAssembler:
    """Detokenises, then watches for stop strings. `stopped` is final."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        """Stop strings are looked for in what comes after the first `min_tokens` tokens."""
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = StopStrings(stop)
        self._min_tokens = min_tokens
        self.stopped = False
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens, one at a time so that tokens after a stop string are not counted."""
        pieces: list[str] = []
        for token_id in token_ids:
            self.num_tokens += 1
            self._take(self._detokenizer.push((token_id,)), pieces)
            if self.stopped:
                break
        return "".join(pieces)

    def flush(self) -> str:
        """Returns the text held back until now; may still find a stop string."""
        if self.stopped:
            return ""
        pieces: list[str] = []
        self._take(self._detokenizer.flush(), pieces)
        if not self.stopped:
            pieces.append(self._stop_strings.flush())
        return "".join(pieces)

    def _take(self, piece: str, pieces: list[str]) -> None:
        if self.num_tokens <= self._min_tokens:
            pieces.append(piece)
            return
        text, self.stopped = self._stop_strings.push(piece)
        pieces.append(text)
