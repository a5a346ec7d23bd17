"""Run the core tests in each environment: `python -m tests.versions.run_core NAME…`; exits 1 where one fails."""

from __future__ import annotations

import subprocess
import sys

from tests.versions.environments import ENVIRONMENTS, ROOT


def main() -> None:
    """Run the core tests, and say which environments failed."""
    failed = []
    for name in sys.argv[1:] or ENVIRONMENTS:
        print(f"core tests in {name}: {', '.join(ENVIRONMENTS[name].pins)}", flush=True)
        command = [ENVIRONMENTS[name].interpreter, "-m", "pytest", "-q", "--numprocesses", "4", "--dist", "worksteal"]
        if subprocess.run(
            [*command, "-k", "not Pong and not MiniGrid", "@tests/core.txt"], cwd=ROOT, check=False
        ).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"the core tests failed in {', '.join(failed)}")


if __name__ == "__main__":
    main()
