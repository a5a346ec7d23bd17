"""Which versions the tests are for, and what was played with which, as a table at the end."""

from __future__ import annotations

from collections import Counter

from tests.installed import report_table, versions_of
from tests.versions.environments import ROOT, at_hand, names_of
from tests.versions.run_core import outcome_of

PAGE = ROOT / "tests" / "versions" / "README.md"
BEGIN = "<!-- versions: written by make test-versions -->\n"
END = "<!-- end of versions -->"
LIBRARIES = ("gymnasium", "numpy", "google.protobuf", "grpc")
pairs: dict[tuple[str, str], str] = {}


def pytest_addoption(parser):
    parser.addoption("--versions", default="", metavar="NAMES", help="environments to play with, not all that exist")
    parser.addoption("--write", action="store_true", help="write the table into tests/versions/README.md")


def pytest_generate_tests(metafunc):
    names = names_of(metafunc.config)
    if {"server", "client"} <= {*metafunc.fixturenames}:
        metafunc.parametrize("server", names)
        metafunc.parametrize("client", names)


def pytest_runtest_logreport(report):
    ends = dict(report.user_properties).get("ends")
    if ends is not None and (report.when == "call" or report.outcome != "passed"):
        pairs[ends] = report.outcome


def played(names: list[str], name: str, end: int) -> str:
    """Return how many environments an environment was played with, as the server (0) or the client (1)."""
    outcomes = Counter(pairs.get((name, other) if end == 0 else (other, name), "not run") for other in names)
    return f"{outcomes['passed']}/{len(names)}"


def table(names: list[str]) -> list[str]:
    """Write a row for each environment: its versions, the core tests, and the pairs of both ends."""
    lines = [
        "| Python | Gymnasium | NumPy | Protobuf | grpcio | core tests | as server, client |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        found = versions_of(at_hand()[name])
        core = "run by `make test`" if name == "this" else outcome_of(name) or "not run"
        cells = [found["Python"], *(found[library] for library in LIBRARIES)]
        cells += [core, ", ".join(played(names, name, end) for end in (0, 1))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pytest_terminal_summary(terminalreporter, config):
    if pairs:
        report_table(terminalreporter, PAGE, BEGIN, END, table(names_of(config)))
