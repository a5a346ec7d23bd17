"""Remote environments under the contract of Gymnasium's own vector environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from bridge.client.remote_env import checked_timeout
from bridge.client.remote_vector_env import RemoteVectorEnv
from bridge.client.send_recv import Received
from bridge.errors import SettingError
from bridge.tensors import Array

__all__ = ["BlockingReset"]


class BlockingReset(VectorWrapper[Any, Any, Any, Any, Array]):
    """Makes `reset` and `step` wait until every slot has an observation (U-10), and gives batched arrays.

    What comes out is exactly what `gymnasium.vector.SyncVectorEnv` gives in the mode NEXT_STEP for the same
    environments, seeds and actions, so that any trainer and any of Gymnasium's vector wrappers works on it unchanged.
    A remote that is lost shows as an ordinary truncation, with the last observation that it had; its slot goes on once
    it is back.

    Args:
        env: What `make_vec_remote` returns.
        timeout: Seconds that a slot may be without an observation before `step` or `reset` raises; None: the
        environment's own
            timeout.

    Raises:
        SettingError: `env` is another kind of environment.
    """

    env: RemoteVectorEnv

    def __init__(self, env: RemoteVectorEnv, timeout: float | None = None) -> None:
        if not isinstance(env, VectorEnv) or not isinstance(env.unwrapped, RemoteVectorEnv) or env.unwrapped is not env:
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        super().__init__(env)
        self._timeout = env._timeout if timeout is None else checked_timeout(timeout)

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """When a finished slot is reset."""
        return AutoresetMode.NEXT_STEP

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`, and wait for it.

        Args:
            seed: An integer seeds slot i with `seed + i`; a list gives each slot's.
            options: For the environments' reset, and `reset_mask`.

        Returns:
            A batch of `observation_space`, and the infos.

        Raises:
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
        """
        with self.env.exclusive("reset"):
            self.env.begin_reset(seed, options)
            results = self.env.finish_all(self._timeout)
            self.env.fill_last(results)
            return self.env.batched(results), self.env.merged_infos(results)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply an action in every slot; one whose episode ended in the last step begins its next one instead.

        Args:
            actions: A batch of `action_space`.

        Returns:
            A batch of `observation_space`, float64 rewards, bool terminations and truncations, each `(num_envs,)`, and
            the infos.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
        """
        with self.env.exclusive("step"):
            self.env.begin_step(actions)
            results = self.env.finish_all(self._timeout)
            self.env.fill_last(results)
            batch = results.batch
            infos = self.env.merged_infos(results)
            return self.env.batched(results), batch.rewards, batch.terminations, batch.truncations, infos

    def send(self, actions: Any, slots: Any = None) -> None:
        """Apply actions to some slots and return at once; as `RemoteVectorEnv.send`."""
        self.env.send(actions, slots)

    def recv(self, at_least: int = 1) -> Received:
        """Wait until at least this many slots have answered, and return all that have; as `RemoteVectorEnv.recv`."""
        return self.env.recv(at_least)
