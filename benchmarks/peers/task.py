"""What a peer's script is told on its command line, and how it answers. Plain Python."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.workload import Figures, Workload


@dataclass(frozen=True, slots=True)
class Task:
    model: Path
    """The folder of the converted model."""
    variant: str
    """One of the peer's own ways to run it."""
    num_threads: int
    workload: Workload

    def arguments(self) -> list[str]:
        return [
            f"--model={self.model}",
            f"--variant={self.variant}",
            f"--threads={self.num_threads}",
            f"--workload={self.workload.to_json()}",
        ]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        parser.add_argument("--variant", required=True)
        parser.add_argument("--threads", type=int, required=True)
        parser.add_argument("--workload", type=Workload.from_json, required=True)
        parsed = parser.parse_args(arguments)
        return cls(parsed.model, parsed.variant, parsed.threads, parsed.workload)


def answer(figures: Figures) -> None:
    """As a line of its own, whatever else the peer prints before and after."""
    print(f"\n{figures.to_json()}", flush=True)
