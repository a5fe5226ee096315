"""One child: started apart, stopped within a bound, never outliving its supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from services.local.plan import ProcessSpec
from services.local.process import ManagedProcess

DEADLINE_S = 10.0

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def child(code: str, folder: Path, **settings: str) -> ManagedProcess:
    spec = ProcessSpec("child", (sys.executable, "-c", code), settings, "grpc", "")
    return ManagedProcess(spec, folder, {**os.environ, "INFINITE_LLM_STRAY": "1"})


def wait_for_log(process: ManagedProcess, text: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while text not in process.log_path.read_text():
        assert time.monotonic() < end, process.describe_end()
        time.sleep(0.02)


async def test_a_child_stops_when_asked(tmp_path: Path) -> None:
    process = child(SLEEP, tmp_path)
    process.start()
    wait_for_log(process, "ready")
    assert process.is_running
    assert await process.stop(DEADLINE_S)
    assert process.exit_status == -signal.SIGTERM


async def test_a_child_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    process = child(STUBBORN, tmp_path)
    process.start()
    wait_for_log(process, "ready")
    assert not await process.stop(deadline_s=0.1)
    assert process.exit_status == -signal.SIGKILL


async def test_kill_takes_the_grandchildren_along(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', '{SLEEP[:12]}"
    code += "time.sleep(600)']).pid, 'ready', flush=True); import time; time.sleep(600)"
    process = child(code, tmp_path)
    process.start()
    wait_for_log(process, "ready")
    grandchild = psutil.Process(int(process.log_path.read_text().split()[0]))
    await process.kill()
    assert psutil.wait_procs([grandchild], timeout=DEADLINE_S)[1] == []


async def test_it_can_be_started_again_and_its_log_goes_on(tmp_path: Path) -> None:
    process = child("print('once'); raise SystemExit(3)", tmp_path)
    for _ in range(2):
        process.start()
        while process.is_running:
            time.sleep(0.02)
    assert process.describe_end() == (
        "child ended with status 3; its log ends with\n    once\n    once"
    )


def test_it_sees_the_planned_settings_and_no_others(tmp_path: Path) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    process = child(code, tmp_path, INFINITE_LLM_MODEL="m")
    process.start()
    while process.is_running:
        time.sleep(0.02)
    environ = json.loads(process.log_path.read_text())
    assert {key: value for key, value in environ.items() if key.startswith("INFINITE")} == {
        "INFINITE_LLM_MODEL": "m"
    }
    assert environ["HOME"] == os.environ["HOME"]


def test_a_killed_supervisor_leaves_no_child(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from services.local.plan import ProcessSpec
from services.local.process import ManagedProcess
spec = ProcessSpec("child", (sys.executable, "-c", {STUBBORN!r}), {{}}, "grpc", "")
process = ManagedProcess(spec, Path({str(tmp_path)!r}), os.environ)
process.start()
while "ready" not in process.log_path.read_text():
    time.sleep(0.02)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        orphan = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    assert psutil.wait_procs([orphan], timeout=DEADLINE_S)[1] == []


def test_a_child_of_a_supervisor_already_gone_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    launcher = [sys.executable, "-m", "services.local.launch", str(gone.pid)]
    done = subprocess.run([*launcher, sys.executable, "-c", SLEEP], timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL
