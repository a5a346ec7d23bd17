"""What was tried with which versions, as a table at the end."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.standalone.environments import ENVIRONMENTS, ROOT, Environment

VERSIONS = """
import importlib, json, sys
found = {"Python": sys.version.split()[0]}
for name in ("gymnasium", "gym", "numpy", "google.protobuf", "grpc"):
    try:
        found[name] = importlib.import_module(name).__version__
    except ImportError:
        pass
print(json.dumps(found))
"""
PAGE = ROOT / "docs" / "old-python.md"
BEGIN = "<!-- versions: written by make test-standalone -->\n"
END = "<!-- end of versions -->"
results: dict[str, list[str]] = {}


def versions_of(environment: Environment) -> dict[str, str]:
    """The versions of what an environment has."""
    done = subprocess.run(
        [str(environment.interpreter), "-W", "ignore", "-c", VERSIONS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    environment = getattr(item, "callspec", None) and item.callspec.params.get("environment")
    if environment is not None and (report.when == "call" or report.outcome != "passed"):
        results.setdefault(environment.name, []).append(report.outcome)
    return report


def table() -> list[str]:
    """What was run, a row for each environment: versions, and the tests that passed."""
    lines = ["| Python | library | NumPy | Protobuf | grpcio | played | tests |", "|---|---|---|---|---|---|---|"]
    for environment in ENVIRONMENTS:
        outcomes = results.get(environment.name, [])
        plays = ", ".join(play.target.rpartition(":")[2] for play in environment.plays)
        if environment.reason is not None:
            reason = " ".join(environment.reason.split())
            lines.append(
                f"| {environment.python} | {environment.packages[0]} | | | | {plays} | not installed: {reason} |"
            )
        elif outcomes:
            found = versions_of(environment)
            library = "gymnasium" if "gymnasium" in found else "gym"
            row = [found["Python"], f"{library} {found[library]}"]
            row += [found[name] for name in ("numpy", "google.protobuf", "grpc")] + [plays]
            counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
            lines.append(f"| {' | '.join(row)} | {counts} |")
    return lines


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write the table into docs/old-python.md")


def pytest_terminal_summary(terminalreporter, config):
    lines = table()
    for line in lines:
        terminalreporter.write_line(line)
    if config.getoption("--write"):
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
