"""Episodes in which agents enter late, leave early and come back, as they are recorded and read."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pyarrow")
pytest.importorskip("pettingzoo")

import pyarrow.parquet as pq
from pettingzoo import ParallelEnv

from bridge import Recording, make_parallel_remote, serve_parallel
from bridge.errors import RecordingError
from bridge.recording.episodes import load_episode, load_stretches, observed_rows
from bridge.recording.lerobot import export_lerobot
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from tests.support import assert_identical

# Who is there after the reset and after each step, of two episodes.
PLANS = {
    "enters late": (["ab", "ab", "ab", "abc", "ac", "c", ""], ["ab", "abc", "a", ""]),
    "leaves and comes back": (["abc", "ab", "b", "bc", "bc", ""], ["abc", "c", "abc", ""]),
    "leaves last of all": (["ab", "a", "a", "a", ""], ["ab", "b", "b", ""]),
    "is not there at first": (["c", "ac", "a", ""], ["b", "ab", "abc", "c", ""]),
}


class Planned(ParallelEnv):  # type: ignore[misc]
    """Agents come and go as planned; each sees, and gets, its own number and that of the step."""

    metadata = {"name": "planned"}  # noqa: RUF012 - as PettingZoo has it
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self, plan: tuple[list[str], ...]) -> None:
        self.plan, self.episode, self.render_mode = plan, -1, None

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1000, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def _seen(self, agents: str) -> dict[str, Any]:
        return {agent: np.array([ord(agent), self.t], np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = (self.episode + 1) % len(self.plan), 0
        self.agents = list(self.plan[self.episode][0])
        return self._seen("".join(self.agents)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        before, self.t = self.agents, self.t + 1
        self.agents = list(self.plan[self.episode][self.t])
        told = sorted({*before, *self.agents})
        ended = {agent: agent not in self.agents for agent in told}
        rewards = {agent: ord(agent) + self.t / 16 for agent in told}
        return self._seen("".join(told)), rewards, ended, dict.fromkeys(told, False), {agent: {} for agent in told}


@pytest.mark.parametrize("observations", [False, True], ids=["replayed", "recorded"])
@pytest.mark.parametrize("name", PLANS)
def test_each_agent_has_its_steps_and_rewards_at_those_of_the_environment(
    tmp_path: Path, name: str, observations: bool
) -> None:
    plan, local = PLANS[name], Planned(PLANS[name])
    wanted = []
    with (
        serve_parallel(lambda: Planned(plan), record=Recording(tmp_path, observations=observations)) as server,
        closing(make_parallel_remote(server.url)) as env,
    ):
        for episode in plan:
            told = [env.reset(seed=1)[0]]
            assert_identical(told[0], local.reset(seed=1)[0])
            rewards = np.zeros((len(episode) - 1, 3))
            for t in range(len(episode) - 1):
                actions = dict.fromkeys(env.agents, t % 3)
                seen, gained, *_ = env.step(actions)
                assert_identical(seen, local.step(actions)[0])
                told.append(seen)
                for agent, reward in gained.items():
                    rewards[t, "abc".index(agent)] = reward
            wanted.append((told, rewards))
    recorded = read_folder(tmp_path).episodes()
    assert len(recorded) == len(plan)
    for number, (episode, (told, rewards)) in enumerate(zip(recorded, wanted, strict=True)):
        make = partial(Planned, plan[number:])
        assert (episode.end, episode.incomplete, episode.length) == ("terminated", False, len(rewards))
        np.testing.assert_array_equal(episode.rewards, rewards)
        assert episode.total == rewards.sum()
        rows = observed_rows(episode, make)
        assert [(step, seen.keys()) for step, seen, _ in rows] == [(t, seen.keys()) for t, seen in enumerate(told)]
        for agent in {agent for seen in told for agent in seen}:
            at = "abc".index(agent)
            # In each stretch an agent acts in every step, and saw what it acts upon after the step before.
            stretches = load_stretches(episode, make, agent)
            assert [len(data.actions) for data in stretches] == [
                stop - start for start, stop in acted(plan[number], agent)
            ]
            for data, (start, stop) in zip(stretches, acted(plan[number], agent), strict=True):
                assert [seen.tolist() for seen in data.observations] == [
                    told[t][agent].tolist() for t in range(start, stop + 1)
                ]
                assert data.actions == [t % 3 for t in range(start, stop)]
                assert data.rewards.tolist() == rewards[start:stop, at].tolist()
                assert data.terminations.tolist() == [False] * (stop - start - 1) + [True]
            if len(stretches) > 1:
                with pytest.raises(RecordingError, match=f"{agent} left and came back; load_stretches returns its 2"):
                    load_episode(episode, make, agent)
            else:
                assert_identical(load_episode(episode, make, agent).observations, stretches[0].observations)
        assert verify(episode, make).ok


def acted(plan: list[str], agent: str) -> list[tuple[int, int]]:
    """Return from which step on, and up to which, an agent is there: each time that it is."""
    there = [False, *(agent in agents for agents in plan), False]
    changes = [t for t, (one, two) in enumerate(pairwise(there)) if one != two]
    return list(zip(changes[::2], changes[1::2], strict=True))


def test_a_dataset_has_an_episode_for_each_time_that_an_agent_was_there(tmp_path: Path) -> None:
    plan = PLANS["leaves and comes back"]
    with (
        serve_parallel(lambda: Planned(plan), record=Recording(tmp_path / "runs", observations=True)) as server,
        closing(make_parallel_remote(server.url)) as env,
    ):
        env.reset(seed=1)
        while env.agents:
            env.step(dict.fromkeys(env.agents, 1))
    export_lerobot(read_folder(tmp_path / "runs").episodes(), tmp_path / "dataset")
    frames = pq.read_table(tmp_path / "dataset/c/data/chunk-000/file-000.parquet").to_pydict()
    # It is there for the first step, and for the fourth and fifth.
    assert frames["episode_index"] == [0, 1, 1]
    assert frames["observation.state"] == [[ord("c"), 0], [ord("c"), 3], [ord("c"), 4]]
    assert frames["next.done"] == [True, False, True]
