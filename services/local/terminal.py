"""Keeps Ctrl-C for the supervisor alone when another program, such as make, started it.

The terminal sends Ctrl-C to its whole foreground group. make would then report an interrupt even
though the cluster has stopped cleanly; so the supervisor leads a foreground group of its own.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_foreground() -> Iterator[None]:
    """Does nothing without a terminal, in the background, or when a shell has done it already."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, group = sys.stdin.fileno(), os.getpgrp()
    if group == os.getpid() or os.tcgetpgrp(terminal) != group:
        yield
        return
    os.setpgid(0, 0)
    _give_terminal(terminal, os.getpgrp())
    try:
        yield
    finally:
        _give_terminal(terminal, group)


def _give_terminal(terminal: int, group: int) -> None:
    # A process outside the foreground is stopped by SIGTTOU for this, unless it ignores it.
    previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, previous)
