"""Each kind of space as observation and as action: what is recorded is read back exactly, and verified."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Recording, make_vec_remote, serve_gym
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.testing import SpaceEnv
from bridge.wrappers import BlockingReset
from tests.support import assert_identical, sampled

pytestmark = pytest.mark.slow

NODES, EDGES = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)
SPACES: dict[str, Any] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box of one number": spaces.Box(-1, 1, (), np.float64),
    "box of nothing": spaces.Box(-1, 1, (0, 2), np.float32),
    "picture": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "half": spaces.Box(-1, 1, (2, 2), np.float16),
    "shorts": spaces.Box(-300, 300, (2,), np.int16),
    "booleans": spaces.Box(0, 1, (3,), np.bool_),
    "large integers": spaces.Box(-(2**62), 2**62, (2,), np.int64),
    "discrete": spaces.Discrete(5),
    "discrete from -3": spaces.Discrete(5, start=-3),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary matrix": spaces.MultiBinary([2, 3]),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-discrete from 5": spaces.MultiDiscrete([3, 4], start=[5, -5]),
    "text": spaces.Text(8, min_length=0),
    "text of letters": spaces.Text(4, charset="αβ"),
    "dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,), np.float64)}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Text(4))),
    "nested": spaces.Dict({"x": spaces.Tuple((spaces.Dict({"y.z": spaces.Discrete(2)}), spaces.MultiBinary(2)))}),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32)),
    "stacked sequence": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32), stack=True),
    "sequence of dicts": spaces.Sequence(spaces.Dict({"a": spaces.Discrete(3)})),
    "graph": spaces.Graph(NODES, EDGES),
    "one of": spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
}


class Noted(SpaceEnv):
    """Writes down what it is given and gives."""

    logs: list[list[list[Any]]] = []  # noqa: RUF012 - of all environments

    def __init__(self, space: Any) -> None:
        super().__init__(space, space, infos=False)
        self._log: list[list[Any]] = []
        Noted.logs.append(self._log)

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**keywords)
        self._log.append([(None, observation, None)])
        return observation, info

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self._log[-1].append((action, *result[:2]))
        return result


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", sampled(SPACES, 4, slow=True))
def test_a_space_is_recorded_read_and_verified(tmp_path: Path, name: str, lanes: int) -> None:
    make = partial(Noted, SPACES[name])
    Noted.logs.clear()
    with serve_gym(make, num_envs=lanes, record=Recording(tmp_path / "whole", observations=True)) as server:
        play(server.url)
    logs = [log for log in Noted.logs if log]
    episodes = read_folder(tmp_path / "whole").episodes()
    assert len(episodes) == sum(map(len, logs)) >= 3
    for lane, log in enumerate(logs):
        for episode, told in zip([one for one in episodes if one.lane == lane], log, strict=True):
            data = load_episode(episode)
            assert_identical(data.observations, [seen for _, seen, _ in told])
            assert_identical(data.actions, [action for action, *_ in told[1:]])
            assert data.rewards.tolist() == [reward for *_, reward in told[1:]]
            assert verify(episode, make).ok
    with serve_gym(make, num_envs=lanes, record=tmp_path / "hashes") as server:
        play(server.url)
    for episode in read_folder(tmp_path / "hashes").episodes():
        assert verify(episode, make).ok


def play(url: str) -> None:
    envs: Any = BlockingReset(make_vec_remote(url))
    envs.action_space.seed(2)
    envs.reset(seed=5)
    for _ in range(25):
        envs.step(envs.action_space.sample())
    envs.close()


def test_of_two_worlds_each_is_a_stream(tmp_path: Path) -> None:
    make = partial(Noted, SPACES["one of"])
    with serve_gym(make, record=tmp_path) as server:
        envs: Any = BlockingReset(make_vec_remote(server.url, num_envs=2))
        envs.reset(seed=5)
        for _ in range(10):
            envs.step(envs.action_space.sample())
        envs.close()
    streams = read_folder(tmp_path).streams
    assert len(streams) == 2
    assert all(verify(episode, make).ok for stream in streams for episode in stream.episodes())
    assert type(streams[0].spaces[0][1]) is spaces.OneOf
