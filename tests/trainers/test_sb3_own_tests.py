"""Stable-Baselines3's own tests of DummyVecEnv and SubprocVecEnv, with `SB3VecEnv` in their places.

They come from the source archive of the installed version, which `make test-trainers` fetches from the package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

import pytest

from tests.trainers.sb3_stand_in import LAYOUT

ROOT = Path(__file__).parents[2]
VERSION = metadata.version("stable-baselines3")
ARCHIVE = Path(sys.prefix) / "archives" / f"stable_baselines3-{VERSION}.tar.gz"
MODULE = "test_vec_envs"

DIFFERENT = (
    (r"test_vecenv_func_checker", "functions"),
    (r"test_vecenv_custom_calls\[\w+-ServedVecEnv\]", "envs"),
    (r"test_subproc_start_method", "start_method"),
    (r"test_framestack_vecenv", "before the first `reset`"),
)
"""The tests that fail, and a word of the reason that docs/trainers.md gives."""
OF_LANES = ((r"test_vecenv_custom_calls\[\w+-ServedSubprocVecEnv\]", "options that differ"),)
"""Those that fail too where all environments are lanes of one world."""


@pytest.mark.parametrize("layout", ["worlds", "lanes", "blocking"])
def test_its_own_tests_pass_but_for_those_that_the_documentation_lists(layout: str, tmp_path: Path) -> None:
    if not ARCHIVE.exists():
        pytest.skip(f"the source archive of Stable-Baselines3 {VERSION} is not there: make test-trainers fetches it")
    with tarfile.open(ARCHIVE) as archive:
        source = archive.extractfile(f"stable_baselines3-{VERSION}/tests/{MODULE}.py")
        assert source is not None
        (tmp_path / f"{MODULE}.py").write_bytes(source.read())
    (tmp_path / "pytest.ini").touch()  # not this project's settings
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.trainers.sb3_stand_in", f"--junitxml={report}", MODULE + ".py"],
        cwd=tmp_path,
        env={**os.environ, LAYOUT: layout, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    cases = {case.get("name", ""): {part.tag for part in case} for case in ElementTree.parse(report).iter("testcase")}
    failed = {name for name, parts in cases.items() if parts & {"failure", "error"}}
    patterns = [pattern for pattern, _ in DIFFERENT + (OF_LANES if layout == "lanes" else ())]
    listed = {name for name in cases if any(re.fullmatch(pattern, name) for pattern in patterns)}
    assert failed == listed, done.stdout
    passed = [name for name, parts in cases.items() if not parts & {"failure", "error", "skipped"}]
    assert len(passed) >= 25


def test_the_documentation_says_why_some_of_its_tests_fail() -> None:
    text = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    for pattern, reason in DIFFERENT + OF_LANES:
        name = re.match(r"\w+", pattern)
        assert name is not None
        assert any(f"`{name[0]}" in line and reason in line for line in text.splitlines()), (pattern, reason)
