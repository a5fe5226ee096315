"""`tools`, `tool_choice` and calls in messages: what is understood. Used by the chat schema."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from services.common.errors import InvalidRequest
from services.common.grammars import MAX_GRAMMAR_CHARS
from services.router.http.formats import NAME
from services.router.http.strict import Strict
from services.router.tools.use import MAX_CALLS, Function, ToolUse

MAX_TOOLS = 128


class _Closed(Strict):
    model_config = ConfigDict(extra="forbid")


class FunctionDefinition(_Closed):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    #: Every schema is kept to, whether or not this is asked for.
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, Any]:
        """An object in any case."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(_Closed):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Closed):
    name: str


class NamedTool(_Closed):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Closed):
    name: str
    arguments: str


class ToolCall(_Closed):
    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self, param: str) -> dict[str, Any]:
        """Templates want the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            param = f"{param}.function.arguments"
            raise InvalidRequest(f"{param} must be a JSON object", param=param)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool) -> ToolUse | None:
    """None where nothing is to be called. Raises InvalidRequest naming the field at fault."""
    _check_tools(tools)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    functions = [
        Function.of(
            tool.function.name,
            tool.function.schema_of_arguments(),
            f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(tools)
    ]
    if sum(len(function.schema) for function in functions) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"tools must be at most {MAX_GRAMMAR_CHARS} characters", param="tools")
    max_calls = MAX_CALLS if is_parallel else 1
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        max_calls = 1
        if not functions:
            name = "tool_choice.function.name"
            raise InvalidRequest(f"{name} is not among the tools", param=name)
    return ToolUse(tuple(functions), choice not in (None, "auto"), max_calls)


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function, param = tool.function, f"tools[{index}].function"
        if not NAME.fullmatch(function.name) or function.name in seen:
            wanted = "1 to 64 letters, digits, underscores and dashes, each name once"
            raise InvalidRequest(f"{param}.name must be {wanted}", param=f"{param}.name")
        seen.add(function.name)
        if function.schema_of_arguments()["type"] != "object":
            param = f"{param}.parameters"
            raise InvalidRequest(f"{param} must be the schema of an object", param=param)
