"""Remote environments with the interface of Stable-Baselines3's vector environments."""

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

    A slot whose episode ended begins the next one in the same step; its info contains `terminal_observation` and
    `TimeLimit.truncated`, and `reset_infos` contains the info of the reset. Rewards are float32. For the episode
    statistics that Stable-Baselines3 logs, wrap it in `VecMonitor`, or serve environments that are wrapped in
    `Monitor`.

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
        envs: The result of `make_vec_remote`, or a `BlockingReset` around it in any autoreset mode.
        on_lost: What happens to a slot whose remote was lost, after the truncation that reports it. `wait`: wait for
            it, at most for the timeout of `envs`, or use a spare (`make_vec_remote(…, spares=…)`). `raise`: `step_wait`
            raises, unless a spare is ready. Default: the value of the `BlockingReset`, else `wait`.
        max_failures: `step_wait` raises if this many episodes of a slot in a row ended with a failure of its
            environment; None: never. Default: the value of the `BlockingReset`, else 10.

    Raises:
        SettingError: `envs` is something else, or `on_lost`, also that of the `BlockingReset`, is another value:
            `continue` needs invalid transitions to be left out, which Stable-Baselines3 cannot do.
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
            # Stable-Baselines3 knows only this mode: at the end of an episode, `step_wait` returns the next episode's
            # first observation.
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
        # Used for calls to some slots only; wrappers do not forward such calls.
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
        self._remote.cancel()  # a pending step is cancelled, as the interface requires
        self._envs.reset_async(self._seeds, slot_options=self._options if any(self._options) else None)
        results = self._envs.wait_for_all("reset")
        self.reset_infos = results.own_infos()
        self._reset_seeds()
        self._reset_options()
        return results.batched()

    def step_async(self, actions: Any) -> None:
        """Send the actions.

        Args:
            actions: An array `(num_envs, …)`, or a sequence with one element of `action_space` per slot. For a Dict or
                Tuple space also Gymnasium's batch: a dict or a tuple of such arrays.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
        """
        if self._composite and not self._is_batch(actions):
            actions = self._batched(list(actions))
        self._envs.step_async(actions)

    def _is_batch(self, actions: Any) -> bool:
        """Return True if the actions of a Dict or Tuple space are batched by part, False for one action per slot."""
        if isinstance(self.action_space, spaces.Dict) or isinstance(actions, Mapping):
            return isinstance(actions, Mapping)
        # Both may be tuples, even of the same length. An action per slot is then a tuple, and a batch holds arrays. But
        # if a part of the space is a Tuple itself, its batch is a tuple too, though not an element of the whole space.
        slots = len(actions) == self.num_envs and all(isinstance(action, (tuple, list)) for action in actions)
        return isinstance(actions, tuple) and not (slots and all(map(self.action_space.contains, actions)))

    def _batched(self, actions: list[Any]) -> Any:
        """Batch one action per slot by the parts of their space."""
        if len(actions) != self.num_envs:
            raise InvalidActionError(f"expected an action for each of {self.num_envs} slots, got {len(actions)}")
        try:
            return _batch(self.action_space, actions)
        except (TypeError, LookupError, ValueError) as error:
            raise InvalidActionError(
                f"expected elements of {self.action_space}, one for each slot, got {actions!r:.200}: {error!r}"
            ) from error

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Return observations, float32 rewards and dones, each `(num_envs,)`, and a list with each slot's info."""
        # Created while the servers step, which takes no extra time; returned as they are if there are no infos.
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
        else:  # a simulator that resets its lanes itself reports their ends in its infos
            lasts = [infos[slot].pop("final_obs", None) for slot in ended]
        for slot, last in zip(ended, lasts, strict=True):
            # As in DummyVecEnv: if it is True, algorithms bootstrap with the value of the terminal observation.
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
        """Return slot numbers for indices, which work as in a list: -1 is the last slot."""
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
        """Read a public attribute of the environments in some slots; a method is returned as a function.

        Raises:
            AttributeError: The environments have no such attribute.
            IndexError: A slot does not exist.
        """
        return list(self._remote.get_attr_at(self._slots(indices), attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set a public attribute of the environments in some slots to one value; raise IndexError for unknown slots."""
        if slots := self._slots(indices):
            self._remote.set_attr_at(slots, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a public method of the environments in some slots; raise IndexError for unknown slots.

        A slot that is listed twice is called twice. `save_state` returns one state per slot, `restore_state` one
        observation and info per slot; counters and stacked frames of wrappers around this object are not restored.
        """
        slots = self._slots(indices)
        if (added := added_method(self._envs, method_name)) is not None:
            return self._by_slot(added(*method_args, slots=slots, **method_kwargs), slots)
        found: list[Any] = [None] * len(slots)
        waiting = list(range(len(slots)))
        while waiting:
            # In each round, the next call of every slot: calls to different slots run side by side.
            first = {slots[position]: position for position in reversed(waiting)}
            results = self._remote.call_at(list(first), method_name, *method_args, **method_kwargs)
            for position, result in zip(first.values(), results, strict=True):
                found[position] = result
            waiting = [position for position in waiting if first[slots[position]] != position]
        return found

    def _by_slot(self, found: Any, slots: list[int]) -> list[Any]:
        """Return the result of a feature's vector method as one item per slot."""
        if not isinstance(found, tuple):
            return list(found) if isinstance(found, list) else [found] * len(slots)
        # Treated like a reset: the slots are now in episodes that continue from another point.
        observations, infos = list(iterate(self._envs.observation_space, found[0])), found[1]
        for slot in slots:
            self.reset_infos[slot] = _info_of(infos, slot)
        return [(observations[slot], self.reset_infos[slot]) for slot in slots]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return whether each remote environment has a wrapper of this class; raise IndexError for unknown slots."""
        # Compared by name, because the objects are on the server.
        name = f"{wrapper_class.__module__}:{wrapper_class.__qualname__}"
        slots = self._slots(indices)
        found = self._remote.wrapper_classes()
        return [name in found[slot] for slot in slots]

    def get_images(self) -> Sequence[Array | None]:
        """Return each slot's frame if the render mode is `rgb_array`."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"expected the render mode rgb_array for images, got {self.render_mode}", stacklevel=2)
            return [None] * self.num_envs
        return list(self._remote.render())


def _info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Return one slot's info from infos that Gymnasium has joined to arrays with masks."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and mask[slot]:
            found[key] = _info_of(value, slot) if isinstance(value, Mapping) else value[slot]
    return found


def _batch(space: Space[Any], actions: list[Any]) -> Any:
    """Batch elements of a space: Dict and Tuple spaces like Gymnasium, others as a list."""
    if isinstance(space, spaces.Dict):
        if any(set(action) != set(space.spaces) for action in actions):
            raise ValueError(f"expected the keys {list(space.spaces)}")
        return {key: _batch(part, [action[key] for action in actions]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if any(len(action) != len(space.spaces) for action in actions):
            raise ValueError(f"expected {len(space.spaces)} parts")
        return tuple(_batch(part, [action[at] for action in actions]) for at, part in enumerate(space.spaces))
    return actions
