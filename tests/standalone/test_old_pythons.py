"""The standalone server in old Pythons beside the same environment stepped by hand there, with today's client."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote
from bridge.testing import check_server
from bridge.wrappers import BlockingReset
from tests.standalone import by_hand
from tests.standalone.environments import ENVIRONMENTS, Environment, Play
from tests.standalone_server import DEADLINE, ROOT, standalone

PLAYS = [(environment, play) for environment in ENVIRONMENTS for play in environment.plays]
SEED = 7


@pytest.fixture(autouse=True)
def installed(environment: Environment) -> None:
    if environment.reason is not None:
        pytest.skip(f"{environment.name}: {environment.reason}")


def label(value: Any) -> str:
    return value.name if isinstance(value, Environment) else value.target if isinstance(value, Play) else str(value)


def played_by_hand(environment: Environment, play: Play, actions: list[Any], folder: Path) -> tuple[Any, Any]:
    """Return the spaces, and what reset and each step gave in each lane, of environments stepped without a server."""
    question, answer = folder / "question", folder / "answer"
    asked = {
        "target": play.target,
        "interface": play.interface,
        "lanes": len(actions[0]),
        "seed": SEED,
        "actions": actions,
    }
    question.write_bytes(pickle.dumps(asked, protocol=2))
    script = ROOT / "tests" / "standalone" / "by_hand.py"
    command = [str(environment.interpreter), "-W", "ignore", str(script), str(question), str(answer)]
    subprocess.run(command, check=True, timeout=5 * DEADLINE, cwd=folder)
    found: tuple[Any, Any] = pickle.loads(answer.read_bytes())
    return found


def as_sent(action: Any) -> Any:
    return by_hand.plain(action) if isinstance(action, np.ndarray) else int(action)


@pytest.mark.parametrize(("environment", "play"), PLAYS, ids=label)
def test_one_environment_equals_the_one_stepped_by_hand(environment: Environment, play: Play, tmp_path: Path) -> None:
    with (
        standalone(play.target, python=environment.interpreter, folder=tmp_path) as server,
        make_remote(server.url, timeout=DEADLINE) as remote,
    ):
        remote.action_space.seed(SEED)
        spaces = [by_hand.facts_of(remote.observation_space), by_hand.facts_of(remote.action_space)]
        found, actions = [by_hand.plain(remote.reset(seed=SEED))], []
        ended = False
        for _ in range(play.steps):
            action = remote.action_space.sample()
            actions.append([as_sent(action)])
            if ended:  # as a lane: this step begins the next episode
                observation, info = remote.reset()
                step = observation, 0.0, False, False, info
            else:
                step = remote.step(action)
            ended = step[2] or step[3]
            found.append(by_hand.plain(step))
    theirs, by_hands = played_by_hand(environment, play, actions, tmp_path)
    assert spaces == theirs
    for number, (mine, (other,)) in enumerate(zip(found, by_hands, strict=True)):
        assert mine == other, f"step {number}"


@pytest.mark.parametrize(("environment", "play"), PLAYS, ids=label)
def test_four_lanes_equal_those_stepped_by_hand(environment: Environment, play: Play, tmp_path: Path) -> None:
    with standalone(play.target, "--num-envs", "4", python=environment.interpreter, folder=tmp_path) as server:
        remote = make_vec_remote(server.url, timeout=DEADLINE)
        envs = BlockingReset(remote)
        remote.action_space.seed(SEED)
        observations, _ = envs.reset(seed=SEED)
        found, actions = [(observations, np.zeros(4), np.zeros(4, bool), np.zeros(4, bool))], []
        for _ in range(play.steps):
            sampled = remote.action_space.sample()
            actions.append([as_sent(action) for action in sampled])
            found.append(envs.step(sampled)[:4])
        envs.close()
    _, by_hands = played_by_hand(environment, play, actions, tmp_path)
    for number, (mine, others) in enumerate(zip(found, by_hands, strict=True)):
        for lane, (_, other) in enumerate(others):
            assert rows_of(mine[0], lane) == exact(other[0]), f"step {number}, lane {lane}"
            if number:
                rest = [float(mine[1][lane]), bool(mine[2][lane]), bool(mine[3][lane])]
                assert rest == other[1:4], f"step {number}, lane {lane}"


def rows_of(batch: Any, lane: int) -> Any:
    """Return a lane's observation out of a batch, as `exact` has it."""
    if isinstance(batch, (tuple, dict)):
        parts = batch.values() if isinstance(batch, dict) else batch
        return [rows_of(part, lane) for part in parts]
    return exact(by_hand.plain(np.asarray(batch[lane])))


def exact(observation: Any) -> Any:
    """Return the bytes of an observation, of which a batch does not say whether it was an array or a number."""
    if isinstance(observation, tuple) and observation[0] in ("tuple", "list"):
        return [exact(item) for item in observation[1]]
    if isinstance(observation, tuple) and observation[0] == "dict":
        return [exact(item) for _, item in observation[1]]
    if isinstance(observation, tuple):
        return observation[-1]
    return np.int64(observation).tobytes()


@pytest.mark.parametrize(
    "environment",
    [environment for environment in ENVIRONMENTS if environment.plays[0].target == "CartPole-v1"],
    ids=label,
)
def test_it_passes_every_check_strictly(environment: Environment, tmp_path: Path) -> None:
    with standalone("CartPole-v1", python=environment.interpreter, folder=tmp_path) as server:
        report = check_server(server.url, strict=True, required_actions=["action"])
        assert report.ok, str(report)
