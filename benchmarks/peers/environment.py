"""Virtual environments of the peers: made at first use, kept in the user's cache."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PINS = Path(__file__).parent
_INSTALL_DEADLINE_S = 3 * 3600.0
_TICK_S = 15.0


class PeerUnavailable(Exception):
    """A peer cannot be had here, and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    script: str
    """The module that runs in the peer's environment."""
    variants: tuple[str, ...]
    """Ways to run it that the script knows; the fastest counts."""
    unwanted: tuple[str, ...] = ()
    """Packages that pip brings along but that break the peer."""

    @property
    def pins(self) -> Path:
        return _PINS / f"{self.name}.txt"


VLLM = Peer(
    "vllm",
    "benchmarks.peers.run_vllm",
    ("float32", "bfloat16"),
    # Built for another torch than vLLM's: with them its imports fail, without them they do not.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
LLAMACPP = Peer(
    "llamacpp",
    "benchmarks.peers.run_llamacpp",
    # Weights laid out anew for what the CPU has (AMX among it), or as they are in the file. The
    # former is killed by an illegal instruction where some compilers meet AMX.
    ("repacked", "plain"),
)


def ensure(peer: Peer, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The peer's Python, after installing it if need be. Raises PeerUnavailable."""
    folder = cache_dir / "peers" / peer.name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    pins = peer.pins.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    say(f"installing {peer.name} into {folder} (once; this may take long)")
    _run([sys.executable, "-m", "venv", str(folder)], log, say)
    pip = [str(python), "-m", "pip"]
    _run([*pip, "install", "--progress-bar=off", f"--requirement={peer.pins}"], log, say)
    if peer.unwanted:
        _run([*pip, "uninstall", "--yes", *peer.unwanted], log, say)
    stamp.write_text(pins, encoding="utf-8")
    return python


def _run(command: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
    started_s = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > _INSTALL_DEADLINE_S:
                    raise PeerUnavailable(f"installing took over {elapsed_s:.0f} s")
                _wait(process, say, elapsed_s)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise PeerUnavailable(f"{_reason(log)} (see {log})")


def _wait(process: subprocess.Popen[bytes], say: Callable[[str], None], elapsed_s: float) -> None:
    try:
        process.wait(_TICK_S)
    except subprocess.TimeoutExpired:
        say(f"  ... {elapsed_s + _TICK_S:.0f} s")


def _reason(log: Path) -> str:
    """pip's own word, which is the last line that says so."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it gave no reason"])[-1]
