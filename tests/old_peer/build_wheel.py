"""`python -m tests.old_peer.build_wheel COMMIT`: builds the wheel that `tests/ends/test_old_peer.py` plays with.

The wheel's version ends in the commit (0.1.0+506376a), so that nobody takes it for a release. With the same version of
setuptools the same commit gives the same bytes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def git(*arguments: str) -> bytes:
    """Run git in this repository and return its output."""
    return subprocess.run(["git", *arguments], cwd=HERE, stdout=subprocess.PIPE, check=True).stdout


def build(commit: str) -> Path:
    """Build the wheel of a commit into this folder, and return its path."""
    short = git("rev-parse", "--short=7", commit).decode().strip()
    root = git("rev-parse", "--show-toplevel").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("-C", root, "archive", commit))) as archive:
            archive.extractall(folder, filter="data")
        project = Path(folder, "pyproject.toml")
        text = project.read_text(encoding="utf-8")
        project.write_text(re.sub(r'(?m)^version = "(.+)"$', rf'version = "\1+{short}"', text, count=1), "utf-8")
        os.umask(0o022)  # the wheel holds the files' permissions
        when = git("show", "--no-patch", "--format=%ct", commit).decode().strip()
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(HERE), folder],
            env={**os.environ, "SOURCE_DATE_EPOCH": when},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return next(HERE.glob(f"*+{short}-*.whl"))


if __name__ == "__main__":
    print(build(sys.argv[1]))
