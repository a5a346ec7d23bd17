"""A server and a client with different versions: spaces equal, and every result bit for bit as where it was made."""

from __future__ import annotations

import functools
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.installed import versions_of
from tests.versions.environments import ROOT, at_hand, names_of

DEADLINE = 1800.0
# Spaces that Gymnasium brought later than others.
NEEDS_1_4 = {"observation graph_of_dicts", "observation graph_of_sequences"}


def run(name: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [at_hand()[name], "-m", "tests.versions.play", *map(str, arguments)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]


@contextmanager
def serving(names: list[str], folder: Path) -> Iterator[list[Path]]:
    """Serve all cases in each environment: a file of each says where, and how they were played there."""
    files = [folder / f"{name}.json" for name in names]
    # All at once: much of the time goes by until Python has imported everything.
    servers = [run(name, "serve", file, stdin=subprocess.PIPE) for name, file in zip(names, files, strict=True)]
    try:
        for name, server in zip(names, servers, strict=True):
            with selectors.DefaultSelector() as selector:
                selector.register(server.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
                assert selector.select(DEADLINE), f"the server in {name} did not begin"
            assert server.stdout.readline() == "serving\n", name  # type: ignore[union-attr]
        yield files
        for server in servers:
            server.stdin.close()  # type: ignore[union-attr]
        assert [server.wait(DEADLINE) for server in servers] == [0] * len(servers)
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def differences(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, str]]]:
    """The differences that a client of each environment found, by the server's environment and the case."""
    names = names_of(pytestconfig)
    with serving(names, tmp_path_factory.mktemp("cases")) as files:
        clients = {name: run(name, "compare", *files) for name in names}
        try:
            return {name: json.loads(client.communicate(timeout=DEADLINE)[0]) for name, client in clients.items()}
        finally:
            for client in clients.values():
                client.kill()
                client.communicate()


@functools.cache
def version_of(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in versions_of(at_hand()[name])["gymnasium"].split(".")[:2])


def test_there_are_environments_to_play_with() -> None:
    assert len(at_hand()) > 1, "make test-versions makes them"


def test_remote_equals_local_across_versions(
    server: str,
    client: str,
    differences: dict[str, dict[str, dict[str, str]]],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("ends", (server, client))
    found = differences[client][server]
    refused = NEEDS_1_4 if version_of(client) < (1, 4) <= version_of(server) else set()
    assert found.keys() == refused, found
    assert all("needs Gymnasium 1.4 or newer" in problem for problem in found.values())
