"""Token ids to text, piece by piece. Pure; used by the text assembler.

Decoding one token alone is wrong twice: a character may span several tokens, and a token's text may
depend on its left neighbour. So each step decodes a short window: the tokens of the last piece as
context, then everything not yet given out. What is given out is the part beyond the context.
"""

from collections.abc import Callable, Sequence

#: What decoders put where bytes are not (or not yet) UTF-8.
REPLACEMENT = "\ufffd"

#: A UTF-8 sequence has at most 4 bytes and most tokens at least one: more undecidable tokens than
#: this hold bytes that will never become a character.
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Owner of one sequence's window. Concatenated pieces equal the decoding of the whole."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens; returns the text that no later token can change."""
        self._pending.extend(token_ids)
        text = self._decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._give_out(len(self._pending), text)
        if len(self._pending) <= MAX_PENDING_TOKENS:
            return ""
        return self._give_out_invalid(text)

    def flush(self) -> str:
        """Returns the rest, half characters as replacement marks: the sequence has ended."""
        return self._give_out(len(self._pending), self._decode(self._context + self._pending))

    def _give_out_invalid(self, text: str) -> str:
        # Bytes that cannot become characters must not grow the window without bound: cut where both
        # sides decode to the same text as the whole, which no half sequence at the cut would allow.
        # A right side without text (special tokens) would prove nothing.
        for cut in range(len(self._pending) - 1, len(self._pending) - MAX_PENDING_TOKENS, -1):
            right = self._decode(self._pending[cut:])
            left = self._decode(self._context + self._pending[:cut])
            if right and left + right == text:
                return self._give_out(cut, left)
        return ""

    def _give_out(self, num_tokens: int, text: str) -> str:
        piece = text[len(self._context_text) :]
        if num_tokens:
            self._context = self._pending[:num_tokens]
            self._context_text = self._decode(self._context)
            self._pending = self._pending[num_tokens:]
        return piece
