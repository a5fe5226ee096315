"""API keys as they lie in a file: one a line, hashed. Pure; read by the key file, made by
`python -m services.router.access`.

    # name   hash                limits, all optional
    alice    sha256:9f86d081...  max_concurrent=8 tokens_per_minute=60000

A plain hash is enough because keys are random: a slow one would guard nothing more.
"""

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256

from services.common.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    max_concurrent: int | None = None
    """Requests at once; None: as many as anybody."""
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(f"{field.name} must be at least 1")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    """Whose it is, for the log; it names the key where the key itself must not be written."""
    digest: bytes
    limits: KeyLimits

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError("the name must be 1 to 64 letters, digits, or ._@-")

    def line(self) -> str:
        shown = {field.name: getattr(self.limits, field.name) for field in fields(self.limits)}
        limits = [f"{name}={value}" for name, value in shown.items() if value is not None]
        return " ".join([self.name, f"sha256:{self.digest.hex()}", *limits])


def digest_of(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Raises ConfigError with the number of the line at fault, never with its text."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _parse(words)
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error.message}") from None
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise ConfigError(f"line {number}: this name or key is there already")
        keys.append(key)
    return tuple(keys)


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """Takes as long whichever it is, so that time tells nothing of what is in the file."""
    digest, found = digest_of(presented), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _parse(words: list[str]) -> ApiKey:
    hashed = _HASH.fullmatch(words[1]) if len(words) > 1 else None
    if hashed is None:
        raise ConfigError("after the name comes sha256: and 64 hexadecimal digits")
    known = {field.name for field in fields(KeyLimits)}
    limits: dict[str, int] = {}
    for word in words[2:]:
        name, _, number = word.partition("=")
        if name not in known or name in limits or not (number.isascii() and number.isdigit()):
            raise ConfigError(f"a limit is one of {', '.join(sorted(known))}, = and a number")
        limits[name] = int(number)
    return ApiKey(words[0], bytes.fromhex(hashed[1]), KeyLimits(**limits))
