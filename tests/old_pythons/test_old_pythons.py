"""The standalone server in old Pythons beside the same environment stepped by hand there, with today's client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.testing import check_server
from tests.old_pythons.beside import assert_lanes_equal, assert_one_equals
from tests.old_pythons.environments import ENVIRONMENTS, Environment, Play
from tests.standalone_server import standalone

PLAYS = [(environment, play) for environment in ENVIRONMENTS for play in environment.plays]


@pytest.fixture(autouse=True)
def installed(environment: Environment, record_property: Callable[[str, object], None]) -> None:
    record_property("environment", environment.name)
    if environment.reason is not None:
        pytest.skip(f"{environment.name}: {environment.reason}")


def label(value: Any) -> str:
    return value.name if isinstance(value, Environment) else value.target if isinstance(value, Play) else str(value)


@pytest.mark.parametrize(("environment", "play"), PLAYS, ids=label)
def test_one_environment_equals_the_one_stepped_by_hand(environment: Environment, play: Play, tmp_path: Path) -> None:
    with standalone(play.target, python=environment.interpreter, folder=tmp_path) as server:
        assert_one_equals(server.url, environment.interpreter, play, tmp_path)


@pytest.mark.parametrize(("environment", "play"), PLAYS, ids=label)
def test_four_lanes_equal_those_stepped_by_hand(environment: Environment, play: Play, tmp_path: Path) -> None:
    with standalone(play.target, "--num-envs", "4", python=environment.interpreter, folder=tmp_path) as server:
        assert_lanes_equal(server.url, environment.interpreter, play, tmp_path)


@pytest.mark.parametrize(
    "environment",
    [environment for environment in ENVIRONMENTS if environment.plays[0].target == "CartPole-v1"],
    ids=label,
)
def test_it_passes_every_check_strictly(environment: Environment, tmp_path: Path) -> None:
    with standalone("CartPole-v1", python=environment.interpreter, folder=tmp_path) as server:
        report = check_server(server.url, strict=True, required_actions=["action"])
        assert report.ok, str(report)
