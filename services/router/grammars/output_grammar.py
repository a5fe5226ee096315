"""What an answer must match, in the words of clients, as a grammar for the worker. Pure.

Made by both doors. The grammar is llguidance's JSON form, which holds its options, too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.common.grammars import MAX_GRAMMAR_CHARS

#: One space, or a new line with its indentation: models are fond of endless blanks.
_WHITESPACE = r"( |\n {0,24})"


def guided(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with llguidance's options, wherever it is put."""
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": False}}


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    text: str
    param: str
    """The client's field that it came from."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"{self.param} must have at most {MAX_GRAMMAR_CHARS} characters", param=self.param
            )

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any], param: str) -> "OutputGrammar":
        return cls(LLMatcher.grammar_from_json_schema(guided(schema)), param)

    @classmethod
    def of_schema_text(cls, text: str, param: str) -> "OutputGrammar":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{param} must be a JSON schema", param=param)
        return cls.of_schema(schema, param)

    @classmethod
    def of_regex(cls, regex: str, param: str) -> "OutputGrammar":
        return cls(LLMatcher.grammar_from_regex(regex), param)

    @classmethod
    def of_lark(cls, lark: str, param: str) -> "OutputGrammar":
        return cls(LLMatcher.grammar_from_lark(lark), param)
