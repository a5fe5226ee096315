"""`python -m tests.chart.readme` writes the table of values into the chart's README.

The texts are the comments "# --" of values.yaml, so that a value and its text lie side by side.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "infinite-llm"
README = CHART / "README.md"
_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w-]+):")


def values_table(text: str) -> str:
    values = yaml.safe_load(text)
    rows = ["| value | default | |", "|---|---|---|"]
    for path, words in described(text):
        default = values
        for key in path:
            default = default[key]
        if isinstance(default, dict) and any((*path, key) in _paths(text) for key in default):
            rows.append(f"| **`{'.'.join(path)}`** | | {words} |")
        else:
            rows.append(f"| `{'.'.join(path)}` | `{_shown(default)}` | {words} |")
    return "\n".join(rows) + "\n"


def described(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every value that a person may set, and what its comment says."""
    words: list[str] = []
    stack: list[tuple[int, str]] = []
    documented = _paths(text)
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            words = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("#") and words:
            words.append(stripped.removeprefix("#").strip())
        elif match := _LINE.match(line):
            indent = len(match["indent"])
            stack = [entry for entry in stack if entry[0] < indent]
            stack.append((indent, match["key"]))
            path = tuple(key for _, key in stack)
            if words or path in documented:
                yield path, " ".join(words)
            words = []


def _paths(text: str) -> set[tuple[str, ...]]:
    """Of the values that no free-form value above them swallows."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key, child in node.get("properties", {}).items():
            if "properties" not in child:
                yield (*path, key)
            yield from walk(child, (*path, key))

    return set(walk(schema, ()))


def _shown(default: object) -> str:
    return json.dumps(default).replace("|", "\\|")


def readme_with_table() -> str:
    head, _, rest = README.read_text().partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + values_table((CHART / "values.yaml").read_text()) + _END + tail


if __name__ == "__main__":
    README.write_text(readme_with_table())
