"""Lanes that are stepped as a whole: all of them saved and restored at once, or refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

from bridge import make_vec_remote, serve_gym
from bridge.errors import Code, RefusedError
from tests.simulators import DuckLanes, IsaacDouble, ManiSkillDouble
from tests.states_envs import Walk
from tests.support import assert_identical, sampled, stable_id

DEADLINE = 60.0
STEPS = 100


def in_wrappers() -> Any:
    """Walks in wrappers around all of them, which never end together."""
    lanes = SyncVectorEnv([lambda n=n: gymnasium.wrappers.TimeLimit(Walk(), 30 + n) for n in range(4)])
    return NormalizeObservation(RecordEpisodeStatistics(lanes))


def in_same_step() -> Any:
    """The same, whose lanes begin anew in the step that ends them."""
    lanes = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    return RecordEpisodeStatistics(lanes)


class Shared(DuckLanes):
    """Draws from a generator of its class."""

    rng = np.random.default_rng(0)

    def step(self, actions: Any) -> Any:
        return super().step(actions + np.float32(0.01 * self.rng.normal()))


def lanes_of(server: Any, kind: Any) -> Any:
    """All lanes of a server's world, which begin anew as it has them."""
    next_step = isinstance(kind, str) or kind is in_wrappers
    mode = AutoresetMode.NEXT_STEP if next_step else AutoresetMode.SAME_STEP
    return make_vec_remote(server.url, blocking=True, timeout=DEADLINE, autoreset_mode=mode)


def timeless(result: Any) -> Any:
    *rest, info = result
    if isinstance(info, dict) and "episode" in info:
        info = {**info, "episode": {key: value for key, value in info["episode"].items() if key != "t"}}
    return (*rest, info)


def played(envs: Any, actions: list[Any]) -> list[Any]:
    return [timeless(envs.step(action)) for action in actions]


LANES = [
    (IsaacDouble, {}),
    (ManiSkillDouble, {}),
    (DuckLanes, {}),
    (in_wrappers, {}),
    (in_same_step, {}),
    ("CartPole-v1", {"num_envs": 4, "vectorization_mode": "vector_entry_point"}),
]
# `.ci/run` plays three of them here, and one isolated.
HERE_OR_ISOLATED = [
    *sampled([(*each, None) for each in LANES], 6, slow=2),
    *sampled([(*each, "process") for each in LANES], 6, 4),
]


@pytest.mark.filterwarnings("ignore:.*no final observation:RuntimeWarning")
@pytest.mark.parametrize(("kind", "more", "isolation"), HERE_OR_ISOLATED, ids=stable_id)
def test_all_lanes_go_on_from_their_state(kind: Any, more: dict[str, Any], isolation: Any) -> None:
    with (
        serve_gym(kind, isolation=isolation, **more) as server,
        closing(lanes_of(server, kind)) as envs,
    ):
        envs.reset(seed=3)
        envs.action_space.seed(1)
        before = played(envs, [envs.action_space.sample() for _ in range(4)])
        states = envs.save_state()
        assert len(states) == 4
        assert {state.how for state in states} == {"copy"}
        actions = [envs.action_space.sample() for _ in range(STEPS)]
        wanted = played(envs, actions)
        for _ in range(2):
            observations, _ = envs.restore_state(states)
            assert_identical(observations, before[-1][0])
            assert_identical(played(envs, actions), wanted)
        found = []
        for seed in (7, 8, 7):
            envs.restore_state(states, seed=seed)
            found.append(played(envs, actions))
        assert_identical(found[0], found[2])
        assert repr(found[0]) != repr(found[1])
        for state in states:
            state.release()


@pytest.mark.slow
def test_some_of_the_lanes_and_one_state_for_all_are_refused_and_nothing_is_changed() -> None:
    with (
        serve_gym(DuckLanes) as server,
        closing(lanes_of(server, DuckLanes)) as envs,
    ):
        envs.reset(seed=0)
        states, action = envs.save_state(), envs.action_space.sample()
        wanted = envs.step(action)
        with pytest.raises(RefusedError, match="name all 4 of them") as refused:
            envs.save_state(slots=[1, 2])
        assert refused.value.code == Code.INVALID_ARGUMENT
        for wrong, slots in ((states[0], None), (states[::-1], None), ([*states[:3], envs.save_state()[3]], None)):
            with pytest.raises(RefusedError, match="each to its own state of one save"):
                envs.restore_state(wrong, slots=slots)
        with pytest.raises(RefusedError, match="name all 4 of them"):
            envs.restore_state(states[:1], slots=[0])
        envs.restore_state(states)
        assert_identical(envs.step(action), wanted)


@pytest.mark.slow
def test_a_lane_that_ended_and_has_not_begun_anew_is_waited_for() -> None:
    with (
        serve_gym(in_wrappers) as server,
        closing(lanes_of(server, in_wrappers)) as envs,
    ):
        envs.reset(seed=0)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = envs.step(np.zeros(4, np.int64))
            ended = bool((terminated | truncated).any())
        with pytest.raises(RefusedError, match="begins by the next step: step first"):
            envs.save_state()


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        (Shared, {}, "generator that all objects of the class share"),
        ("CartPole-v1", {"num_envs": 2, "vectorization_mode": "async"}, "in other processes"),
    ],
    ids=["shared", "async"],
)
def test_lanes_that_cannot_be_copied_are_refused(kind: Any, more: dict[str, Any], told: str) -> None:
    with (
        serve_gym(kind, **more) as server,
        closing(lanes_of(server, kind)) as envs,
    ):
        envs.reset(seed=0)
        with pytest.raises(RefusedError, match=told):
            envs.save_state()
        envs.step(envs.action_space.sample())
