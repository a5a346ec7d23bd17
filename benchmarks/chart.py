"""Draws the chart of docs/performance.md: steps per second of this package and its peers, in three kinds of work."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Result

__all__ = ["PANELS", "draw"]

PANELS: dict[str, dict[str, str]] = {
    "One CartPole": {
        "floor-one": "",
        "one-unix": "Gymnasium Bridge, Unix socket",
        "one-grpc": "Gymnasium Bridge, TCP",
        "dm-one": "dm-env-rpc's own client",
        "openenv-one": "OpenEnv",
    },
    "64 CartPoles": {
        "floor-64": "",
        "sync-64": "SyncVectorEnv, in process",
        "lanes-64-unix": "Gymnasium Bridge, Unix socket",
        "lanes-64-grpc": "Gymnasium Bridge, TCP",
        "ray-64": "Ray actors",
        "async-64": "AsyncVectorEnv",
        "rlmesh-64": "rlmesh",
    },
    "64 environments with pictures, 210×160×3": {
        "floor-frames": "",
        "frames-unix": "Gymnasium Bridge, Unix socket",
        "frames-grpc": "Gymnasium Bridge, TCP",
        "frames-async": "AsyncVectorEnv, shared memory",
    },
}
"""The subjects of each panel, and what they are called there; one without a name is the floor."""

OURS, PEER, FLOOR = "#5c6bc0", "#9aa1b3", "#d9480f"
INK = "#1f2430"
"""Of text, axes and whiskers; light where the reader's page is dark."""
STYLE = f"svg {{ color: {INK} }} @media (prefers-color-scheme: dark) {{ svg {{ color: #e4e7ef }} }}"


def draw(path: Path, results: Sequence[Result], title: str) -> bool:
    """Write an SVG chart of the medians and their spread.

    Args:
        path: Where to.
        results: What was measured; panels of which nothing was are left out.
        title: A line below the chart: on what it was measured.

    Returns:
        Whether there was anything to draw.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    found = {result.subject.name: result for result in results if result.values}
    panels = {
        name: [(found[key], label) for key, label in rows.items() if key in found] for name, rows in PANELS.items()
    }
    panels = {name: rows for name, rows in panels.items() if any(label for _, label in rows)}
    if not panels:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    sizes = [sum(bool(label) for _, label in rows) + 1.2 for rows in panels.values()]
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context({**ink, "svg.hashsalt": "chart"}):
        figure: Any = pyplot.figure(figsize=(8.0, 0.36 * sum(sizes) + 1.3), layout="constrained")
        figure.get_layout_engine().set(hspace=0.08)
        axes: Any = figure.subplots(len(panels), 1, height_ratios=sizes, squeeze=False)
        for (name, rows), (axis,) in zip(panels.items(), axes, strict=True):
            _panel(axis, name, rows)
        axes[-1, 0].set_xlabel("environment steps per second: median, fastest and slowest round", fontsize=8.5)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, PEER)]
        handles.append(pyplot.Line2D([0], [0], color=FLOOR, linestyle="--"))
        labels = ["Gymnasium Bridge", "others", "floor of the cost: the environments and a bare echo of the bytes"]
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
        figure.supxlabel(title, fontsize=6.5, x=0.01, ha="left")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None}, transparent=True)
        pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = drawn.getvalue().replace(INK, "currentColor").replace("<defs>", f"<defs>\n  <style>{STYLE}</style>", 1)
    path.write_text(svg, encoding="utf-8")
    return True


def _panel(axis: Any, name: str, rows: Sequence[tuple[Result, str]]) -> None:
    """Draw the bars of one kind of work, the fastest on top, and its floor."""
    bars = sorted(((result, label) for result, label in rows if label), key=lambda row: row[0].median)
    medians = [result.median for result, _ in bars]
    spread = [
        [result.median - min(result.values) for result, _ in bars],
        [max(result.values) - result.median for result, _ in bars],
    ]
    colors = [OURS if result.subject.kind == "ours" else PEER for result, _ in bars]
    drawn = axis.barh(
        [label for _, label in bars],
        medians,
        xerr=spread,
        color=colors,
        height=0.7,
        error_kw={"lw": 1, "ecolor": INK, "capsize": 2.5},
    )
    longest = max(max(result.values) if label else result.median for result, label in rows)
    axis.set_xlim(0, 1.17 * longest)
    for bar, median in zip(drawn, medians, strict=True):
        axis.text(1.16 * longest, bar.get_y() + 0.35, f"{median:,.0f}", fontsize=8, ha="right", va="center")
    for result, label in rows:
        if not label:
            axis.axvline(result.median, color=FLOOR, linestyle="--", linewidth=1.2)
    axis.set_title(name, fontsize=9, loc="left", fontweight="bold")
    axis.tick_params(labelsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
