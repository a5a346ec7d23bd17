"""States through what clients wrap remote environments in: each works, or is refused in words."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from bridge import make_vec_remote, serve_gym
from bridge.errors import MissingAttributeError, SettingError
from bridge.wrappers import ActionHistory, BlockingReset, Throttle
from tests.states_envs import Walk
from tests.support import assert_identical

DEADLINE = 60.0


def forked(url: str, *, lanes: bool, mode: str) -> list[Any]:
    """What blocking slots give that are saved, stepped past ends, and forked, with and without seeds."""
    made = make_vec_remote(url, num_envs=4, lanes=lanes, timeout=DEADLINE)
    with closing(BlockingReset(made, autoreset_mode=gymnasium.vector.AutoresetMode(mode))) as envs:
        found: list[Any] = [envs.reset(seed=5)]
        for turn in range(3):
            states = envs.save_state(slots=[2, 0])
            found += [envs.step(np.full(4, (turn + step) % 3)) for step in range(6)]
            found.append(envs.restore_state(states[0], slots=[1, 3], seed=[7, None]))
            found += [envs.step(np.full(4, (turn + step) % 2)) for step in range(6)]
            found.append(envs.restore_state(states[1]))
            found += [envs.step(np.full(4, (turn + step) % 3)) for step in range(40)]
    return found


def without_times(result: Any) -> Any:
    *rest, infos = result
    return (*rest, {key: value for key, value in infos.items() if key.strip("_") not in ("lanes", "slot_state")})


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.slow
def test_lanes_and_worlds_of_blocking_slots_give_the_same(mode: str) -> None:
    with serve_gym("FrozenLake-v1") as server:
        lanes = forked(server.url, lanes=True, mode=mode)
        worlds = forked(server.url, lanes=False, mode=mode)
    for mine, theirs in zip(lanes, worlds, strict=True):
        assert_identical(without_times(mine), without_times(theirs))


def test_wrappers_that_only_time_calls_hand_states_on() -> None:
    with serve_gym(Walk) as server:
        made = make_vec_remote(server.url, num_envs=2, timeout=DEADLINE)
        with closing(BlockingReset(Throttle(made, 1000.0))) as envs:
            envs.reset(seed=0)
            (state,) = envs.save_state(slots=[0])
            wanted = envs.step(np.array([1, 1]))[0][0]
            envs.restore_state(state)
            assert_identical(envs.step(np.array([1, 1]))[0], np.array([wanted] * 2))


def test_what_would_not_follow_a_state_says_that_it_has_none() -> None:
    with serve_gym(Walk) as server:
        made = make_vec_remote(server.url, num_envs=2, blocking=True, timeout=DEADLINE)
        with closing(RecordEpisodeStatistics(made)) as envs:
            envs.reset(seed=0)
            with pytest.raises(AttributeError, match="has no attribute 'save_state'"):
                envs.save_state()
            # Beneath them all there is one.
            assert len(envs.unwrapped.save_state()) == 2
            with pytest.raises(MissingAttributeError, match="no method or attribute 'save_state'"):
                made.call("save_state")
        slots = make_vec_remote(server.url, num_envs=2, timeout=DEADLINE)
        with closing(ActionHistory(slots)) as history:
            history.reset(seed=0)
            with pytest.raises(SettingError, match="expected what make_remote or make_vec_remote returns"):
                history.save_state()
    with closing(gymnasium.make("FrozenLake-v1")) as local, pytest.raises(AttributeError):
        local.get_wrapper_attr("save_state")
