"""Draws what the benchmarks measured, as SVG; the same figures give the same file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "infinite-llm", "font.size": 9})

from matplotlib import pyplot  # noqa: E402

_PANEL_INCHES = (4.5, 3.2)

#: By series, the value at each label; None where there is none.
Series = Mapping[str, Sequence[float | None]]


def grouped_bars(path: Path, panels: Mapping[str, tuple[Sequence[str], Series]]) -> None:
    """One panel beside the other, each by its title: labels on the x axis, a bar per series."""
    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(width * len(panels), height), squeeze=False
    )
    named: list[str] = []
    for axis, (title, (labels, series)) in zip(axes[0], panels.items(), strict=True):
        bar = 0.8 / len(series)
        for index, (name, values) in enumerate(series.items()):
            at = [position - 0.4 + bar * (index + 0.5) for position in range(len(labels))]
            axis.bar(at, [value or 0.0 for value in values], bar, label=name)
        axis.set_xticks(range(len(labels)), labels)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        if list(series) != named:  # else the legend before says it
            axis.legend(frameon=False)
            named = list(series)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
