"""What was tried with which versions, as a table at the end."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.standalone.environments import ENVIRONMENTS, Environment

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


def pytest_terminal_summary(terminalreporter):
    write = terminalreporter.write_line
    write("| Python | library | NumPy | Protobuf | grpcio | beside it | tests |")
    write("|---|---|---|---|---|---|---|")
    for environment in ENVIRONMENTS:
        outcomes = results.get(environment.name, [])
        if environment.reason is not None:
            write(f"| {environment.python} | {environment.packages[0]} | | | | | not installed: {environment.reason} |")
        elif outcomes:
            found = versions_of(environment)
            library = "gymnasium" if "gymnasium" in found else "gym"
            zoo = "" if environment.packages[0].startswith(("gym==", "gymnasium==")) else environment.packages[0]
            counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
            row = [found["Python"], f"{library} {found[library]}"]
            row += [found[name] for name in ("numpy", "google.protobuf", "grpc")] + [zoo]
            write(f"| {' | '.join(row)} | {counts} |")
