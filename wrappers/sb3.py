"""Remote environments under the contract of Stable-Baselines3's vector environments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv

from bridge.client.attributes import OwnAttributes
from bridge.client.vector_env import RemoteVectorEnv
from bridge.encoding.tensors import Array
from bridge.errors import SettingError

from .blocking_reset import MAX_FAILURES, BlockingReset

__all__ = ["SB3VecEnv"]


class SB3VecEnv(OwnAttributes, VecEnv):
    """Remote environments as a `stable_baselines3.common.vec_env.VecEnv`; needs the extra `sb3`.

    A finished slot begins its next episode in the same step; its info holds `terminal_observation` and
    `TimeLimit.truncated`, `reset_infos` holds the info of the reset. Rewards are float32. For the episode statistics
    that Stable-Baselines3 logs, wrap it in `VecMonitor`, or serve environments that are wrapped in `Monitor`.

    Examples:
        >>> from bridge import make_vec_remote, serve_gym
        >>> from bridge.wrappers import SB3VecEnv
        >>> from stable_baselines3 import PPO
        >>> from stable_baselines3.common.vec_env import VecMonitor
        >>> with serve_gym("CartPole-v1", num_envs=8) as server:
        ...     envs = VecMonitor(SB3VecEnv(make_vec_remote(server.url)))
        ...     model = PPO("MlpPolicy", envs, n_steps=32, device="cpu").learn(256)
        ...     envs.close()

    Args:
        envs: What `make_vec_remote` returns, or a `BlockingReset` around it, whose autoreset mode does not matter.
        on_lost: What becomes of a slot whose remote was lost, after the truncation that tells it. `wait`: it is waited
            for, as long as the timeout of `envs` says, or a spare takes its place (`make_vec_remote(…, spares=…)`).
            `raise`: `step_wait` raises, unless a spare stands by.
        max_failures: `step_wait` raises where so many episodes of a slot in a row ended by a failure of its
            environment; None: it never does.

    Raises:
        SettingError: `envs` is something else, or `on_lost` is another word: Stable-Baselines3 cannot leave
            transitions out, which `continue` needs.
    """

    def __init__(
        self,
        envs: RemoteVectorEnv | BlockingReset,
        *,
        on_lost: Literal["wait", "raise"] = "wait",
        max_failures: int | None = MAX_FAILURES,
    ) -> None:
        if on_lost not in ("wait", "raise"):
            raise SettingError(
                f"expected on_lost to be 'wait' or 'raise', got {on_lost!r}: Stable-Baselines3 cannot leave the "
                "transitions of a lost slot out; give make_vec_remote spares"
            )
        if isinstance(envs, (BlockingReset, RemoteVectorEnv)):
            # Stable-Baselines3 knows this mode alone: what `step_wait` returns at an end is the next episode's first
            # observation.
            self._envs = BlockingReset(
                envs.env if isinstance(envs, BlockingReset) else envs,
                envs.timeout,
                autoreset_mode=AutoresetMode.SAME_STEP,
                on_lost=on_lost,
                max_failures=max_failures,
            )
        else:
            raise SettingError(
                f"expected what make_vec_remote returns, or a BlockingReset around it, got {envs!r} of type "
                f"{type(envs).__name__}"
            )
        self._stepping = False
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = dict(self._envs.metadata)

    def reset(self) -> Any:
        """Begin an episode in every slot, with the seeds and options that were set for it; return the observations."""
        if self._stepping:
            self._envs.env.cancel()  # a step that is under way is given up, says the contract
            self._stepping = False
        self._envs.reset_async(self._seeds, slot_options=self._options if any(self._options) else None)
        results = self._envs.wait_for_all("reset")
        self.reset_infos = results.own_infos()
        self._reset_seeds()
        self._reset_options()
        return results.batched()

    def step_async(self, actions: Array) -> None:
        """Send the actions."""
        self._envs.step_async(actions)
        self._stepping = True

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Return observations, float32 rewards, dones, each `(num_envs,)`, and a list with each slot's info."""
        results = self._envs.wait_for_all("step")
        self._stepping = False
        infos, batch, dones = results.own_infos(), results.batch, results.ended
        for slot, info in enumerate(infos):
            # As DummyVecEnv says it: where it is True, algorithms bootstrap with the value of the terminal observation.
            info["TimeLimit.truncated"] = bool(batch.truncations[slot] and not batch.terminations[slot])
        if results.begun is not None:
            first = results.begun.own_infos()
            for slot in np.flatnonzero(dones).tolist():
                infos[slot]["terminal_observation"] = results.row(slot)
                self.reset_infos[slot] = first[slot]
        else:  # a simulator that has reset its lanes already tells their ends in its infos
            for slot in np.flatnonzero(dones).tolist():
                infos[slot]["terminal_observation"] = infos[slot].pop("final_obs", None)
        return results.batched(), batch.rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Leave the worlds and disconnect. May be called twice."""
        self._envs.close()

    def _slots(self, indices: int | Iterable[int] | None) -> list[int]:
        return list(self._get_indices(indices))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Read a public attribute of the environments in some slots.

        Raises:
            AttributeError: They have none of that name.
        """
        found = self._envs.get_attr(attr_name)
        return [found[slot] for slot in self._slots(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set a public attribute of the environments in some slots to one value."""
        self._envs.env.set_attr_at(self._slots(indices), attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a public method of the environments in some slots."""
        return list(self._envs.env.call_at(self._slots(indices), method_name, *method_args, **method_kwargs))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Tell whether the environments, where they run, are in a wrapper of this class."""
        # By name, because the objects are at the server.
        name = f"{wrapper_class.__module__}:{wrapper_class.__qualname__}"
        found = self._envs.env.wrapper_classes()
        return [name in found[slot] for slot in self._slots(indices)]

    def get_images(self) -> Sequence[Array | None]:
        """Return each slot's frame, where the render mode is `rgb_array`."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"expected the render mode rgb_array for images, got {self.render_mode}", stacklevel=2)
            return [None] * self.num_envs
        return list(self._envs.env.render())
