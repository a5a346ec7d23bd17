"""Infos of slots equal those of SyncVectorEnv, with unusual keys and values, in each autoreset mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge import make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.support import assert_identical

# What an environment tells in its infos, of its number and of its steps in the episode.
INFOS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "a key and its name with an underscore": lambda number, _: {"_x": "mine", "x": number},
    "the same in a nested dict": lambda number, _: {"d": {"x": number, "_x": 0.5}},
    "two underscores": lambda number, _: {"__x": number, "x": 1},
    "an underscore in some lanes": lambda number, _: {"_x": 3} if number else {"x": 3},
    "other orders of keys": lambda number, _: {"b": 1, "a": 2} if number % 2 else {"a": 2, "b": 1},
    "arrays of shape ()": lambda number, steps: {"x": np.array(number + steps / 3, np.float32)},
    "arrays of objects": lambda number, _: {"x": np.array([None, "a", {"b": number}], object)},
    "an intervention, also in a reset": lambda number, _: {"intervene_action": 1} if number else {},
}


class Telling(CountingEnv):
    """Its seed is its number; its episodes have as many steps more than two."""

    def __init__(self, tell: Callable[[int, int], dict[str, Any]]) -> None:
        super().__init__(2)
        self._tell, self._number = tell, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(seed=seed, options=options)
        if seed is not None:
            self._number, self.length = seed, 2 + seed
        return observation, self._tell(self._number, 0)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return (*super().step(action)[:4], self._tell(self._number, self.steps))


def orders(infos: Any) -> Any:
    """Return the keys of nested dicts in their order."""
    return [(key, orders(value)) for key, value in infos.items()] if isinstance(infos, dict) else None


def compare(envs: BlockingReset, local: SyncVectorEnv[Any, Any]) -> None:
    """Step remote environments beside local ones, through several episodes."""
    actions = np.zeros(3, np.int64)
    assert_identical(envs.reset(seed=0), local.reset(seed=0), "reset")
    for step in range(8):
        mine, theirs = envs.step(actions), local.step(actions)
        assert_identical(mine, theirs, f"step {step}")
        assert orders(mine[4]) == orders(theirs[4]), f"step {step}"
        ended = theirs[2] | theirs[3]
        if local.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended}
            assert_identical(envs.reset(options=options), local.reset(options=options), f"reset after step {step}")


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("name", INFOS)
def test_infos_of_slots_equal_those_of_sync_vector_env(name: str, mode: AutoresetMode) -> None:
    def make() -> Telling:
        return Telling(INFOS[name])

    with serve_gym(make) as one, serve_gym(make, num_envs=2) as two:
        for urls in ([one.url] * 3, [two.url, one.url]):
            local = SyncVectorEnv([make] * 3, autoreset_mode=mode)
            envs = BlockingReset(make_vec_remote(urls), autoreset_mode=mode)
            compare(envs, local)
            envs.close()
            local.close()


@pytest.mark.parametrize("name", INFOS)
def test_each_slots_own_info_is_what_its_environment_told(name: str) -> None:
    tell = INFOS[name]
    with serve_gym(lambda: Telling(tell), num_envs=3) as server:
        envs = make_vec_remote(server.url)
        envs.reset_async(seed=0)
        own = envs.wait_for_all("reset").own_infos()
        envs.close()
        for number in range(3):
            assert_identical(own[number], tell(number, 0), f"slot {number}")
            assert orders(own[number]) == orders(tell(number, 0))
