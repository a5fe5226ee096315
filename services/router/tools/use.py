"""What tools a chat may use and how: the grammar of its answers. Pure; made by the HTTP schemas."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.router.grammars.output_grammar import OutputGrammar, guided
from services.router.tools.call_parser import CallParser
from services.router.tools.syntax import CallSyntax

#: In one answer.
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    schema: str
    """Of its arguments, an object, as JSON with the grammar's options."""
    param: str
    """The client's field that the schema came from."""

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any], param: str) -> "Function":
        return cls(name, json.dumps(guided(parameters)), param)


@dataclass(frozen=True, slots=True)
class ToolUse:
    functions: tuple[Function, ...]
    """Those that may be called."""
    is_required: bool
    """False: the answer may be text, or begin with it."""
    max_calls: int

    def grammar(self, syntax: CallSyntax) -> OutputGrammar:
        """Raises InvalidRequest where the model cannot do what is asked."""
        if not self.is_required and not syntax.trigger:
            raise InvalidRequest(
                "tools: this model's chat template cannot tell calls from text; tool_choice "
                '"required" or a named function works',
                param="tools",
            )
        more = f"({_text(syntax.separator)} call){{0,{self.max_calls - 1}}}"
        calls = f"call {more}" if self.max_calls > 1 else "call"
        lines = [f"call: {' | '.join(f'f{index}' for index in range(len(self.functions)))}"]
        for index, function in enumerate(self.functions):
            head = _text(f'{{"name": "{function.name}", "arguments": ')
            lines.append(f'f{index}: {head} a{index} "}}"\na{index}: %json {function.schema}')
        rest = f"{_text(syntax.opening.removeprefix(syntax.trigger))} {calls} " + _text(
            syntax.closing
        )
        if self.is_required:
            trigger = _text(syntax.trigger) if syntax.trigger else ""
            lines.append(f"start: {trigger} {rest}")
        else:
            # Lazy: as soon as the trigger is there, this is a call and no text.
            lines.append(f"head[lazy]: TEXT {_text(syntax.trigger)}\nTEXT: /(.|\\n)*/")
            lines.append(f"text: TEXT\nstart: text | head {rest}")
        return OutputGrammar.of_lark("\n".join(lines), "tools")

    def grammars_of_arguments(self) -> list[OutputGrammar]:
        """One by one, to tell which is at fault."""
        return [
            OutputGrammar.of_lark(f"start: %json {function.schema}", function.param)
            for function in self.functions
        ]

    def parser(self, syntax: CallSyntax) -> CallParser:
        """For one choice."""
        return CallParser(syntax, may_begin_with_text=not self.is_required)


def _text(literal: str) -> str:
    """As Lark quotes it."""
    return json.dumps(literal)
