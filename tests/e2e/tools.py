"""kubectl, helm and the builder of images, each call with a deadline. Used by the steps."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).parents[2]
POLL_S = 1.0
_FORWARDING = re.compile(r"127\.0\.0\.1:(\d+) ->")


class StepFailed(Exception):
    """What was promised did not happen; the message says what was seen instead."""


def run(command: list[str], timeout_s: float = 120.0, text: str | None = None) -> str:
    """The command's standard output; raises StepFailed with its last words."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False,
            input=text, cwd=REPO_ROOT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{' '.join(command)}: over {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise StepFailed(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def wait_for(what: str, check: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline_s:
            raise StepFailed(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(POLL_S)


class Kubectl:
    """In one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *arguments: str, timeout_s: float = 120.0, text: str | None = None) -> str:
        return run(["kubectl", "-n", self.namespace, *arguments], timeout_s, text)

    def get(self, *arguments: str) -> Any:
        return json.loads(self("get", *arguments, "-o", "json"))

    def has(self, *arguments: str) -> bool:
        return bool(self("get", *arguments, "--ignore-not-found", "-o", "name").strip())

    def knows(self, resource: str) -> bool:
        """Whether the cluster has this kind of resource."""
        return resource in run(["kubectl", "api-resources", "-o", "name"]).split()

    @contextmanager
    def forward(self, target: str, port: int) -> Iterator[str]:
        """host:port on this machine that leads to the target."""
        command = ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                match = _FORWARDING.search(process.stdout.readline())
                if match is None:
                    raise StepFailed(f"port-forward {target}: {process.stderr.read().strip()}")
                yield f"127.0.0.1:{match[1]}"
            finally:
                process.terminate()
