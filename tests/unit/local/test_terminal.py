"""Ctrl-C in a terminal reaches the supervisor but not the program that started it."""

import subprocess
import sys

CHILD = """
import asyncio, sys
from services.common.lifecycle import run
from services.local.terminal import own_foreground

async def main(stop):
    print("ready", flush=True)
    await stop.wait()

with own_foreground():
    sys.exit(run(main))
"""

# A terminal, and in it a shell that, like make, ends by SIGINT if the signal reaches it.
TERMINAL = """
import pty, sys
pty.spawn(["/bin/sh", "-c", '"$0" -c "$1"; echo ended with $?', sys.executable, sys.argv[1]])
"""


def test_the_program_above_sees_a_clean_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as terminal:
        assert terminal.stdin is not None and terminal.stdout is not None
        assert terminal.stdout.readline() == b"ready\r\n"
        output, _ = terminal.communicate(b"\x03", timeout=20)
    assert b"ended with 0" in output


def test_without_a_terminal_nothing_changes() -> None:
    code = "from services.local.terminal import own_foreground\nwith own_foreground(): print('ran')"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (0, b"ran\n")
