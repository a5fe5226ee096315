"""Finds calls of functions in the text of one answer, piece by piece. Pure; used by tool answers.

The grammar has seen to it that the text is well-formed, however far it goes. Nothing is held back
but what may still turn out to be markup.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from services.router.text.stop_strings import num_overlapping
from services.router.tools.syntax import CallSyntax

_HEAD_BEGIN = '{"name": "'
_HEAD_END = '", "arguments": '


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Of one call: first its name, then its arguments in pieces, which are JSON together."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class _Arguments:
    """Looks for the end of one JSON object."""

    depth: int = 0
    is_string: bool = False
    is_escaped: bool = False

    def length(self, text: str) -> int | None:
        """Of what belongs to the object; None: all of `text`, and more will come."""
        for position, char in enumerate(text):
            if self.is_escaped:
                self.is_escaped = False
            elif self.is_string:
                self.is_escaped = char == "\\"
                self.is_string = char != '"'
            elif char == '"':
                self.is_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return position + 1
        return None


Delta: TypeAlias = str | CallDelta
"""Text for the reader, or a piece of a call."""


class CallParser:
    """Of one choice."""

    def __init__(self, syntax: CallSyntax, may_begin_with_text: bool) -> None:
        self._syntax = syntax
        self._buffer = ""
        self._take = self._take_text if may_begin_with_text else self._take_opening
        self._arguments = _Arguments()
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        before = None
        while before != (self._take, self._buffer):
            before = (self._take, self._buffer)
            deltas += self._take()
        return deltas

    def flush(self) -> list[Delta]:
        """The answer has ended: what was held back of its text."""
        held, self._buffer = self._buffer, ""
        return [held] if held and self._take == self._take_text else []

    # -- what comes next; each takes from the buffer what is certain, and says who goes on ---------

    def _take_text(self) -> list[Delta]:
        opening = self._syntax.opening
        text, found, rest = self._buffer.partition(opening)
        if found:
            self._buffer, self._take = rest, self._take_head
        else:
            num_held = num_overlapping(text, (opening,))
            text, self._buffer = text[: len(text) - num_held], text[len(text) - num_held :]
        return [text] if text else []

    def _take_opening(self) -> list[Delta]:
        self._go_on_after(self._syntax.opening, self._take_head)
        return []

    def _take_head(self) -> list[Delta]:
        head, found, rest = self._buffer.partition(_HEAD_END)
        if not found:
            return []
        self._buffer, self._take = rest, self._take_arguments
        self._arguments = _Arguments()
        self.num_calls += 1
        return [CallDelta(self.num_calls - 1, name=head.removeprefix(_HEAD_BEGIN))]

    def _take_arguments(self) -> list[Delta]:
        length = self._arguments.length(self._buffer)
        if length is not None:
            self._take = self._take_rest_of_call
        piece = self._buffer[:length]
        self._buffer = self._buffer[len(piece) :]
        return [CallDelta(self.num_calls - 1, arguments=piece)] if piece else []

    def _take_rest_of_call(self) -> list[Delta]:
        self._go_on_after("}" + self._syntax.separator, self._take_head)
        return []

    def _go_on_after(self, literal: str, take: Callable[[], list[Delta]]) -> None:
        if self._buffer.startswith(literal):
            self._buffer, self._take = self._buffer[len(literal) :], take
