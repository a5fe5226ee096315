"""Turns a model's name into a local folder that worker and router can read.

A name is a local folder, a local GGUF file, the built-in model, or a hub id. What is converted is
converted once, into the user's cache, and from then on used in place.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.errors import ConfigError
from services.common.model_store import builtin, hub
from services.common.model_store.cache import publish_once
from services.common.model_store.folder import check_folder, missing_files

DEFAULT_MODEL = builtin.NAME

#: In the cache; another one when conversions write something else.
_CONVERTED = "models-2"

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    cache_home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~"), ".cache"))
    return Path(cache_home).expanduser() / "infinite-llm"


def resolve(
    name: str, cache_dir: Path, progress: Callable[[str], None], with_weights: bool = True
) -> Path:
    """The model's folder; raises ConfigError, in one line, where there is none to be had.

    Who only needs the tokenizer asks without weights, which then need not be there.
    Blocks for as long as a download or a conversion takes. Several processes may resolve the same
    name at once: one does the work, the others wait for it.
    """
    local = Path(name).expanduser()
    if name == builtin.NAME:
        target = cache_dir / _CONVERTED / builtin.NAME
        if not missing_files(target, with_weights):
            return target.resolve()
        return publish_once(target, lambda folder: builtin.build(folder, progress), progress)
    if name and local.is_dir():
        return check_folder(local, with_weights)
    if local.suffix == ".gguf":
        return _resolve_gguf(local, cache_dir, progress)
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model {name!r}: there is no such folder")
    return hub.fetch(name, progress, with_weights)


def _resolve_gguf(source: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    if not source.is_file():
        raise ConfigError(f"model {str(source)!r}: there is no such file")
    # Size and time stand for the content, so that a replaced file is converted anew.
    stat = source.stat()
    identity = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = cache_dir / _CONVERTED / f"{source.stem}-{digest}"

    def build(folder: Path) -> None:
        from services.common.model_store.gguf_conversion import convert

        convert(source, folder, progress)

    return publish_once(target, build, progress)
