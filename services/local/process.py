"""One child process: started in its own session, logged to a file, stopped within a bound."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from services.common.config import PREFIX
from services.local.plan import ProcessSpec

REPO_ROOT = Path(__file__).parents[2]
_POLL_S = 0.05
#: After SIGKILL the kernel only has to tear the process down.
_REAP_DEADLINE_S = 10.0
_NUM_LOG_LINES = 10


class ManagedProcess:
    """Owns one child. Not running until `start`; may be started again once it has ended."""

    def __init__(self, spec: ProcessSpec, folder: Path, environ: Mapping[str, str]) -> None:
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._folder = folder
        self._environ = child_environ(environ, spec.settings)
        self._child: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    def start(self) -> None:
        # Its own session: a Ctrl-C in the terminal reaches the supervisor alone, which then
        # stops everything in order.
        launcher = (sys.executable, "-m", "services.local.launch", str(os.getpid()))
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                (*launcher, *self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                cwd=self._folder,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs or before it was started; negative for a signal."""
        return None if self._child is None else self._child.poll()

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    async def stop(self, deadline_s: float) -> bool:
        """Asks it to end, then makes it. False where it had to be killed."""
        if not self.is_running:
            return True
        self._signal(signal.SIGTERM)
        if await self._ended_within(deadline_s):
            return True
        await self.kill()
        return False

    async def kill(self) -> None:
        """SIGKILL to the process and whatever it started."""
        self._signal(signal.SIGKILL)
        await self._ended_within(_REAP_DEADLINE_S)

    def describe_end(self) -> str:
        """How it ended, and the end of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
        ended = f"{self.spec.name} ended with status {self.exit_status}; its log ends with"
        return "\n    ".join((ended, *lines))

    def _signal(self, signum: signal.Signals) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        if signum is signal.SIGKILL:
            os.killpg(self._child.pid, signum)
        else:
            self._child.send_signal(signum)

    async def _ended_within(self, deadline_s: float) -> bool:
        # Polled, not watched by the event loop: a cluster then outlives the loop that started it,
        # as it does in tests.
        end = time.monotonic() + deadline_s
        while self.is_running:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def child_environ(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The surroundings of the supervisor, but only the settings that the plan gives."""
    inherited = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    path = os.pathsep.join(filter(None, (str(REPO_ROOT), environ.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **settings}
