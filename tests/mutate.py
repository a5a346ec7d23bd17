"""Break the protocol on purpose: is each test that names a requirement seen to fail? (`python -m tests.mutate --help`)

`mutants.txt` lists faults, each with the requirements that it breaks (D-1 to D-25). For each, a copy of this repository
is broken, and the tests that name the requirement, in their docstring or in a comment, are run on it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.places import ROOT

OTHERS = (
    # They hold the conformance checks and the public library to the protocol, on servers that are not ours.
    "tests/testing/test_conformance.py",
    "tests/ends/test_public_server.py",
    # They need environments of their own.
    "tests/network/",
    "tests/old_pythons/",
    "tests/pins/",
    "tests/ray/",
    "tests/trainers/",
    "tests/versions/",
)
OUTCOME = re.compile(r"^(tests/\S+?::\w+)(?:\[.*\])? (PASSED|FAILED|ERROR)", re.MULTILINE)
STARTED = re.compile(r"^(tests/\S+?::\w+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault."""

    number: int
    requirements: list[str]
    path: str
    old: str
    new: str


def read_mutants(text: str) -> Iterator[Mutant]:
    """Read blocks of a line `D-n,D-m FILE`, lines `-OLD` and lines `+NEW`; `#` begins a comment."""
    blocks = re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    for number, block in enumerate(blocks, 1):
        head, *lines = block.splitlines()
        requirements, path = head.split()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        if (ROOT / path).read_text().count(old) != 1:
            raise SystemExit(f"mutant {number} ({head}): expected its old text once in the file; mend mutants.txt")
        yield Mutant(number, requirements.split(","), path, old, new)


def tests_by_requirement() -> dict[str, list[str]]:
    """The node ids of the tests that name each requirement; `D-1 to D-5` names five."""
    found = defaultdict(list)
    files = {file.relative_to(ROOT).as_posix(): file for file in ROOT.glob("tests/**/test_*.py")}
    for name, file in sorted(files.items(), key=lambda item: (item[1].parent.name != "sessions", item[0])):
        if name.startswith(OTHERS):
            continue
        text = file.read_text()
        if not re.search(r"\bD-\d", text):
            continue  # most files: to parse them takes seconds
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                named = {int(number) for number in re.findall(r"\bD-(\d+)", source)}
                for first, last in re.findall(r"\bD-(\d+) to D-(\d+)", source):
                    named.update(range(int(first), int(last) + 1))
                for number in named:
                    found[f"D-{number}"].append(f"{name}::{node.name}")
    return found


def run_tests(folder: Path, tests: list[str], every: bool, timeout: float) -> tuple[set[str], bool]:
    """Run tests in the copy; return which of them failed, and whether pytest ran them at all."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "-p", "no:cacheprovider", "--color=no"]
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(
            [*command, *([] if every else ["-x"]), *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    failed = {test for test, outcome in OUTCOME.findall(text) if outcome != "PASSED"}
    if process.returncode < 0:  # the one that was under way hung
        failed.update(STARTED.findall(text)[-1:])
    return failed, code in (0, 1)


def main() -> int:
    """Run the mutants; 1 where a mutant, or with --every a test, survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="D-n", help="the requirements to look at (default: all)")
    parser.add_argument("--mutant", nargs="*", type=int, metavar="N", help="the mutants to run, by number")
    parser.add_argument("--every", action="store_true", help="run every test, to find those that no mutant fails")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds for a mutant's tests")
    arguments = parser.parse_args()
    named = tests_by_requirement()

    def tests_of(requirements: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(test for requirement in requirements for test in named[requirement]))

    mutants = [
        mutant
        for mutant in read_mutants((ROOT / "tests" / "mutants.txt").read_text())
        if not arguments.only or {*arguments.only} & {*mutant.requirements}
        if not arguments.mutant or mutant.number in arguments.mutant
    ]
    survived = 0
    seen: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "notebooks"))
        looked_at = dict.fromkeys(each for mutant in mutants for each in mutant.requirements)
        failed, ran = run_tests(folder, tests_of(looked_at), True, 10 * arguments.timeout)
        if failed or not ran:
            raise SystemExit(f"expected the tests to pass without a fault, got {sorted(failed)}")
        for mutant in mutants:
            file, tests = folder / mutant.path, tests_of(mutant.requirements)
            whole = file.read_text()
            file.write_text(whole.replace(mutant.old, mutant.new))
            failed, ran = run_tests(folder, tests, arguments.every, arguments.timeout)
            file.write_text(whole)
            for requirement in mutant.requirements:
                seen[requirement] |= failed
            survived += not failed
            verdict = f"failed {len(failed)} of {len(tests)}" if failed else "SURVIVED" if ran else "DID NOT RUN"
            change = " ".join(mutant.new.split()) or "(left out)"
            title = f"{mutant.number:3} {','.join(mutant.requirements):10} {verdict:16} {mutant.path}"
            print(f"{title}: {change:.60}", flush=True)
            for test in sorted(failed):
                print(f"      {test}", flush=True)
    if arguments.every:
        for requirement, failed in seen.items():
            for test in sorted({*named[requirement]} - failed):
                survived += 1
                print(f"never failed for {requirement}: {test}")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
