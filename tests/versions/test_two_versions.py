"""A server and a client with different versions: spaces equal, and every result bit for bit as where it was made."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.installed import versions_of
from tests.versions.environments import ROOT, at_hand

# Spaces that Gymnasium brought later than others.
NEEDS_1_4 = {"observation graph_of_dicts", "observation graph_of_sequences"}


def run(name: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [at_hand()[name], "-m", "tests.versions.play", *arguments]
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


@pytest.fixture(scope="module")
def cases(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of what was played in the environment of a server, which serves it meanwhile."""
    target = tmp_path_factory.mktemp("cases") / "cases.json"
    with serving(server, target):
        yield target


def version_of(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in versions_of(at_hand()[name])["gymnasium"].split(".")[:2])


def test_there_are_environments_to_play_with() -> None:
    assert len(at_hand()) > 1, "make test-versions makes them"


def test_remote_equals_local_across_versions(
    server: str, client: str, cases: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("ends", (server, client))
    with run(client, "compare", str(cases)) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found = json.loads(printed)
    refused = NEEDS_1_4 if version_of(client) < (1, 4) <= version_of(server) else set()
    assert found.keys() == refused, found
    assert all("needs Gymnasium 1.4 or newer" in problem for problem in found.values())
