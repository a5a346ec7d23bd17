"""Run the core tests in each environment: `python -m tests.versions.run_core NAME…`; exits 1 where one fails.

`-m "not repeat"` leaves out those that repeat others with further parameters.

Some environments are tested at a time, and what pytest prints comes when one has ended. The counts stay beside the
environment, for the table of tests/versions/README.md.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

from tests.versions.environments import ENVIRONMENTS, FOLDER, ROOT, SIDE_BY_SIDE

WORKERS = 2  # of pytest for each environment; each collects all tests, so that more of them cost more than they save


def outcome_of(name: str) -> str | None:
    """Return what the last run of the core tests in an environment gave, such as `834 passed`; None: there was none."""
    report = FOLDER / name / "core.xml"
    if not report.is_file():
        return None
    suites = list(ElementTree.parse(report).iter("testsuite"))
    count = {
        kind: sum(int(suite.attrib[kind]) for suite in suites) for kind in ("tests", "errors", "failures", "skipped")
    }
    failed = count["errors"] + count["failures"]
    passed = f"{count['tests'] - failed - count['skipped']} passed"
    return f"{passed}, {failed} failed" if failed else passed


def run_core(name: str, marks: str) -> bool:
    """Run the core tests in an environment and print what pytest printed; return whether all passed.

    Args:
        name: The environment.
        marks: Which of the tests, as pytest's `-m` has it; "": all.
    """
    report = FOLDER / name / "core.xml"
    report.unlink(missing_ok=True)
    command = [ENVIRONMENTS[name].interpreter, "-m", "pytest", "-q", "--dist", "worksteal", "-p", "no:cacheprovider"]
    command += [f"--numprocesses={WORKERS}", f"--junitxml={report}", "-k", "not Pong and not MiniGrid"]
    command += ["-m", marks, "@tests/core.txt"]
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(f"core tests in {name}: {', '.join(ENVIRONMENTS[name].pins)}\n{done.stdout}", flush=True)
    return done.returncode == 0


def main() -> None:
    """Run the core tests, and say which environments failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments, as environments.py has them; none: all")
    parser.add_argument("-m", dest="marks", default="", metavar="MARKS", help="which of the tests, as for pytest")
    asked = parser.parse_args()
    names, run = asked.names or list(ENVIRONMENTS), functools.partial(run_core, marks=asked.marks)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        failed = [name for name, passed in zip(names, pool.map(run, names), strict=True) if not passed]
    if failed:
        sys.exit(f"the core tests failed in {', '.join(failed)}")


if __name__ == "__main__":
    main()
