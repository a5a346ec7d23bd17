"""Delete a feature from a clone, and see that the rest works: `python -m tests.without FEATURE`.

In a clone of what is committed, the feature's folder goes, the tests that import it, and its lines in `pyproject.toml`;
nothing else. What is left is installed without extras into an environment of its own. There the core tests pass, an
environment is served and stepped, and using the feature raises the one error that names it.

`-m "not repeat"` leaves out core tests that repeat others with further parameters.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.places import ROOT

SIDE_BY_SIDE = 2
"""How many features are tried at a time: one whose package is installed mostly waits."""
PLAY = """
import contextlib
from bridge import make_remote, make_vec_remote, serve_gym

with serve_gym("CartPole-v1") as server:
    with contextlib.closing(make_vec_remote(server.url, num_envs=4, blocking=True)) as envs:
        envs.reset(seed=0)
        for _ in range(100):
            envs.step(envs.action_space.sample())
    with contextlib.closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        env.step(env.action_space.sample())
"""
"""What works without any feature."""
USES = {
    "dial": [
        "import bridge\nwith bridge.serve_gym('CartPole-v1') as server:\n    server.dial('grpc://127.0.0.1:1')",
        "import bridge\nbridge.make_vec_remote('listen://127.0.0.1:0', num_envs=1)",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--dial', 'grpc://127.0.0.1:1'])",
        "from bridge.cli import main\nmain(['info', 'listen://127.0.0.1:0'])",
        "import bridge\nbridge.serve_gym('CartPole-v1', dial='grpc://127.0.0.1:1')",
        "import bridge\nbridge.make_remote('listen://127.0.0.1:0')",
        "import bridge\nbridge.make_vec_remote(['listen://127.0.0.1:0'], blocking=True)",
        "import gymnasium, bridge\ngymnasium.make_vec('bridge/Remote-v0', url='listen://127.0.0.1:0')",
    ],
    "fleet": [
        "from bridge.cli import main\nmain(['health', 'grpc://127.0.0.1:1'])",
        "from bridge.cli import main\nmain(['top', 'grpc://127.0.0.1:1'])",
        "from bridge.cli import main\nmain(['top', 'file:///x'])",
    ],
    "game": [
        "import bridge\nimport gymnasium.spaces as s\nbridge.serve_game(s.Discrete(2), s.Discrete(2))",
        "import bridge\nimport gymnasium.spaces as s\nbridge.serve_game({'a': (s.Discrete(2), s.Discrete(2))})",
        "import bridge\nbridge.Game",
    ],
    "openenv": [
        "import bridge\nbridge.make_remote('openenv://127.0.0.1:1')",
        "import bridge\nbridge.make_vec_remote('openenv://127.0.0.1:1', num_envs=2)",
        "import bridge\nbridge.make_remote('openenvs://127.0.0.1:1')",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--web', '--openenv'])",
    ],
    "perlert": [
        "import bridge\nbridge.make_remote('perlert://127.0.0.1:1/x:0')",
        "import bridge\nbridge.make_vec_remote('perlert://127.0.0.1:1/x:0', num_envs=2)",
        "from bridge.cli import main\nmain(['lobby', 'perlert://127.0.0.1:1/x:0'])",
        "import bridge\nbridge.perlert",
        "from bridge import perlert",
        "import bridge\nbridge.make_remote('perlert://127.0.0.1:1/x:0', key='a', tag='b')",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--perlert', '0'])",
        "from bridge.cli import main\nmain(['lobby', 'perlert://127.0.0.1:1/x:0', '--ready'])",
    ],
    "policies": [
        "from bridge.cli import main\nmain(['evaluate', 'grpc://127.0.0.1:1', '--policy', 'x:y'])",
        "from bridge.cli import main\nmain(['policy', 'x:y'])",
        "from bridge.cli import main\nmain(['policy', 'x:y', '--port', '0'])",
    ],
    "recording": [
        "import bridge\nbridge.serve_gym('CartPole-v1', record='runs')",
        "from bridge.cli import main\nmain(['runs', 'x'])",
        "import bridge\nbridge.recording",
        "import bridge\nbridge.Recording('x')",
        "from bridge import Recorder",
        "import bridge\nbridge.serve_parallel(lambda: 1, record='runs')",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--record', 'runs'])",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--record-frames'])",
        "from bridge.cli import main\nmain(['replay', 'x'])",
        "from bridge.cli import main\nmain(['export', 'x', 'y'])",
    ],
    "states": [
        "import bridge\nbridge.serve_gym('CartPole-v1', states=bridge.States())",
        "import bridge\nwith bridge.serve_gym('CartPole-v1') as one:\n    bridge.make_remote(one.url).save_state()",
    ],
    "web": [
        "import bridge\nbridge.serve_gym('CartPole-v1', web=True)",
        "from bridge.cli import main\nmain(['web', 'grpc://127.0.0.1:1'])",
        "import bridge\nbridge.Web",
        "from bridge import Web",
        "import bridge\nbridge.serve_gym('CartPole-v1', fps=10, web=True)",
        "import bridge\nbridge.serve_parallel(lambda: 1, web=True)",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--web'])",
        "from bridge.cli import main\nmain(['serve', 'CartPole-v1', '--web-hosts', 'a.example'])",
    ],
}
"""Programs that use a feature, each in one way: all say that it is missing."""


def imported(path: Path) -> Iterator[str]:
    """Give the names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_of(name: str, feature: str) -> bool:
    return f"{name}.".startswith((f"bridge.{feature}.", f"tests.{feature}."))


def tests_of(feature: str, clone: Path) -> list[Path]:
    """Return the test files that import a feature, or one of the tests in its folder."""
    files = {path: set(imported(path)) for path in (clone / "tests").rglob("test_*.py")}
    return sorted(path for path, names in files.items() if any(is_of(name, feature) for name in names))


def delete(feature: str, clone: Path) -> None:
    """Delete a feature's folder, its tests and its lines in `pyproject.toml`."""
    for path in tests_of(feature, clone):
        path.unlink()
    shutil.rmtree(clone / "tests" / feature)
    shutil.rmtree(clone / "bridge" / feature)
    settings = clone / "pyproject.toml"
    lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
    # Of `packages` and `package-data`.
    of_it = re.compile(rf'\s*"bridge\.{feature}(\.[\w.]+)?"(,$| = )')
    settings.write_text("".join(line for line in lines if not of_it.match(line)), encoding="utf-8")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True, check=False)


def checked(*command: str | Path, cwd: Path) -> None:
    """Run a command; exit with what it wrote where it fails."""
    if (done := run(*command, cwd=cwd)).returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def failure_without(feature: str, folder: Path, marks: str) -> str:
    """Try an installation without a feature; return what failed, or "" where nothing did.

    Args:
        feature: The folder of `bridge` to delete.
        folder: An empty folder.
        marks: Which of the core tests, as pytest's `-m` has it; "": all.
    """
    clone, elsewhere = folder / "clone", folder / "elsewhere"
    elsewhere.mkdir()
    checked("git", "clone", "--quiet", ROOT, clone, cwd=ROOT)
    delete(feature, clone)
    checked(sys.executable, "-m", "venv", "--without-pip", elsewhere / "venv", cwd=elsewhere)
    python = elsewhere / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    checked(*pip, clone, cwd=elsewhere)
    checked(python, "-c", PLAY, cwd=elsewhere)
    for program in USES[feature]:
        done = run(python, "-c", program, cwd=elsewhere)
        said = done.stdout + done.stderr
        if said.count(f"this installation lacks bridge.{feature}, which ") != 1:
            return f"{program}\nexpected one error, that bridge.{feature} is missing, got:\n{said}"
    # As a clone has it, since the tests lie beside the package.
    checked(*pip, "--editable", f"{clone}[test-core]", cwd=elsewhere)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not Pong and not MiniGrid"]
    done = run(*command, "-m", marks, "@tests/core.txt", cwd=clone)
    print(f"without {feature}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return done.stdout if done.returncode else ""


def main() -> None:
    """Try an installation without each feature that is named, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("features", nargs="+", choices=sorted(USES), metavar="FEATURE", help=", ".join(sorted(USES)))
    parser.add_argument("-m", dest="marks", default="", metavar="MARKS", help="which of the core tests, as for pytest")
    asked = parser.parse_args()

    def fails(feature: str) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            if failure := failure_without(feature, Path(folder), asked.marks):
                print(f"without {feature}:\n{failure}")
        return bool(failure)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        failed = [
            feature for feature, does in zip(asked.features, pool.map(fails, asked.features), strict=True) if does
        ]
    if failed:
        sys.exit(f"something fails without {', '.join(failed)}")


if __name__ == "__main__":
    main()
