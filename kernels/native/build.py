"""The C++ kernels as a library: compiled for this machine at first use, or beforehand for many.

The file's name is a hash of the sources, the compiler and the instruction sets it found, so that a
home shared by different machines or versions holds one library for each. Where there is no
compiler, as in a container image, the fastest of the libraries that `python build.py FOLDER` made
beforehand and that this CPU can run is taken. Imports nothing of ours: it also runs by its path.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")
COMPILERS = ("g++", "c++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
NATIVE = ("-march=native",)
COMPILE_TIMEOUT_S = 300.0


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which."""


class Level(NamedTuple):
    """A set of instructions that many CPUs have."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """The CPU's flags in /proc/cpuinfo."""


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_AMX = _V4 | frozenset(["avx512_bf16", "amx_tile", "amx_bf16"])
_AMX_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
#: Of one machine the fastest first.
LEVELS = (
    Level("x86-64-amx", "x86_64", _AMX_FLAGS, _AMX),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("armv8", "aarch64", ("-march=armv8-a",), frozenset(["asimd"])),
)


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "infinite-llm" / "kernels"


def build_library(cache_dir: Path) -> Path:
    """The compiled library; several processes may build it at the same time."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        if library := find_prebuilt(cache_dir, levels_of_this_cpu()):
            return library
        raise BuildError(f"{error}, and {cache_dir} has none for this CPU") from error
    library = cache_dir / f"native-{_fingerprint(compiler)}.so"
    if not library.exists():
        _compile([compiler, *FLAGS, *NATIVE], library)
    return library


def prebuild(cache_dir: Path) -> list[Path]:
    """Compiles for all levels of this kind of machine, whichever of them its own CPU has."""
    compiler = find_compiler()
    levels = [level for level in LEVELS if level.machine == platform.machine()]
    libraries = [_prebuilt_path(cache_dir, level) for level in levels]
    for level, library in zip(levels, libraries, strict=True):
        _compile([compiler, *FLAGS, *level.flags], library)
    return libraries


def find_prebuilt(cache_dir: Path, levels: Collection[Level]) -> Path | None:
    """The library of the first level that there is one of."""
    paths = (_prebuilt_path(cache_dir, level) for level in levels)
    return next((path for path in paths if path.exists()), None)


def levels_of_this_cpu() -> list[Level]:
    cpu_info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    return levels_of(platform.machine(), cpu_info)


def levels_of(machine: str, cpu_info: str) -> list[Level]:
    """What a CPU can run, the fastest first; `cpu_info` in the words of /proc/cpuinfo."""
    fields = (line.partition(":") for line in cpu_info.splitlines())
    # "flags" on x86, "Features" on ARM; all of a machine's cores have the same.
    lists = (text for name, _, text in fields if name.strip() in ("flags", "Features"))
    flags = set(next(lists, "").split())
    return [level for level in LEVELS if level.machine == machine and level.needs <= flags]


def find_compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH")


def _compile(command: list[str], library: Path) -> None:
    folder = library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
            _run([*command, "-shared", "-pthread", *sources, "-o", str(built)])
            os.replace(built, library)  # atomic: nobody ever sees half a library
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error}") from error


def _fingerprint(compiler: str) -> str:
    # The predefined macros name the compiler's version and every instruction set it will use.
    macros = _run([compiler, *FLAGS, *NATIVE, "-dM", "-E", "-x", "c++", os.devnull])
    return _digest(macros, NATIVE)


def _prebuilt_path(cache_dir: Path, level: Level) -> Path:
    return cache_dir / f"{level.name}-{_digest(b'', level.flags)}.so"


def _digest(macros: bytes, target: tuple[str, ...]) -> str:
    digest = hashlib.sha256(macros)
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join([*FLAGS, *target]).encode())
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


if __name__ == "__main__":
    for built in prebuild(Path(sys.argv[1])):
        sys.stdout.write(f"{built}\n")
