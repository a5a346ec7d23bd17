"""Write `grafana.json`, a dashboard of Grafana over the metrics of servers; with `--check` say whether it is current.

    python deploy/grafana.py

Every metric of `bridge.core.server.metrics.METRICS` has a panel: counters as rates, limits beside what they limit.
Its title is short, and what exactly it shows is its description.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bridge.core.server.metrics import METRICS, Metric

FILE = Path(__file__).with_suffix(".json")
_LIMITED = {
    "bridge_worlds": "bridge_max_worlds",
    "bridge_connections": "bridge_max_connections",
    "bridge_viewer_connections": "bridge_max_viewers",
}
"""The gauges that have a limit, which is drawn in the same panel."""
_UNITS = {"bridge_queued_bytes": "bytes", "bridge_charged_seconds_total": "percentunit", "bridge_step_seconds": "s"}
_ROWS = {"Rates": ("counter", "histogram"), "State": ("gauge",)}
_TITLES = {
    "bridge_step_seconds": "Step latency",
    "bridge_charged_seconds_total": "Charged processor time",
    "bridge_build_info": "Servers by version",
    "bridge_slots": "Slots in use",
    "bridge_queued_bytes": "Queued memory",
}
"""The titles that a metric's name would not do for."""
_QUANTILES = (0.5, 0.9, 0.99)
_CHOSEN = '{job=~"$job",instance=~"$instance"}'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 8, 7


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    limits = set(_LIMITED.values())
    shown = [metric for metric in METRICS if metric.name not in limits]
    return {
        "title": "Gymnasium Bridge servers",
        "uid": "gymnasium-bridge",
        "schemaVersion": 39,
        "tags": ["gymnasium-bridge"],
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(shown),
    }


def _panels(shown: list[Metric]) -> list[dict[str, Any]]:
    """Return the panels of metrics, in rows of panels of one kind."""
    found: list[dict[str, Any]] = []
    top = 0
    for title, kinds in _ROWS.items():
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
                "panels": [],
                "targets": [],
            }
        )
        metrics = [metric for metric in shown if metric.kind in kinds]
        for at, metric in enumerate(metrics):
            place = {"x": at % 3 * _WIDTH, "y": top + 1 + at // 3 * _HEIGHT}
            found.append(_panel(len(found) + 1, metric, place))
        top += 1 + -(-len(metrics) // 3) * _HEIGHT
    return found


def _variables() -> list[dict[str, Any]]:
    """Return what is chosen above the panels: where the metrics are kept, and which servers are shown."""
    found: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    for label, within in (("job", ""), ("instance", '{job=~"$job"}')):
        found.append(
            {
                "name": label,
                "type": "query",
                "datasource": _DATASOURCE,
                "query": f"label_values(bridge_build_info{within}, {label})",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return found


def _panel(number: int, metric: Metric, place: dict[str, int]) -> dict[str, Any]:
    """Return the panel of a metric."""
    name = metric.name.removeprefix("bridge_").removesuffix("_total").replace("_", " ").capitalize()
    per_second = " per second" if metric.kind == "counter" and metric.name not in _UNITS else ""
    return {
        "id": number,
        "type": "timeseries",
        "title": f"{_TITLES.get(metric.name, name)}{per_second}",
        "description": metric.text,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, **place},
        "fieldConfig": {"defaults": {"unit": _UNITS.get(metric.name, "short"), "min": 0}, "overrides": []},
        "targets": [
            {"refId": "ABC"[at], "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(_queries(metric))
        ],
    }


def _queries(metric: Metric) -> list[tuple[str, str]]:
    """Return the queries of a panel, each with the name of its lines."""
    by = ", ".join(("instance", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    if metric.kind == "histogram":
        rates = f"sum by (instance, le) (rate({metric.name}_bucket{_CHOSEN}[$__rate_interval]))"
        return [(f"histogram_quantile({each}, {rates})", f"{legend} {each:.0%}") for each in _QUANTILES]
    if metric.kind == "counter":
        return [(f"sum by ({by}) (rate({metric.name}{_CHOSEN}[$__rate_interval]))", legend)]
    found = [(f"sum by ({by}) ({metric.name}{_CHOSEN})", legend)]
    if metric.name in _LIMITED:
        found.append((f"sum by ({by}) ({_LIMITED[metric.name]}{_CHOSEN})", f"{legend} limit"))
    return found


def main() -> None:
    """Write the file, or compare it."""
    fresh = json.dumps(dashboard(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.write_text(fresh, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text("utf-8") != fresh:
        sys.exit(f"{FILE.name} is not current; run python deploy/grafana.py")


if __name__ == "__main__":
    main()
