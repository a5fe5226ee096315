"""How a model writes that functions are to be called. Pure; follows from its chat template."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Between these stands `{"name": NAME, "arguments": OBJECT}`, once for each call."""

    opening: str
    separator: str
    closing: str
    trigger: str = ""
    """The part of `opening` that text never has; empty: text and calls cannot be told apart."""


#: Of templates that say nothing of tools, or have a way of their own.
JSON_LIST = CallSyntax("[", ", ", "]")
#: Of Hermes, Qwen, SmolLM and many others.
TAGGED = CallSyntax(
    "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "<tool_call>"
)


def syntax_of(template_source: str) -> CallSyntax:
    return TAGGED if TAGGED.trigger in template_source else JSON_LIST
