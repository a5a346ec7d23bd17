"""Packages that pin an older Gymnasium beside this one, with an end in today's Gymnasium."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.testing import ServerProcess
from tests.installed import versions_of
from tests.old_pythons.beside import assert_lanes_equal, assert_one_equals
from tests.old_pythons.environments import Play
from tests.pins.environments import RLLIB, ZOOS, Pinned
from tests.standalone_server import ROOT, served

PLAYS = [(zoo, play) for zoo in ZOOS for play in zoo.plays]
SINGLE = PLAYS + [(zoo, play) for zoo in ZOOS for play in zoo.single]


def label(value: object) -> str:
    return (
        value.target if isinstance(value, Play) else value.environment.name if isinstance(value, Pinned) else str(value)
    )


@pytest.fixture(autouse=True)
def installed(pinned: Pinned, record_property: Callable[[str, object], None]) -> None:
    record_property("pinned", pinned.environment.name)
    if pinned.reason is not None:
        pytest.skip(f"{pinned.environment.name}: {pinned.reason}")
    versions = versions_of(pinned.environment.interpreter)
    assert not versions["gymnasium"].startswith("1.4"), f"the package does not pin what it is here for: {versions}"


@pytest.mark.parametrize(("pinned", "play"), SINGLE, ids=label)
def test_one_environment_equals_the_one_stepped_by_hand(pinned: Pinned, play: Play, tmp_path: Path) -> None:
    python = pinned.environment.interpreter
    with served(python, "-m", "bridge", "serve", play.target, "--port", "0", folder=tmp_path) as server:
        assert_one_equals(server.url, python, play, tmp_path)


@pytest.mark.parametrize(("pinned", "play"), PLAYS, ids=label)
def test_four_lanes_equal_those_stepped_by_hand(pinned: Pinned, play: Play, tmp_path: Path) -> None:
    python = pinned.environment.interpreter
    command = (python, "-m", "bridge", "serve", play.target, "--port", "0", "--num-envs", "4")
    with served(*command, folder=tmp_path) as server:
        assert_lanes_equal(server.url, python, play, tmp_path)


@pytest.mark.parametrize("pinned", [RLLIB], ids=label)
@pytest.mark.parametrize("runners", [0, 1])
def test_ppo_of_rllib_trains_on_remote_environments(pinned: Pinned, runners: int) -> None:
    with ServerProcess("CartPole-v1") as server:
        command = [
            pinned.environment.interpreter,
            "-W",
            "ignore",
            "-m",
            "tests.pins.train_rllib",
            server.url,
            str(runners),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    returns = [float(found) for found in re.findall(r"^mean return ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(returns) == 5
    assert returns[-1] > 1.5 * returns[0], returns
