"""Finds stop strings in a stream of text pieces. Pure; the text assembler owns one per sequence."""

from collections.abc import Sequence


class StopStrings:
    """Holds back only what may still become a stop string, and never lets one out.

    The result does not depend on how the text is cut into pieces: the stop string that is complete
    first wins and, of two that end at the same character, the longer one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Returns the text that may go out and whether a stop string was found."""
        text = self._held + piece
        found = [
            (start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0
        ]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = num_overlapping(text, self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Returns what was held back: the sequence ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def num_overlapping(text: str, awaited: Sequence[str]) -> int:
    """Of the last characters of `text`, those that may be the beginning of one of `awaited`."""
    longest = max((len(string) - 1 for string in awaited), default=0)
    for num_chars in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - num_chars :]
        if any(string.startswith(tail) for string in awaited):
            return num_chars
    return 0
