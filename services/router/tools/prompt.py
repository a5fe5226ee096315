"""Tools in messages, for models whose chat template does not know of them. Pure.

Used by the chat template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = (
    "Answer by calling functions. Write a JSON list of calls, each as "
    '{"name": NAME, "arguments": OBJECT}. The functions are:'
)


def tell(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with tools and calls as text."""
    plain = [_with_calls_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = [_TOLD, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)]
    text = "\n".join(lines)
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] += f"\n\n{text}"
        return plain
    return [{"role": "system", "content": text}, *plain]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    calls = plain.pop("tool_calls", None)
    if calls:
        text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
        plain["content"] = "\n".join(filter(None, [plain.get("content"), text]))
    return plain
