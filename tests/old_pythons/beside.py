"""Served environments beside the same ones stepped by hand, in the Python that the server has."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from bridge import make_remote, make_vec_remote
from bridge.wrappers import BlockingReset
from tests.old_pythons import by_hand
from tests.old_pythons.environments import Play
from tests.standalone_server import DEADLINE, ROOT

SEED = 7


def played_by_hand(python: Path, play: Play, actions: list[Any], folder: Path) -> tuple[Any, Any]:
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
    script = ROOT / "tests" / "old_pythons" / "by_hand.py"
    command = [str(python), "-W", "ignore", str(script), str(question), str(answer)]
    subprocess.run(command, check=True, timeout=5 * DEADLINE, cwd=folder)
    found: tuple[Any, Any] = pickle.loads(answer.read_bytes())
    return found


def as_sent(action: Any) -> Any:
    return by_hand.plain(action) if isinstance(action, np.ndarray) else int(action)


def assert_one_equals(url: str, python: Path, play: Play, folder: Path) -> None:
    """Play the world of one environment at a URL beside the environment stepped by hand in a Python: all is equal."""
    with make_remote(url, timeout=DEADLINE) as remote:
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
    theirs, by_hands = played_by_hand(python, play, actions, folder)
    assert spaces == theirs
    for number, (mine, (other,)) in enumerate(zip(found, by_hands, strict=True)):
        assert mine == other, f"step {number}"


def assert_lanes_equal(url: str, python: Path, play: Play, folder: Path, lanes: int = 4) -> None:
    """Play a world of lanes beside environments stepped by hand: observations, rewards and flags are equal."""
    remote = make_vec_remote(url, timeout=DEADLINE)
    envs = BlockingReset(remote)
    remote.action_space.seed(SEED)
    observations, _ = envs.reset(seed=SEED)
    found, actions = [(observations, np.zeros(lanes), np.zeros(lanes, bool), np.zeros(lanes, bool))], []
    for _ in range(play.steps):
        sampled = remote.action_space.sample()
        actions.append([as_sent(action) for action in sampled])
        found.append(envs.step(sampled)[:4])
    envs.close()
    _, by_hands = played_by_hand(python, play, actions, folder)
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
