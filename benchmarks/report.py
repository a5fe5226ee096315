"""What people see of a benchmark: the machine, tables, and one JSON object at the very end."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Where nobody says how wide the output is.
_PLAIN_WIDTH = 100


class Report:
    def __init__(self) -> None:
        self._console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def machine(self, num_threads: int) -> None:
        """Figures are only worth something where nothing else runs: the load tells."""
        loads = " ".join(f"{load:.2f}" for load in os.getloadavg())
        self.say(f"{_cpu_name()}, {num_threads} threads, load average {loads}")
        if os.getloadavg()[0] > 0.5:
            self.say("note: something else is running here; do not trust absolute figures")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        # rich would wrap a title to the width of a narrow table.
        self.say(f"\n{title}")
        table = Table(box=None, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        self.say("")

    def last_line(self, result: dict[str, Any]) -> None:
        self.say(json.dumps(result))


def rounded(values: dict[int, float], digits: int = 2) -> dict[str, float]:
    """As JSON has it: keys are text."""
    return {str(key): round(value, digits) for key, value in values.items()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
