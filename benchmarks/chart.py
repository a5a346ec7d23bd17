"""Draws what a run measured: a bar for each subject, a panel for each group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Result

__all__ = ["draw"]


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Write an SVG chart of medians with their spread.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    measured = [result for result in results if result.values]
    groups = list(dict.fromkeys(result.subject.group for result in measured))
    sizes = [sum(result.subject.group == group for result in measured) for group in groups]
    figure: Any = pyplot.figure(figsize=(9.0, 0.36 * sum(sizes) + 0.75 * len(groups) + 0.6), layout="constrained")
    panels: Any = figure.subplots(len(groups), 1, height_ratios=[size + 1.0 for size in sizes], squeeze=False)
    for group, (axes,) in zip(groups, panels, strict=True):
        members = [result for result in measured if result.subject.group == group][::-1]
        medians = [result.median for result in members]
        spread = [
            [result.median - min(result.values) for result in members],
            [max(result.values) - result.median for result in members],
        ]
        ours = [result.subject.title.startswith(("gRPC", "Unix", "the same")) for result in members]
        colors = ["#3b6ea8" if mine else "#b9b9b9" for mine in ours]
        bars = axes.barh([result.subject.title for result in members], medians, xerr=spread, color=colors, height=0.7)
        axes.bar_label(
            bars, [f" {median:,.0f}" if median >= 100 else f" {median:.3g}" for median in medians], fontsize=7
        )
        axes.set_title(f"{group} ({members[0].subject.unit})", fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    figure.suptitle(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
