"""The world of N lanes: one message steps N environments, by one of Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from bridge.errors import SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.space_json import published_space
from bridge.tensors import Array, unpack_tensor
from bridge.wire import NO_SEED
from bridge.worlds.base import Lock
from bridge.worlds.gym import EnvAgent, EnvWorld
from bridge.worlds.isolated_env import IsolatedVectorEnv
from bridge.worlds.lane_infos import collect_infos, join_infos

__all__ = ["VectorAgent", "VectorWorld"]


class VectorAgent(EnvAgent):
    """The agent of all lanes. It stays RUNNING; a finished lane begins anew in the next Step (NEXT_STEP)."""

    SETTINGS = ("seed", "options", "reset_mask")

    def __init__(self, world: VectorWorld, env: VectorEnv[Any, Any, Any], collects: bool) -> None:
        spaces = published_space(env.single_observation_space), published_space(env.single_action_space)
        super().__init__(world, env, *spaces, lanes=env.num_envs)
        self._collects = collects
        if isinstance(env, IsolatedVectorEnv):
            self._kind, self._separable = env.kind, env.resets_lanes
        else:
            self._kind = type(env.unwrapped).__name__
            self._separable = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))

    def _read_seed(self, array: Array) -> Any:
        """An integer seeds lane i with itself + i; a list gives each lane's, -1 for none."""
        if array.shape not in ((), (self._lanes,)) or array.dtype.kind not in "iu":
            raise TensorError(f"expected an integer seed, or one for each of {self._lanes} lanes, got {array!r:.80}")
        if array.shape == ():
            if array < 0:
                raise TensorError(f"expected a non-negative seed, got {array}")
            return int(array)
        if array.dtype.kind == "i" and (array < NO_SEED).any():
            raise TensorError(f"expected non-negative seeds, or {NO_SEED} for none, got {array!r:.80}")
        seeds = [None if seed == NO_SEED else int(seed) for seed in array.tolist()]
        if self._separable:
            return seeds
        # Other vector environments take one integer, from which they seed all lanes.
        first = seeds[0]
        if first is not None and seeds == [first + lane for lane in range(len(seeds))]:
            return first
        if any(seed is not None for seed in seeds):
            raise TensorError(f"{self._kind} takes one integer seed; expected consecutive seeds, got {array!r:.80}")
        return None

    def _read_mask(self, settings: Mapping[str, pb.Tensor], options: dict[str, Any] | None) -> dict[str, Any] | None:
        if "reset_mask" not in settings:
            return options
        mask = unpack_tensor(settings["reset_mask"], "reset_mask")
        if mask.shape != (self._lanes,) or mask.dtype != np.bool_ or not mask.any():
            raise TensorError(f"expected a reset_mask of {self._lanes} bools, one of them True, got {mask!r:.80}")
        if mask.all():
            return options
        if not self._separable:
            raise TensorError(f"{self._kind} cannot reset some of its lanes alone; reset all of them")
        return {**(options or {}), "reset_mask": mask}

    def _join(self, info: Any) -> Any:
        return join_infos(info, self._env.num_envs) if self._collects else info

    def step(self, actions: Mapping[int, Array]) -> int:
        """Step all lanes."""
        action = self._action(actions)
        with self._world.environment("step"):
            self._observation, reward, terminated, truncated, info = self._env.step(action)
            self._info = self._join(info)
            self._reward[...] = reward
            self._terminated[...] = terminated
            self._truncated[...] = truncated
        return pb.RUNNING

    def ended(self, state: int) -> tuple[int, int]:
        """Return the number of lanes, and how many of them ended their episode."""
        return self._env.num_envs, int(np.count_nonzero(self._terminated | self._truncated))


class VectorWorld(EnvWorld):
    """The world of the lanes of a vector environment.

    Raises:
        SettingError: The vector environment does not reset its lanes in the next step.
    """

    def __init__(self, name: str, env: VectorEnv[Any, Any, Any], lock: Lock) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.NEXT_STEP:
            raise SettingError(
                f"expected a vector environment whose autoreset mode is NEXT_STEP, got {mode} from {env}; the client's "
                "BlockingReset gives the other modes"
            )
        super().__init__(name, env, lock)
        self._collects = collect_infos(env)

    def _make_agent(self) -> VectorAgent:
        return VectorAgent(self, self._env, self._collects)
