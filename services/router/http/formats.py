"""`response_format`: what an answer must look like. Used by the schemas of both routes."""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field

from services.common.errors import InvalidRequest
from services.router.grammars.output_grammar import OutputGrammar
from services.router.http.strict import Strict

#: Of schemas and functions, as OpenAI has it.
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JsonSchemaFormat(Strict):
    model_config = ConfigDict(extra="forbid")

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    #: Every schema is kept to, whether or not this is asked for.
    strict: bool | None = None


class ResponseFormat(Strict):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None
    grammar_: str | None = Field(default=None, alias="grammar")

    def grammar(self) -> OutputGrammar | None:
        """Raises InvalidRequest naming the field that is missing, too much, or wrong."""
        param = "response_format"
        given = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar_}
        for name, value in given.items():
            if (value is not None) != (name == self.type):
                wanted = "missing" if value is None else f"not for type {self.type}"
                raise InvalidRequest(f"{param}.{name} is {wanted}", param=f"{param}.{name}")
        if self.json_schema is not None:
            if not NAME.fullmatch(self.json_schema.name):
                wanted = "1 to 64 letters, digits, underscores and dashes"
                name = f"{param}.json_schema.name"
                raise InvalidRequest(f"{name} must be {wanted}", param=name)
            schema = self.json_schema.schema_
            schema = {"type": "object"} if schema is None else schema
            return OutputGrammar.of_schema(schema, f"{param}.json_schema.schema")
        if self.regex is not None:
            return OutputGrammar.of_regex(self.regex, f"{param}.regex")
        if self.grammar_ is not None:
            return OutputGrammar.of_lark(self.grammar_, f"{param}.grammar")
        return OutputGrammar.of_schema({"type": "object"}, param) if self.type != "text" else None
