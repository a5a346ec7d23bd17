"""Run the core tests in each environment: `python -m tests.versions.run_core NAME…`; exits 1 where one fails.

The counts stay beside the environment, for the table of docs/transports.md.
"""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

from tests.versions.environments import ENVIRONMENTS, FOLDER, ROOT


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


def main() -> None:
    """Run the core tests, and say which environments failed."""
    failed = []
    for name in sys.argv[1:] or ENVIRONMENTS:
        print(f"core tests in {name}: {', '.join(ENVIRONMENTS[name].pins)}", flush=True)
        command = [ENVIRONMENTS[name].interpreter, "-m", "pytest", "-q", "--numprocesses", "4", "--dist", "worksteal"]
        report = FOLDER / name / "core.xml"
        report.unlink(missing_ok=True)
        command += [f"--junitxml={report}", "-k", "not Pong and not MiniGrid", "@tests/core.txt"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"the core tests failed in {', '.join(failed)}")


if __name__ == "__main__":
    main()
