"""The episodes of a recording are those that the environments wrote down themselves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge import Recorder, Recording, make_remote, make_vec_remote, serve_gym
from bridge.errors import RecordingError
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.testing import CountingEnv, SpaceEnv
from bridge.wrappers import BlockingReset

STEPS = 80


class Diary(gymnasium.Env[Any, Any]):
    """Writes down each reset and step, in a list of its own."""

    observation_space = spaces.Box(0, 1, (3,), np.float64)
    action_space = spaces.Discrete(5)
    kept: list[list[Any]] = []  # noqa: RUF012 - of all environments, in the order of their first resets

    def __init__(self) -> None:
        self._mine: list[Any] | None = None
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._mine is None:
            self._mine = []
            self.kept.append(self._mine)
        self._left = int(self.np_random.integers(2, 9))
        observation = self.np_random.random(3)
        self._mine.append({"observations": [observation], "actions": [], "rewards": [], "flags": []})
        return observation.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._mine is not None
        self._left -= 1
        observation, reward = self.np_random.random(3), float(self.np_random.random())
        ended = bool(self._left <= 0)
        terminated = ended and reward < 0.5
        episode = self._mine[-1]
        episode["observations"].append(observation)
        episode["actions"].append(int(action))
        episode["rewards"].append(reward)
        episode["flags"].append((terminated, ended and not terminated))
        return observation.copy(), reward, terminated, ended and not terminated, {}


def play(envs: Any, mode: str) -> None:
    envs.action_space.seed(1)
    chance = random.Random(2)
    envs.reset(seed=7)
    for _ in range(STEPS):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        ended = terminations | truncations
        if mode == "Disabled" and ended.any():
            envs.reset(options={"reset_mask": ended})
        elif chance.random() < 0.1:  # some slots in the midst of their episodes, or just ended
            mask = np.array([chance.random() < 0.5 for _ in ended])
            if mask.any():
                envs.reset(options={"reset_mask": mask})


def written(folder: Path, lanes: int) -> list[list[dict[str, Any]]]:
    """Return the episodes of each environment, as the recording tells them."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(lanes)]
    streams = sorted(read_folder(folder).streams, key=lambda stream: stream.number)
    for number, stream in enumerate(streams):
        for episode in stream.episodes():
            data = load_episode(episode)
            assert episode.length == len(data.actions)
            assert [*episode.rewards] == [*data.rewards]
            assert episode.total == data.rewards.sum()
            flags = list(zip(data.terminations.tolist(), data.truncations.tolist(), strict=True))
            if flags and episode.end not in ("terminated", "truncated"):
                flags[-1] = (False, False)  # a dataset marks the last step of what was cut off
            found[episode.lane + number].append(
                {
                    "observations": data.observations,
                    "actions": data.actions,
                    "rewards": data.rewards.tolist(),
                    "flags": flags,
                }
            )
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("kind", ["lanes", "worlds", "recorder"])
def test_episodes_are_those_that_the_environments_wrote_down(tmp_path: Path, kind: str, mode: str) -> None:
    Diary.kept.clear()
    lanes = 3 if kind == "lanes" else 1
    record = None if kind == "recorder" else tmp_path
    keywords = {} if record is None else {"record": Recording(record, observations=True)}
    with serve_gym(Diary, num_envs=lanes, **keywords) as server:
        remote = make_vec_remote(server.url, num_envs=3)
        envs: Any = BlockingReset(remote, autoreset_mode=mode)
        if record is None:
            envs = Recorder(envs, tmp_path, observations=True)
        play(envs, mode)
        envs.close()
    told = written(tmp_path, 3)
    assert [len(part) for part in told] == [len(part) for part in Diary.kept]
    for lane, mine in zip(told, Diary.kept, strict=True):
        for one, other in zip(lane, mine, strict=True):
            assert [*map(int, one["actions"])] == other["actions"]
            assert one["rewards"] == other["rewards"]
            assert one["flags"] == other["flags"]
            assert np.array_equal(one["observations"], other["observations"])
    assert sum(len(one["actions"]) for lane in told for one in lane) <= STEPS * 3


class Told(gymnasium.Env[Any, Any]):
    """Writes down what it gives, infos with an array and a flag among it."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    logs: list[list[list[Any]]] = []  # noqa: RUF012 - of all environments

    def __init__(self) -> None:
        self._log: list[list[Any]] = []
        Told.logs.append(self._log)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 6))
        self._log.append([])
        return self._give(None, {"level": len(self._log)})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        observation, info = self._give(int(action), {"success": self._left <= 0})
        return observation, 1.0, self._left <= 0, False, info

    def _give(self, action: int | None, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        observation = self.np_random.random(2).astype(np.float32)
        info = {"mask": self.np_random.integers(0, 2, 3).astype(np.uint8), **info}
        self._log[-1].append((action, observation, info))
        return observation.copy(), dict(info)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_infos_and_last_observations_are_those_that_the_environments_gave(tmp_path: Path, mode: AutoresetMode) -> None:
    """Also where a lane begins anew in the step that ends it, whose last observation is in the infos."""

    def make() -> Any:
        return gymnasium.vector.SyncVectorEnv([Told] * 3, autoreset_mode=mode)

    Told.logs.clear()
    with serve_gym(make, record=Recording(tmp_path, observations=True, infos=True)) as server:
        envs = BlockingReset(make_vec_remote(server.url), autoreset_mode=mode)
        envs.action_space.seed(1)
        envs.reset(seed=3)
        for _ in range(40):
            envs.step(envs.action_space.sample())
        envs.close()
    logs = [log for log in Told.logs if log]
    episodes = read_folder(tmp_path).episodes()
    assert len(episodes) == sum(map(len, logs)) > 20
    for lane, log in enumerate(logs):
        own = [episode for episode in episodes if episode.lane == lane]
        for episode, told in zip(own, log, strict=True):
            data = load_episode(episode)
            assert [int(action) for action in data.actions] == [action for action, *_ in told[1:]]
            assert [seen.tobytes() for seen in data.observations] == [seen.tobytes() for _, seen, _ in told]
            assert data.infos is not None
            for info, (*_, given) in zip(data.infos, told, strict=True):
                assert {key: np.asarray(value).tolist() for key, value in info.items()} == {
                    key: np.asarray(value).tolist() for key, value in given.items()
                }
            assert verify(episode, make).ok


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())])
def test_an_environment_without_actions_is_recorded(tmp_path: Path, space: Any) -> None:
    """No column says that there was an action of an empty space, so that the episode cannot be replayed."""
    with serve_gym(lambda: SpaceEnv(None, space), record=tmp_path) as server, make_remote(server.url) as env:
        env.reset(seed=0)
        rewards = [env.step(env.action_space.sample())[1] for _ in range(3)]
    (episode,) = read_folder(tmp_path).episodes()
    assert episode.rewards.tolist() == rewards
    with pytest.raises(RecordingError, match="cannot be read"):
        verify(episode, lambda: SpaceEnv(None, space))


def test_an_info_that_contains_itself_fails_no_step_and_is_recorded_as_it_travels(tmp_path: Path) -> None:
    class Circular(CountingEnv):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            info["self"] = info["again"] = info
            return (*rest, info)

    with serve_gym(lambda: Circular(2), record=Recording(tmp_path, observations=True, infos=True)) as server:
        env = make_remote(server.url)
        env.reset()
        with pytest.warns(RuntimeWarning, match="nested more than"):
            env.step(env.action_space.sample())
        told = env.step(env.action_space.sample())[4]
        env.close()
    (episode,) = read_folder(tmp_path).episodes()
    infos = load_episode(episode).infos
    assert infos is not None
    assert infos[-1] == told
