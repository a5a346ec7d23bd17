"""Remote environments under the contract of Stable-Baselines3's vector environments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, cast

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from stable_baselines3.common.vec_env import VecEnv

from bridge.core.client.attributes import OwnAttributes, added_method
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.encoding.tensors import Array
from bridge.errors import InvalidActionError, SettingError

from .blocking_reset import MAX_FAILURES, BlockingReset
from .transparent import Transparent

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
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = VecMonitor(SB3VecEnv(make_vec_remote(server.url, num_envs=8, blocking=True)))
        ...     model = PPO("MlpPolicy", envs, n_steps=32, device="cpu").learn(256)
        ...     envs.close()

    Args:
        envs: What `make_vec_remote` returns, or a `BlockingReset` around it, whose autoreset mode does not matter.
        on_lost: What becomes of a slot whose remote was lost, after the truncation that tells it. `wait`: it is waited
            for, as long as the timeout of `envs` says, or a spare takes its place (`make_vec_remote(…, spares=…)`).
            `raise`: `step_wait` raises, unless a spare stands by. Not given: that of the `BlockingReset`, else `wait`.
        max_failures: `step_wait` raises where so many episodes of a slot in a row ended by a failure of its
            environment; None: it never does. Not given: that of the `BlockingReset`, else 10.

    Raises:
        SettingError: `envs` is something else, or `on_lost`, its own too, is another word: Stable-Baselines3 cannot
            leave transitions out, which `continue` needs.
    """

    def __init__(
        self,
        envs: RemoteVectorEnv | BlockingReset,
        *,
        on_lost: Literal["wait", "raise"] | None = None,
        max_failures: int | EllipsisType | None = ...,
    ) -> None:
        blocking = envs if isinstance(envs, BlockingReset) else None
        if on_lost is None:
            on_lost = "wait" if blocking is None else cast(Any, blocking.on_lost)
        if max_failures is ...:
            max_failures = MAX_FAILURES if blocking is None else blocking.max_failures
        if on_lost not in ("wait", "raise"):
            raise SettingError(
                f"expected on_lost to be 'wait' or 'raise', got {on_lost!r}: Stable-Baselines3 cannot leave the "
                "transitions of a lost slot out; give make_vec_remote spares"
            )
        if isinstance(envs, (BlockingReset, RemoteVectorEnv, Transparent)):
            # Stable-Baselines3 knows this mode alone: what `step_wait` returns at an end is the next episode's first
            # observation.
            self._envs = BlockingReset(
                cast(RemoteVectorEnv, envs if blocking is None else blocking.env),
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
        # What asks the environments in some slots alone; wrappers hand on no such calls.
        self._remote = cast(RemoteVectorEnv, envs.unwrapped)
        self._composite = isinstance(envs.single_action_space, (spaces.Dict, spaces.Tuple))
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = dict(self._envs.metadata)

    def reset(self) -> Any:
        """Begin an episode in every slot, with the seeds and options that were set for it; return the observations."""
        if len(self._options) != self.num_envs:
            raise SettingError(
                f"expected set_options with a dict, or a list with one for each of {self.num_envs} slots, got "
                f"{len(self._options)}"
            )
        self._remote.cancel()  # a step that is under way is given up, says the contract
        self._envs.reset_async(self._seeds, slot_options=self._options if any(self._options) else None)
        results = self._envs.wait_for_all("reset")
        self.reset_infos = results.own_infos()
        self._reset_seeds()
        self._reset_options()
        return results.batched()

    def step_async(self, actions: Any) -> None:
        """Send the actions.

        Args:
            actions: An array `(num_envs, …)`, or any sequence with an element of `action_space` for each slot. For a
                Dict or Tuple space also a batch as Gymnasium makes it: a dict or a tuple of such arrays.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
        """
        if self._composite and not self._is_batch(actions):
            actions = self._batched(list(actions))
        self._envs.step_async(actions)

    def _is_batch(self, actions: Any) -> bool:
        """Tell whether the actions of a Dict or Tuple space are batched by its parts, and not one for each slot."""
        if isinstance(self.action_space, spaces.Dict) or isinstance(actions, Mapping):
            return isinstance(actions, Mapping)
        # Both may be tuples, even of the same length. A slot's action is then a tuple, and a batch one of arrays: but
        # where a part of the space is a Tuple itself, its batch is a tuple too, and no element of the whole space.
        slots = len(actions) == self.num_envs and all(isinstance(action, (tuple, list)) for action in actions)
        return isinstance(actions, tuple) and not (slots and all(map(self.action_space.contains, actions)))

    def _batched(self, actions: list[Any]) -> Any:
        """Batch one action for each slot by the parts of their space."""
        if len(actions) != self.num_envs:
            raise InvalidActionError(f"expected an action for each of {self.num_envs} slots, got {len(actions)}")
        try:
            return _batch(self.action_space, actions)
        except (TypeError, LookupError, ValueError) as error:
            raise InvalidActionError(
                f"expected elements of {self.action_space}, one for each slot, got {actions!r:.200}: {error!r}"
            ) from error

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Return observations, float32 rewards, dones, each `(num_envs,)`, and a list with each slot's info."""
        # Made while the servers step, which costs nobody time; they are returned where no environment tells more.
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        results = self._envs.wait_for_all("step")
        batch, dones = results.batch, results.ended
        if results.has_infos:
            infos = results.own_infos()
            for info in infos:
                info["TimeLimit.truncated"] = False
        ended: list[int] = dones.nonzero()[0].tolist()
        if results.first is not None:
            lasts = results.rows_of(ended)
            for slot, first in zip(ended, results.first_infos(ended), strict=True):
                self.reset_infos[slot] = first
        else:  # a simulator that has reset its lanes already tells their ends in its infos
            lasts = [infos[slot].pop("final_obs", None) for slot in ended]
        for slot, last in zip(ended, lasts, strict=True):
            # As DummyVecEnv says it: where it is True, algorithms bootstrap with the value of the terminal observation.
            infos[slot]["TimeLimit.truncated"] = not batch.terminations[slot]
            infos[slot]["terminal_observation"] = last
        return results.batched(), batch.rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Leave the worlds and disconnect. May be called twice."""
        self._envs.close()

    def report(self) -> dict[str, float]:
        """Return the numbers of `RemoteVectorEnv.report`, which `SB3ReportCallback` writes to TensorBoard."""
        return self._remote.report()

    def _slots(self, indices: int | Iterable[int] | None) -> list[int]:
        """Return the slots that some indices name, as those of a list: -1 is the last one."""
        if isinstance(indices, np.integer):
            indices = int(indices)
        slots = range(self.num_envs)
        try:
            return [slots[index] for index in self._get_indices(indices)]
        except IndexError:
            raise IndexError(
                f"expected indices from {-self.num_envs} to {self.num_envs - 1}, got {indices!r:.200}"
            ) from None

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Read a public attribute of the environments in some slots; a method comes back as a function.

        Raises:
            AttributeError: They have none of that name.
            IndexError: There is no such slot.
        """
        return list(self._remote.get_attr_at(self._slots(indices), attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set a public attribute of the environments in some slots to one value; raises IndexError."""
        if slots := self._slots(indices):
            self._remote.set_attr_at(slots, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a public method of the environments in some slots; raises IndexError.

        In a slot that is named twice it is called twice. `save_state` returns a state for each slot, `restore_state` an
        observation and an info for each; what a wrapper around this has counted or stacked stays as it was.
        """
        slots = self._slots(indices)
        if (added := added_method(self._envs, method_name)) is not None:
            return self._by_slot(added(*method_args, slots=slots, **method_kwargs), slots)
        found: list[Any] = [None] * len(slots)
        waiting = list(range(len(slots)))
        while waiting:
            # In each round a slot's first call that was not made yet: the slots of a round are called side by side.
            first = {slots[position]: position for position in reversed(waiting)}
            results = self._remote.call_at(list(first), method_name, *method_args, **method_kwargs)
            for position, result in zip(first.values(), results, strict=True):
                found[position] = result
            waiting = [position for position in waiting if first[slots[position]] != position]
        return found

    def _by_slot(self, found: Any, slots: list[int]) -> list[Any]:
        """Return what a method that a feature adds to vector environments gave, as one item for each slot."""
        if not isinstance(found, tuple):
            return list(found) if isinstance(found, list) else [found] * len(slots)
        # As a reset: slots are in episodes that go on from elsewhere.
        observations, infos = list(iterate(self._envs.observation_space, found[0])), found[1]
        for slot in slots:
            self.reset_infos[slot] = _info_of(infos, slot)
        return [(observations[slot], self.reset_infos[slot]) for slot in slots]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Tell whether the environments, where they run, are in a wrapper of this class; raises IndexError."""
        # By name, because the objects are at the server.
        name = f"{wrapper_class.__module__}:{wrapper_class.__qualname__}"
        slots = self._slots(indices)
        found = self._remote.wrapper_classes()
        return [name in found[slot] for slot in slots]

    def get_images(self) -> Sequence[Array | None]:
        """Return each slot's frame, where the render mode is `rgb_array`."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"expected the render mode rgb_array for images, got {self.render_mode}", stacklevel=2)
            return [None] * self.num_envs
        return list(self._remote.render())


def _info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Return a slot's own info of those that Gymnasium joins as arrays with masks."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and mask[slot]:
            found[key] = _info_of(value, slot) if isinstance(value, Mapping) else value[slot]
    return found


def _batch(space: Space[Any], actions: list[Any]) -> Any:
    """Batch elements of a space, as Gymnasium does those of Dict and Tuple spaces; others stay a list."""
    if isinstance(space, spaces.Dict):
        if any(set(action) != set(space.spaces) for action in actions):
            raise ValueError(f"expected the keys {list(space.spaces)}")
        return {key: _batch(part, [action[key] for action in actions]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if any(len(action) != len(space.spaces) for action in actions):
            raise ValueError(f"expected {len(space.spaces)} parts")
        return tuple(_batch(part, [action[at] for action in actions]) for at, part in enumerate(space.spaces))
    return actions
