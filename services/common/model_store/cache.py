"""Builds a folder of the cache once, however many processes ask for it at the same time."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import ConfigError
from services.common.model_store.folder import check_folder, missing_files


def publish_once(
    target: Path, build: Callable[[Path], None], progress: Callable[[str], None]
) -> Path:
    """Returns `target`, after `build` has filled it unless it is complete already.

    The folder appears under its name only when it is whole. A builder that dies leaves a partial
    folder behind and its lock open; the next one starts over.
    """
    if not missing_files(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", progress):
            if missing_files(target):
                _build_and_rename(target, build)
    except OSError as error:
        raise ConfigError(f"cannot write the model cache {str(target)!r}: {error}") from error
    return check_folder(target)


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """The kernel drops the lock with the process, so none is ever stale."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing this model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
