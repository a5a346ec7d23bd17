"""Writes a table of the versions that were tried."""

from __future__ import annotations

from tests.installed import report_table, versions_of
from tests.old_pythons.environments import ENVIRONMENTS, ROOT, chosen

PAGE = ROOT / "tests" / "old_pythons" / "README.md"
BEGIN = "<!-- versions: written by make test-standalone -->\n"
END = "<!-- end of versions -->"
results: dict[str, list[str]] = {}


def pytest_runtest_logreport(report):
    """Count an outcome. The reports of xdist's workers come here, too."""
    name = dict(report.user_properties).get("environment")
    if name is not None and (report.when == "call" or report.outcome != "passed"):
        results.setdefault(name, []).append(report.outcome)


def pytest_collection_modifyitems(config, items):
    wanted = chosen(config.getoption("--only").split())
    left_out = [item for item in items if item.callspec.params["environment"] not in wanted]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def table() -> list[str]:
    """Rows of the table, one for each environment: versions, and the tests that passed."""
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
            found = versions_of(environment.interpreter)
            library = "gymnasium" if "gymnasium" in found else "gym"
            row = [found["Python"], f"{library} {found[library]}"]
            row += [found[name] for name in ("numpy", "google.protobuf", "grpc")] + [plays]
            counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
            lines.append(f"| {' | '.join(row)} | {counts} |")
    return lines


def pytest_addoption(parser):
    parser.addoption("--only", default="", metavar="NAMES", help="environments to play with, in place of all")
    parser.addoption("--write", action="store_true", help="write the table into tests/old_pythons/README.md")


def pytest_terminal_summary(terminalreporter):
    report_table(terminalreporter, PAGE, BEGIN, END, table())
