"""Writes a table of the packages and environments that were played."""

from __future__ import annotations

import subprocess
from collections import Counter

from tests.installed import report_table, versions_of
from tests.pins.environments import RLLIB, ZOOS, Pinned
from tests.versions.environments import ROOT

PAGE = ROOT / "tests" / "versions" / "README.md"
BEGIN = "<!-- pins: written by make test-pins -->\n"
END = "<!-- end of pins -->"
ASKS = """
import importlib.metadata, re, sys
name = sys.argv[1]
asked = [text.partition(";")[0].strip() for text in importlib.metadata.requires(name) or []]
asked = [text for text in asked if re.match(r"gymnasium\\b(?!-)", text)]
print(name, importlib.metadata.version(name), ", ".join(dict.fromkeys(asked)))
"""
outcomes: dict[str, list[str]] = {}


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write the table into tests/versions/README.md")


def pytest_runtest_logreport(report):
    name = dict(report.user_properties).get("pinned")
    if name is not None and (report.when == "call" or report.outcome != "passed"):
        outcomes.setdefault(name, []).append(report.outcome)


def asked_by(pinned: Pinned) -> list[str]:
    """Return a package's name and version, and which Gymnasium it asks for."""
    name = pinned.environment.pins[0].partition("[")[0].partition("=")[0]
    command = [str(pinned.environment.interpreter), "-c", ASKS, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    name, version, asked = done.stdout.strip().split(" ", 2)
    return [f"{name} {version}", f"`{asked}`"]


def table() -> list[str]:
    """Write a row for each package: what it asks for, what pip chose, and the tests."""
    lines = [
        "| package | asks for | Python | Gymnasium | played | tests |",
        "|---|---|---|---|---|---|",
    ]
    for pinned in (*ZOOS, RLLIB):
        name = pinned.environment.name
        plays = (
            ", ".join(play.target.rpartition(":")[2] for play in (*pinned.plays, *pinned.single))
            or "PPO on CartPole-v1"
        )
        if pinned.reason is not None:
            lines.append(f"| {pinned.environment.pins[0]} | | | | {plays} | not installed: {pinned.reason} |")
        elif name in outcomes:
            found = versions_of(pinned.environment.interpreter)
            counts = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(outcomes[name]).items()))
            cells = [*asked_by(pinned), found["Python"], found["gymnasium"], plays, counts]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def pytest_terminal_summary(terminalreporter):
    report_table(terminalreporter, PAGE, BEGIN, END, table())
