"""Runs one helper program to its end: fetching a model, compiling the kernels.

A program of its own, so that Ctrl-C ends the work at once, whatever it is doing.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from services.common.errors import ConfigError
from services.local.process import REPO_ROOT, child_environ

_LAST_WORDS_S = 0.5
# By path: importing the package would import torch, which takes longer than all the rest.
_BUILD_KERNELS = """
import runpy, sys
build = runpy.run_path(sys.argv[1])
try:
    build["build_library"](build["default_cache_dir"]())
except build["BuildError"] as error:
    sys.exit(str(error))
"""
_BUILD_SCRIPT = REPO_ROOT / "kernels" / "native" / "build.py"


async def resolve_model(name: str, say: Callable[[str], None], environ: Mapping[str, str]) -> Path:
    """The model's folder; fetches and converts it where this machine has not done so yet."""
    argv = ("-m", "services.common.model_store", name)
    status, output, errors = await _run_python(argv, say, environ)
    if status != 0:
        raise ConfigError(errors[-1] if errors else f"model {name!r} cannot be prepared")
    return Path(output.strip())


async def build_kernels(say: Callable[[str], None], environ: Mapping[str, str]) -> None:
    """Compiles the C++ kernels once, before several workers would each do it.

    Where it fails the workers fall back to slower kernels.
    """
    await _run_python(("-c", _BUILD_KERNELS, str(_BUILD_SCRIPT)), say, environ)


async def _run_python(
    arguments: tuple[str, ...], say: Callable[[str], None], environ: Mapping[str, str]
) -> tuple[int, str, list[str]]:
    """Exit status, standard output, and the lines of standard error, each said as it comes."""
    launcher = ("-m", "services.local.launch", str(os.getpid()), sys.executable)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *launcher,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environ(environ, {}),
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    lines = []
    try:
        async for raw in child.stderr:
            lines.append(raw.decode(errors="replace").rstrip())
            if not await _is_failing(child):
                say(f"  {lines[-1]}")
        output = await child.stdout.read()
        return await child.wait(), output.decode(), lines
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _is_failing(child: asyncio.subprocess.Process) -> bool:
    """Whether it ends with an error right now: its last line is then for the caller to say."""
    with suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), _LAST_WORDS_S)
    return bool(child.returncode)
