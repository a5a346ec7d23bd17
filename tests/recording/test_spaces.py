"""Each kind of space as observation and as action: what is recorded is read back exactly, and verified."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge import Recording, make_vec_remote, serve_gym
from bridge.recording.episodes import load_episode
from bridge.recording.reader import RecordedEpisode, read_folder
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


Told = tuple[Any, Any, float | None, tuple[bool, bool], dict[str, Any]]
"""Action, observation, reward, flags and info of a call."""


class Noted(SpaceEnv):
    """Writes down what it is given and gives."""

    logs: list[list[list[Told]]] = []  # noqa: RUF012 - of all environments

    def __init__(self, space: Any) -> None:
        super().__init__(space, space, infos=False)
        self._log: list[list[Told]] = []
        Noted.logs.append(self._log)

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(**keywords)
        info = self._info()
        self._log.append([(None, observation, None, (False, False), info)])
        return observation, dict(info)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {**self._info(), "ended": terminated or truncated}
        self._log[-1].append((action, observation, float(reward), (terminated, truncated), info))
        return observation, reward, terminated, truncated, dict(info)

    def _info(self) -> dict[str, Any]:
        return {"mask": self.np_random.integers(0, 2, 3).astype(np.uint8)}


def joined(space: Any, mode: AutoresetMode) -> Any:
    """Three environments that one message steps, in an autoreset mode of the server's."""
    return SyncVectorEnv([partial(Noted, space)] * 3, autoreset_mode=mode)


SERVED = ("one", "two worlds", "lanes", "lanes of SameStep")  # a server takes no Disabled, which is the client's
CASES = [
    (name, served, mode)
    for name, served, mode in product(SPACES, SERVED, AutoresetMode)
    if " of " not in served or served.endswith(mode.value)
]


# Of ten cases of each space one in nine, so that each space is in one arrangement, and each arrangement in each mode.
@pytest.mark.parametrize(("name", "served", "mode"), sampled(CASES, 9))
def test_every_row_is_what_the_environment_wrote_down(
    tmp_path: Path, name: str, served: str, mode: AutoresetMode
) -> None:
    """Each space, in each arrangement and autoreset mode, with resets of some slots; `SB3VecEnv` is `SameStep`."""
    space = SPACES[name]
    make = partial(joined, space, mode) if " of " in served else partial(Noted, space)
    Noted.logs.clear()
    record = Recording(tmp_path, observations=True, infos=True)
    with serve_gym(make, num_envs=3 if served == "lanes" else 1, record=record) as server:
        remote = make_vec_remote(server.url, num_envs=2 if served == "two worlds" else None)
        play(BlockingReset(remote, autoreset_mode=mode))
    logs = [log for log in Noted.logs if log]
    episodes = read_folder(tmp_path).episodes()
    assert len(logs) == {"one": 1, "two worlds": 2}.get(served, 3)
    assert len(episodes) == sum(map(len, logs)) > 2 * len(logs)
    for number, log in enumerate(logs):
        own = [one for one in episodes if (one.stream.number - 1 if served == "two worlds" else one.lane) == number]
        for episode, told in zip(own, log, strict=True):
            assert_same(episode, told)
            assert verify(episode, make).ok


def assert_same(episode: RecordedEpisode, told: list[Told]) -> None:
    """An episode is what its environment wrote down."""
    actions, observations, rewards, flags, infos = (list(part) for part in zip(*told, strict=True))
    assert episode.length == len(told) - 1
    stream, steps = episode.stream, episode.own[1:]
    assert_identical(stream.samples("observation", episode.own), observations)
    assert_identical(stream.samples("action", steps), actions[1:])
    assert episode.rewards.tolist() == rewards[1:]
    ends = [stream.column(flag)[steps].tolist() for flag in ("terminated", "truncated")]
    assert list(zip(*ends, strict=True)) == flags[1:]
    for info, given in zip(stream.infos(episode.own), infos, strict=True):
        assert {key: np.asarray(value).tolist() for key, value in info.items()} == {
            key: np.asarray(value).tolist() for key, value in given.items()
        }


def play(envs: Any) -> None:
    """Step, and reset what ended or, now and then, what did not."""
    envs.action_space.seed(2)
    chance = random.Random(2)
    envs.reset(seed=5)
    for _ in range(25):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        ended = terminations | truncations
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})
        elif chance.random() < 0.15:
            mask = np.array([chance.random() < 0.5 for _ in ended])
            if mask.any():
                envs.reset(options={"reset_mask": mask})
    envs.close()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", sampled(SPACES, 4))
def test_an_episode_of_hashes_is_verified_and_its_data_made_again(tmp_path: Path, name: str, lanes: int) -> None:
    make = partial(Noted, SPACES[name])
    Noted.logs.clear()
    with serve_gym(make, num_envs=lanes, record=tmp_path) as server:
        play(BlockingReset(make_vec_remote(server.url)))
    logs = [log for log in Noted.logs if log]
    episodes = read_folder(tmp_path).episodes()
    for lane, log in enumerate(logs[:lanes]):
        own = [one for one in episodes if one.lane == lane]
        assert len(own) == len(log)
        assert all(verify(episode, make).ok for episode in own)
        assert_identical(load_episode(own[-1], make).observations, [seen for _, seen, *_ in log[-1]])
