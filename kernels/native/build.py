"""Compiles the C++ kernels for this machine at first use and keeps the result in a folder.

The file's name is a hash of the sources, the compiler and the instruction sets it found, so that a
home shared by different machines or versions holds one library for each.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
COMPILE_TIMEOUT_S = 300.0


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which."""


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "infinite-llm" / "kernels"


def build_library(cache_dir: Path) -> Path:
    """The compiled library; several processes may build it at the same time."""
    compiler = find_compiler()
    library = cache_dir / f"native-{_fingerprint(compiler)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            built = Path(folder) / library.name
            sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
            _run([compiler, *FLAGS, "-shared", "-pthread", *sources, "-o", str(built)])
            os.replace(built, library)  # atomic: nobody ever sees half a library
    except OSError as error:
        raise BuildError(f"cannot write to {cache_dir}: {error}") from error
    return library


def find_compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH")


def _fingerprint(compiler: str) -> str:
    # The predefined macros name the compiler's version and every instruction set it will use.
    macros = _run([compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    digest = hashlib.sha256(macros)
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    return digest.hexdigest()[:24]


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()
        raise BuildError(f"{command[0]} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
