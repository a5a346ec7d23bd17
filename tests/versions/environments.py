"""Python environments with other versions of Gymnasium, NumPy and Protobuf.

`python -m tests.versions.environments NAME…` makes those that are missing; without a name, all of them. Each is a
virtual environment, `.venv-versions/NAME`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".venv-versions"
SIDE_BY_SIDE = 2
"""How many environments are made, or tested, at a time: pip waits for the network, many tests for processes."""
# What the core tests need beside the package.
TESTS = ("dm-env-rpc==1.1.6", "hypothesis>=6.100", "psutil>=6", "pytest>=8.2", "pytest-xdist>=3.6")


@dataclasses.dataclass(frozen=True)
class Environment:
    """A set of versions."""

    name: str
    python: str
    """The wanted version of Python, such as `3.10`; where it is not at hand, the running one is taken."""
    pins: tuple[str, ...]
    """Requirements beside `tests`."""
    before: tuple[str, ...] = ()
    """The packages that are installed first, by a call of pip of its own."""
    tests: tuple[str, ...] = TESTS
    """The packages that the tests need that are run there."""

    @property
    def interpreter(self) -> Path:
        """The path of its Python."""
        return FOLDER / self.name / "bin" / "python"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        # The lowest versions that pyproject.toml allows.
        Environment(
            "oldest",
            "3.10",
            (
                "gymnasium[classic-control]==1.1.0",
                "numpy==1.26.0",
                "grpcio==1.66.0",
                "protobuf==4.25.0",
                "cloudpickle==3.0.0",
                "hpack==4.1.0",
            ),
        ),
        Environment("1.1", "3.12", ("gymnasium[classic-control]==1.1.1",)),
        # gymnasium-search-race pins this one, the last without `Discrete(dtype=)`.
        Environment("1.2.1", "3.11", ("gymnasium[classic-control]==1.2.1",)),
        # RLlib 2.60 pins this Gymnasium.
        Environment("rllib", "3.11", ("gymnasium[classic-control]==1.2.2", "numpy==1.26.4", "protobuf==4.25.8")),
        Environment("1.2", "3.13", ("gymnasium[classic-control]==1.2.3",)),
        Environment("1.3-old", "3.10", ("gymnasium[classic-control]==1.3.0", "numpy==1.26.0", "protobuf==5.29.5")),
        Environment("1.3", "3.12", ("gymnasium[classic-control]==1.3.0",)),
        Environment("1.4-old", "3.10", ("gymnasium[classic-control]==1.4.0", "numpy==1.26.0", "protobuf==4.25.0")),
        Environment("newest", "3.14", ("gymnasium[classic-control]>=1.4",)),
    )
}
"""The environments by their names."""


def at_hand() -> dict[str, Path]:
    """Return the interpreters of the environments that are made, and the running one as `this`."""
    made = {name: each.interpreter for name, each in ENVIRONMENTS.items() if (FOLDER / name / "made").exists()}
    return {"this": Path(sys.executable), **made}


def names_of(config: Any) -> list[str]:
    """Return the environments a run of pytest plays with: the running one, and those of `--versions`."""
    wanted = config.getoption("--versions").split() or ENVIRONMENTS
    return [name for name in at_hand() if name == "this" or name in wanted]


def python_for(version: str) -> str:
    """Return the path of a Python of a version, from the PATH or from pyenv; else the running one, with a word."""
    found = shutil.which(f"python{version}")
    # The shims of pyenv answer for versions that are not active, and fail.
    if found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
        return found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = sorted(versions.glob(f"{version}.*/bin/python"))
    if places:
        return str(places[-1])
    print(f"Python {version} is not at hand: {sys.executable} is taken")
    return sys.executable


def editable_wheel() -> Path:
    """Build what `pip install --editable` installs of this package: once, as pip would do for each environment anew.

    Several of them at a time would also write the same folder `gymnasium_bridge.egg-info`.
    """
    folder = FOLDER / "editable"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"the package could not be built:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def make(environment: Environment, wheel: Path) -> None:
    """Make a virtual environment where it is missing, with this package from a wheel of `editable_wheel`."""
    stamp = FOLDER / environment.name / "made"
    wanted = "\n".join((*environment.before, *environment.pins, *environment.tests))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"making {environment.interpreter.parent.parent}: {', '.join(environment.pins)}", flush=True)
    shutil.rmtree(FOLDER / environment.name, ignore_errors=True)
    # Without a pip of its own: ours installs into it, which saves an installation of pip for each.
    subprocess.run(
        [python_for(environment.python), "-m", "venv", "--without-pip", FOLDER / environment.name], check=True
    )
    pip = [sys.executable, "-m", "pip", "--python", environment.interpreter, "install", "--quiet"]
    if environment.before:
        subprocess.run([*pip, *environment.before], check=True)
    # The package with the pins in one call: pip refuses pins that pyproject.toml does not allow.
    subprocess.run([*pip, str(wheel), *environment.pins, *environment.tests], check=True)
    stamp.write_text(wanted)


def main() -> None:
    """Make the environments that are named."""
    names = sys.argv[1:] or list(ENVIRONMENTS)
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        sys.exit(f"expected some of {', '.join(ENVIRONMENTS)}, got {', '.join(unknown)}")
    wheel = editable_wheel()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(lambda name: make(ENVIRONMENTS[name], wheel), names))


if __name__ == "__main__":
    main()
