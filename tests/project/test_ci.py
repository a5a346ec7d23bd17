"""What runs all checks: what is installed once and kept, what each step says, and the time that all may take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

CACHED = ROOT / ".ci" / "cached"
RUN = ROOT / ".ci" / "run"
STEP = ROOT / ".ci" / "step"

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="these are programs for POSIX"),
    pytest.mark.skipif(not CACHED.is_file(), reason="this is not a clone"),
]
PYPROJECT = """[build-system]
requires = ["setuptools"]

[project]
name = "p"
dependencies = ["numpy"]

[project.optional-dependencies]
test = ["pytest"]

[tool.setuptools]
packages = ["p"]

[tool.ruff]
line-length = 100
"""


class Cache:
    """Runs `.ci/cached` in a folder, with a command that adds a line to a file each time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def runs(self, *files: str, what: str = "first", code: int = 0) -> bool:
        """Return whether the command was run."""
        script = f"echo {what} >> runs; exit {code}"
        command = [sys.executable, CACHED, "made/stamp", *files, "--", "sh", "-c", script]
        assert subprocess.run(command, cwd=self.folder, check=False).returncode in (0, code)
        lines = self.folder / "runs"
        before, self.count = self.count, len(lines.read_text().splitlines()) if lines.exists() else 0
        return self.count > before


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_what_was_installed_is_installed_again_only_where_something_else_is_wanted(cache: Cache) -> None:
    assert cache.runs()
    assert not cache.runs()
    assert cache.runs(what="second")
    assert not cache.runs(what="second")
    assert cache.runs(), "only the last one is there"


def test_the_time_of_a_file_says_nothing_and_its_content_all(cache: Cache) -> None:
    file = cache.folder / "requirements.txt"
    file.write_text("numpy==1\n")
    assert cache.runs("requirements.txt")
    os.utime(file, (2e9, 2e9))
    assert not cache.runs("requirements.txt")
    file.write_text("numpy==2\n")
    os.utime(file, (1, 1))
    assert cache.runs("requirements.txt")


@pytest.mark.parametrize(
    ("old", "new", "again"),
    [
        ("line-length = 100", "line-length = 90", False),
        ('["numpy"]', '["numpy>=2"]', True),
        ('["pytest"]', '["pytest", "rich"]', True),
        ('["p"]', '["p", "p.q"]', True),
        ('["setuptools"]', '["setuptools>=77"]', True),
    ],
)
def test_of_a_project_only_what_is_installed_counts(cache: Cache, old: str, new: str, again: bool) -> None:
    file = cache.folder / "pyproject.toml"
    file.write_text(PYPROJECT)
    assert cache.runs("pyproject.toml")
    file.write_text(PYPROJECT.replace(old, new))
    assert cache.runs("pyproject.toml") == again


def test_a_folder_counts_with_all_its_files_but_for_what_python_writes(cache: Cache) -> None:
    inner = cache.folder / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "a.py").write_text("1")
    assert cache.runs("package")
    (inner / "__pycache__").mkdir()
    (inner / "__pycache__" / "a.pyc").write_text("1")
    assert not cache.runs("package")
    (inner / "a.py").rename(inner / "b.py")
    assert cache.runs("package")


def test_an_installation_that_failed_is_tried_again(cache: Cache) -> None:
    assert cache.runs()
    assert cache.runs(what="other", code=3)
    assert cache.runs(what="other", code=3)
    assert cache.runs(), "what was there before may be broken"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test", "test-ci", "test-all"])
def test_the_tests_are_compiled_once_before_several_processes_read_them(tmp_path: Path, target: str) -> None:
    def commands() -> list[str]:
        command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()

    (compiles,) = (at for at, line in enumerate(commands()) if "--collect-only" in line)
    (runs,) = (at for at, line in enumerate(commands()) if "--numprocesses" in line)
    assert compiles < runs
    (tmp_path / ".compiled").touch()
    assert not any("--collect-only" in line for line in commands())


@pytest.fixture
def run_all(tmp_path: Path) -> Callable[..., Any]:
    """Run `.ci/run` where all commands that it calls only say what they are, or fail."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    commands = tmp_path / "commands"
    commands.mkdir()
    for path in (*(commands / name for name in ("make", "python3", "npm", "apt-get", "dpkg")),):
        path.write_text(
            '#!/bin/sh\necho "CALLED ${0##*/} $*"\ncase "${0##*/} $*" in *"${FAILS:-no such}"*) exit 2;; esac\n'
        )
        path.chmod(0o755)

    def run(**environment: str) -> Any:
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", tmp_path / ".ci" / "run"],
            env={**os.environ, "PATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_each_step_says_its_seconds_and_all_of_them_are_listed_at_the_end(run_all: Callable[..., Any]) -> None:
    done = run_all()
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^== (.+): \d+ s$", done.stdout, re.MULTILINE)
    listed = re.findall(r"^ +\d+ s  (.+)$", done.stdout, re.MULTILINE)
    assert listed == [*said, "in all"]
    assert "tests, networks" in said
    calls = re.findall(r"^CALLED make (.*)$", done.stdout, re.MULTILINE)
    assert len(said) >= len(calls)
    assert any("timed-check " in call for call in calls)
    assert any("timed-test-trainers" in call for call in calls)
    assert not any("timed-test-ray" in call for call in re.findall("make .*", run_all(CI_RAY="0").stdout))


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_step_that_fails_ends_all_and_the_seconds_so_far_are_listed(run_all: Callable[..., Any]) -> None:
    done = run_all(FAILS="timed-test-ci")
    assert done.returncode == 2
    assert re.search(r"^ +\d+ s  tests, networks\n +\d+ s  in all$", done.stdout, re.MULTILINE)
    assert "timed-test-peers" not in done.stdout
    assert run_all(FAILS="grpcjs").returncode == 0, "its tests are skipped"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_run_that_takes_longer_than_its_budget_fails_and_says_so(run_all: Callable[..., Any]) -> None:
    done = run_all(CI_BUDGET="-1")
    assert done.returncode == 1
    assert "the budget is -1" in done.stderr
    assert "the budget" not in run_all().stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_passes_shellcheck() -> None:
    done = subprocess.run(["shellcheck", RUN], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_what_an_installation_writes_is_shown_where_it_fails_and_else_only_its_name(code: int) -> None:
    program = f"import sys; print('collecting'); print('no space left', file=sys.stderr); sys.exit({code})"
    command = [sys.executable, str(STEP), "Installing the package", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ended = "failed" if code else "done"
    assert re.fullmatch(rf"Installing the package …\nInstalling the package … {ended} in \d+ s\n", done.stdout)
    assert sorted(done.stderr.splitlines()) == (["collecting", "no space left"] if code else [])
    assert done.returncode == code


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_checks_in_python_come_first_and_a_failure_hides_no_other_check(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\n")
    npm.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "--dry-run", "check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    places = [done.stdout.find(tool) for tool in ("ruff check", "mypy", "docs/generate.py", "npm install", "eslint")]
    assert places == sorted(places), done.stdout
    assert places[0] > 0
    assert "--keep-going check-python check-web check-calls" in done.stdout
    assert "npm install --silent" not in done.stdout


@pytest.mark.parametrize("version", ["3.9.18", "3.6.9"])
def test_make_says_which_python_it_needs_before_it_makes_anything(version: str, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    numbers = tuple(map(int, version.split(".")))
    # Runs what it is given as this Python would, were it an older one.
    old.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info, sys.version = {numbers}, '{version} (old)'\n"
        f"sys.executable = {str(old)!r}\n"
        "assert sys.argv[1] == '-c', sys.argv\nexec(sys.argv[2])\n"
    )
    old.chmod(0o755)
    made = tmp_path / "made"
    command = ["make", "-s", "demo", f"PYTHON={old}", f"VENV={made}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"needs Python 3.10 or newer, and {old} is Python {version}" in done.stderr
    assert "make demo PYTHON=" in done.stderr
    assert "Traceback" not in done.stderr
    assert not made.exists()


def test_make_alone_lists_the_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "make demo " in done.stdout
    assert (
        done.stdout
        == subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    )


@pytest.mark.parametrize(
    ("line", "network"),
    [
        ("NewConnectionError: Failed to establish a new connection: Connection refused", True),
        ("NameResolutionError: Failed to resolve 'pypi.org'", True),
        ("ERROR: numpy requires a different Python", False),
    ],
)
def test_a_step_tells_a_line_once_and_that_the_network_is_missing_last(line: str, network: bool) -> None:
    program = f"import sys; print({line!r}); print('the end'); print({line!r}); sys.exit(3)"
    command = [sys.executable, STEP, "Installing", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    said = done.stderr.splitlines()
    assert said[:2] == [line, "the end"]
    assert len(said) == 2 + network
    assert not network or said[2].startswith("The network, or a server in it, could not be reached")
