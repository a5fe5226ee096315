"""Reads a service's settings from environment variables `INFINITE_LLM_<FIELD>`.

Each service describes its settings as one frozen dataclass; its `__main__` calls `from_env` once.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "INFINITE_LLM_"

Config = TypeVar("Config", bound="DataclassInstance")

_BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def variable_name(field: str) -> str:
    """The environment variable of a config field: `num_blocks` -> `INFINITE_LLM_NUM_BLOCKS`."""
    return PREFIX + field.upper()


def from_env(cls: type[Config], environ: Mapping[str, str]) -> Config:
    """Builds the config; a missing or bad value raises ConfigError naming the variable."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = variable_name(field.name)
        if name in environ:
            values[field.name] = _parse(name, environ[name], hints[field.name])
        elif not _has_default(field):
            raise ConfigError(f"{name} is required")
    return cls(**values)


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _parse(name: str, text: str, hint: Any) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _parse_literal(name, text, typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        return None if text == "" else _parse(name, text, inner)
    parser, wanted = _PARSERS[hint]
    try:
        return parser(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{name} must be {wanted}, not {text!r}") from None


def _parse_literal(name: str, text: str, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if text == str(choice):
            return choice
    raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, not {text!r}")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_bool(text: str) -> bool:
    return _BOOLEANS[text.lower()]


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text).expanduser()


_PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "a text"),
    int: (int, "a whole number"),
    float: (_parse_float, "a number"),
    bool: (_parse_bool, "true or false"),
    Path: (_parse_path, "a path"),
}
