"""Messages to prompt text through the model's own chat template. Used by generation.

Templates come with model files, hence from strangers: they run in jinja's immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import ConfigError, InvalidRequest
from services.router.tools.prompt import tell
from services.router.tools.syntax import JSON_LIST, syntax_of

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_tools = "tools" in find_undeclared_variables(environment.parse(source))
        self.call_syntax = syntax_of(source) if self._knows_tools else JSON_LIST
        """How the model writes that functions are to be called."""

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Reads the model folder; None where the model has no chat template."""
        path = folder / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        source = _template_source(folder, config.get("chat_template"))
        if source is None:
            return None
        return cls(source, {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS})

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Returns the prompt up to where the assistant's answer begins."""
        if self._knows_tools:
            told, known = [dict(message) for message in messages], [dict(tool) for tool in tools]
        else:
            told, known = tell(messages, tools), []
        try:
            return self._template.render(
                messages=told,
                # Templates ask whether there are any, not how many.
                tools=known or None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error


def _template_source(folder: Path, entry: Any) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text("utf-8")
    if isinstance(entry, list):
        named = {template["name"]: template["template"] for template in entry}
        return named.get("default")
    return entry if isinstance(entry, str) else None


def _token_text(entry: Any) -> str:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)
