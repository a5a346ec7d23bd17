"""A server and a client with different versions: spaces equal, and every result bit for bit as where it was made."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.versions.environments import ENVIRONMENTS, ROOT

OTHERS = {name: str(each.interpreter) for name, each in ENVIRONMENTS.items() if each.interpreter.exists()}
HERE = {"this": sys.executable, **OTHERS}
# Spaces that Gymnasium brought later than others.
NEEDS_1_4 = {"observation graph_of_dicts", "observation graph_of_sequences"}


def run(name: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [HERE[name], "-m", "tests.versions.play", *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]


@contextmanager
def serving(name: str, target: Path) -> Iterator[None]:
    """Serve all cases in an environment."""
    with run(name, "serve", str(target), stdin=subprocess.PIPE) as process:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
                assert selector.select(300.0), "the server did not begin"
            assert process.stdout.readline() == "serving\n"  # type: ignore[union-attr]
            yield
            process.stdin.close()  # type: ignore[union-attr]
            assert process.wait(60) == 0
        finally:
            process.kill()


def version_of(name: str) -> tuple[int, ...]:
    code = "import gymnasium; print(gymnasium.__version__)"
    done = subprocess.run([HERE[name], "-c", code], capture_output=True, text=True, check=True)
    return tuple(int(part) for part in done.stdout.strip().split(".")[:2])


@pytest.mark.skipif(not OTHERS, reason="no environments: make test-versions makes them")
@pytest.mark.parametrize("server", HERE)
def test_remote_equals_local_across_versions(server: str, tmp_path: Path) -> None:
    with serving(server, tmp_path / "cases.json"):
        for client in HERE:
            with run(client, "compare", str(tmp_path / "cases.json")) as process:
                printed, _ = process.communicate(timeout=300)
            assert process.returncode == 0, client
            found = json.loads(printed)
            refused = NEEDS_1_4 if version_of(client) < (1, 4) <= version_of(server) else set()
            assert found.keys() == refused, (server, client, found)
            assert all("needs Gymnasium 1.4 or newer" in problem for problem in found.values())
