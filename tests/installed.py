"""The versions that an interpreter has, and tables of them in the documentation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CODE = """
import importlib, json, sys
found = {"Python": sys.version.split()[0]}
for name in ("gymnasium", "gym", "numpy", "google.protobuf", "grpc"):
    try:
        found[name] = importlib.import_module(name).__version__
    except ImportError:
        pass
print(json.dumps(found))
"""


def versions_of(interpreter: Path) -> dict[str, str]:
    """Return the versions of Python and of what it imports, by their names."""
    done = subprocess.run(
        [str(interpreter), "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def report_table(reporter: Any, page: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Print lines at the end of a run of pytest; with its option `--write`, put them between two others of a page."""
    for line in lines:
        reporter.write_line(line)
    if reporter.config.getoption("--write"):
        head, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(f"{head}{begin}{chr(10).join(lines)}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
