"""Replaces itself by the given program, which then dies with the supervisor.

`python -m services.local.launch PARENT_PID PROGRAM [ARGUMENT ...]`, started by `process`. Run as a
program of its own, not between fork and exec: the supervisor has threads. The setting survives
exec, so it covers programs that are not ours (Redis). Linux only; elsewhere it just executes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process once the thread that started it is gone."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have gone before the call above.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
