"""What environments are given by resets: those of the user, of lanes that begin anew, and after one that failed."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import EnvironmentFailedError
from tests.support import assert_identical, everywhere

DEADLINE = 60.0
GIVEN = {None: 0, (): 1, ("level",): 2}


class Told(gymnasium.Env[Any, Any]):
    """Shows what its last reset was given: no options, an empty dict, or a level, and which resets there were."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        self.given = GIVEN[None if options is None else tuple(options)]
        return self.seen(), {}

    def seen(self) -> Any:
        return np.array([self.given, self.resets], np.float64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.seen(), 0.0, bool(action), False, {}


def played(envs: Any, mode: str) -> list[Any]:
    """The observations of lanes that end one after the other, and together."""
    seen = [envs.reset(seed=3, options={"level": 3})[0]]
    for actions in ([0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]):
        observations, _, ended, _, _ = envs.step(np.array(actions))
        seen.append(observations)
        if mode == "Disabled" and ended.any():
            seen.append(envs.reset(options={"reset_mask": ended})[0])
    return [np.array(each) for each in seen]


@everywhere
@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_environments_are_given_what_those_of_sync_vector_env_are(mode: str, lanes: bool, isolation: Any) -> None:
    with closing(SyncVectorEnv([Told] * 3, autoreset_mode=mode)) as local:
        wanted = played(local, mode)
    with (
        serve_gym(Told, isolation=isolation) as server,
        closing(
            make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=True, autoreset_mode=mode, timeout=DEADLINE)
        ) as envs,
    ):
        assert_identical(played(envs, mode), wanted)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_recording_of_lanes_that_began_anew_verifies(mode: str, tmp_path: Any) -> None:
    from bridge.cli import main

    with (
        serve_gym(Told, record=tmp_path) as server,
        closing(make_vec_remote(server.url, num_envs=3, lanes=True, blocking=True, autoreset_mode=mode)) as envs,
    ):
        played(envs, mode)
    assert main(["replay", str(tmp_path), "--env", f"{__name__}:Told", "--verify"]) == 0


class Busy(gymnasium.Env[Any, Any]):
    """Raises in its first reset, and says in an info what each reset was given."""

    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)
    failures = 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("busy")
        return self.np_random.uniform(0, 1, 1), {"seed": -1 if seed is None else seed, "options": options or {}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1), 0.0, False, False, {}


def test_a_plain_reset_after_one_that_failed_has_none_of_its_settings() -> None:
    local = Busy()
    with pytest.raises(RuntimeError, match="busy"):
        local.reset(seed=7, options={"level": 3})
    wanted = [local.reset() for _ in range(2)]
    with serve_gym(Busy) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        with pytest.raises(EnvironmentFailedError, match="busy"):
            env.reset(seed=7, options={"level": 3})
        for observation, info in wanted:
            seen, told = env.reset()
            assert_identical(seen, observation)
            assert (told["seed"], told["options"]) == (info["seed"], info["options"]) == (-1, {})


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
def test_slots_whose_reset_failed_are_reset_again_as_it_said(lanes: bool) -> None:
    with (
        serve_gym(Busy) as server,
        closing(make_vec_remote(server.url, num_envs=2, lanes=lanes, blocking=True, timeout=DEADLINE)) as envs,
    ):
        _, infos = envs.reset(seed=7, options={"level": 3})
        assert infos["seed"].tolist() == [7, 8]
        _, infos = envs.reset()
        assert infos["seed"].tolist() == [-1, -1]
