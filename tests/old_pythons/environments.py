"""The packages that old Pythons are tried with, each installed in a folder of its own below `.venv-versions`.

    python -m tests.old_pythons.environments ~/.pyenv/versions/*/bin/python --only python3.7-gym-0.21.0

The arguments are interpreters; of each version the first one is used. `--only` names environments; without it, all are
installed. What cannot be installed is named at the end, and its tests are skipped with the reason.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-versions"
SIDE_BY_SIDE = 2  # installations at a time: pip waits for the network
REASON = "could-not-be-installed.txt"
DONE = "installed.txt"
# `gym` 0.21 is built by tools that newer ones have left behind.
OLD_TOOLS = ("setuptools<66", "wheel<0.39", "pip<24.1")
GYM_021 = ("gym==0.21.0", "importlib-metadata<5", "numpy<1.24")


@dataclass(frozen=True)
class Play:
    """The environments that are played, by the standalone server and by hand beside it."""

    target: str
    """As the command line of the server names it."""
    interface: str = "today's"
    """`0.21`: a method `seed`, a `reset` without an info, a `step` of four values; `0.25`: `reset` takes the seed."""
    steps: int = 200
    """How many."""


@dataclass(frozen=True)
class Environment:
    """An installation."""

    python: str
    """The version of Python, as `3.8`."""
    packages: tuple[str, ...]
    """The packages that are installed beside grpcio."""
    plays: tuple[Play, ...]
    """The environments that are played there."""
    tools: tuple[str, ...] = ()
    """The packages that are installed first, with which others are built."""
    after: str = ""
    """Code that runs there once it is installed."""

    @property
    def name(self) -> str:
        """The folder's name: the Python and the first package."""
        return f"python{self.python}-{re.sub('[=<>]+', '-', self.packages[0])}"

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    @property
    def reason(self) -> str | None:
        """Why it is not there; None: it is."""
        if (self.folder / DONE).exists():
            return None
        found = FOLDER / f"{self.name}-{REASON}"
        return found.read_text() if found.exists() else "it was not installed yet: make test-standalone does it"


# The package downloads a table that numbers all states. Without a network, one stands in that numbers them as they
# come.
CUBE_STATES = """
import collections, itertools, os, pickle
import gymnasium, rubiks_cube_gym.envs as envs
try:
    gymnasium.make("rubiks-cube-222-v0")
except OSError:
    with open(os.path.join(os.path.dirname(envs.__file__), "rubiks_cube_222_states_FRU.pickle"), "wb") as file:
        pickle.dump(collections.defaultdict(itertools.count().__next__), file)
"""
CARTPOLE, FROZEN_LAKE = Play("CartPole-v1"), Play("FrozenLake-v1")
OLD_PLAYS = (
    Play("CartPole-v1", interface="0.21"),
    Play("FrozenLake-v1", interface="0.21"),
    Play("Blackjack-v1", interface="0.21"),
)
ENVIRONMENTS = (
    # The oldest of everything that this Python gets, and the newest.
    Environment("3.7", (*GYM_021, "protobuf==3.19.6", "grpcio==1.44.0", "numpy==1.18.5"), OLD_PLAYS, OLD_TOOLS),
    Environment("3.7", ("gym==0.26.2", "protobuf"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.8", (*GYM_021, "protobuf"), OLD_PLAYS, OLD_TOOLS),
    Environment("3.8", ("gymnasium==0.26.3", "protobuf==3.20.3", "numpy<2"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.9", ("gym==0.25.2", "protobuf", "numpy<2"), (Play("CartPole-v1", interface="0.25"),)),
    Environment("3.9", ("gymnasium==0.28.1", "protobuf==4.21.12", "numpy<2"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.10", ("gymnasium==0.29.1", "protobuf<6"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.11", ("gym==0.26.2", "protobuf", "numpy<2"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.12", ("gymnasium==1.0.0", "protobuf"), (CARTPOLE, FROZEN_LAKE)),
    # What RLlib 2.60 pins, and the newest of everything.
    Environment("3.11", ("gymnasium==1.2.2", "protobuf==4.25.8", "numpy<2"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.13", ("gymnasium>=1.4", "protobuf"), (CARTPOLE, FROZEN_LAKE)),
    Environment("3.14", ("gymnasium>=1.4", "protobuf"), (CARTPOLE, FROZEN_LAKE)),
    # Packages that pin what this one has left behind.
    Environment(
        "3.8",
        ("gym-super-mario-bros==7.4.0", *GYM_021, "protobuf"),
        (Play("gym_super_mario_bros:SuperMarioBros-v0", interface="0.21"),),
        OLD_TOOLS,
    ),
    Environment(
        "3.10", ("rubiks-cube-gym", "protobuf"), (Play("rubiks_cube_gym:rubiks-cube-222-v0"),), (), CUBE_STATES
    ),
    Environment(
        "3.10",
        ("safety-gymnasium", "protobuf", "numpy<2"),
        (Play("safety_gymnasium:SafetyPointGoal1Gymnasium-v0"),),
    ),
)


def interpreters_by_version(paths: Sequence[str]) -> dict[str, str]:
    """Return the first interpreter of each version among some paths."""
    found: dict[str, str] = {}
    for path in paths:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), path)
    return found


def install(environment: Environment, interpreter: str | None) -> str | None:
    """Install an environment anew; return why that is not possible, or None."""
    if interpreter is None:
        return f"there is no Python {environment.python} among the interpreters that were given"
    shutil.rmtree(environment.folder, ignore_errors=True)
    pip = [str(environment.interpreter), "-m", "pip", "install", "--quiet"]
    steps = [[interpreter, "-m", "venv", str(environment.folder)]]
    if environment.tools:
        steps.append([*pip, "--upgrade", *environment.tools])
    isolation = ["--no-build-isolation"] if environment.tools else []
    packages = dict.fromkeys(environment.packages)
    grpcio = [] if any(package.startswith("grpcio") for package in packages) else ["grpcio"]
    steps.append([*pip, *isolation, *packages, *grpcio])
    if environment.after:
        steps.append([str(environment.interpreter), "-c", environment.after])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            return "; ".join(errors[:3])[:400] or done.stderr[-400:]
    (environment.folder / DONE).write_text("\n".join(packages))
    return None


def chosen(names: Sequence[str]) -> tuple[Environment, ...]:
    """Return the environments of some names; all, where none is given."""
    known = {environment.name for environment in ENVIRONMENTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return tuple(environment for environment in ENVIRONMENTS if not names or environment.name in names)


def main(arguments: Sequence[str]) -> None:
    """Install what is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m tests.old_pythons.environments")
    parser.add_argument("interpreters", nargs="*")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    asked = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    known = interpreters_by_version(asked.interpreters)

    def install_and_note(environment: Environment) -> None:
        if environment.reason is None:
            return
        print(f"installing {environment.name}", flush=True)
        reason = install(environment, known.get(environment.python))
        note = FOLDER / f"{environment.name}-{REASON}"
        note.unlink(missing_ok=True)
        if reason is not None:
            note.write_text(reason)
            print(f"{environment.name} could not be installed: {reason}", flush=True)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(install_and_note, chosen(asked.only)))


if __name__ == "__main__":
    main(sys.argv[1:])
