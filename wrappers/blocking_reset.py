"""Remote environments under the contract of Gymnasium's own vector environments."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorWrapper

from bridge.client.options import checked_timeout
from bridge.client.results import Results
from bridge.client.stepper import Received
from bridge.client.vector_env import RemoteVectorEnv, make_vec_remote
from bridge.encoding.tensors import Array
from bridge.errors import ResetNeededError, SettingError

from .transparent import Transparent

__all__ = ["BlockingReset", "make_blocking"]


class BlockingReset(VectorWrapper[Any, Any, Any, Any, Array]):
    """Makes `reset` and `step` wait until every slot has an observation (U-10), and gives batched arrays.

    What comes out is exactly what `gymnasium.vector.SyncVectorEnv` gives for the same environments, seeds, actions and
    autoreset mode, so that any trainer and any of Gymnasium's vector wrappers works on it unchanged. A remote that is
    lost shows as an ordinary truncation, with the last observation that it had; its slot goes on once it is back.

    Like Gymnasium's AsyncVectorEnv it has `step_async` and `step_wait`, `reset_async` and `reset_wait`, `call_async`
    and `call_wait`. A wait that times out leaves its call pending: the same wait can be called again and goes on. What
    comes late is never taken for the answer to something else.

    Args:
        env: What `make_vec_remote` returns.
        timeout: Seconds that a slot may be without an observation before `step` or `reset` raises; None: the
            environment's own timeout.
        autoreset_mode: When a slot whose episode ended begins its next one, an `AutoresetMode` or its value.
            NEXT_STEP: in the next `step`, whose action for it is not applied. SAME_STEP: in the same `step`;
            `infos["final_obs"]` and `infos["final_info"]` hold the end of the old one. DISABLED: when
            `reset(options={"reset_mask": …})` names it; until then `step` is refused.

    Raises:
        SettingError: `env` is another kind of environment, or there is no such mode.
    """

    env: RemoteVectorEnv

    def __init__(
        self,
        env: RemoteVectorEnv,
        timeout: float | None = None,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if not isinstance(env, (RemoteVectorEnv, Transparent)):
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        super().__init__(env)
        env.wait_for_lanes()
        try:
            self._mode = AutoresetMode(autoreset_mode)
        except ValueError:
            modes = ", ".join(f"{mode} ({mode.value!r})" for mode in AutoresetMode)
            raise SettingError(f"expected autoreset_mode to be one of {modes}, got {autoreset_mode!r}") from None
        self._own_timeout = timeout
        self._timeout = env.timeout if timeout is None else checked_timeout(timeout)
        self.metadata = {**env.metadata, "autoreset_mode": self._mode}
        self._finished: Array = np.zeros(env.num_envs, np.bool_)
        self._reset_mask: Array | None = None

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """When a finished slot is reset."""
        return self._mode

    @property
    def timeout(self) -> float:
        """Seconds that a slot may be without an observation."""
        return self._timeout

    @property
    def spec(self) -> EnvSpec | None:
        """Says how to make a second one: `gymnasium.make_vec(envs.spec)`."""
        spec = copy.deepcopy(self.env.spec)
        if spec is not None:
            spec.kwargs["autoreset_mode"] = self._mode.value
            if self._own_timeout is not None:
                spec.kwargs["blocking_timeout"] = self._own_timeout
        return spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        self.env.spec = spec

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`, and wait for it.

        Args:
            seed: An integer seeds slot i with `seed + i`; a list gives each slot's.
            options: For the environments' reset, and `reset_mask`, a bool array `(num_envs,)`. The dict stays as it is.

        Returns:
            A batch of `observation_space`, and the infos.

        Raises:
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        slot_options: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Send what `reset` sends; `reset_wait` gathers. `slot_options` are further options of each slot's own."""
        self.env.reset_async(seed=seed, options=options, slot_options=slot_options)
        mask = (options or {}).get("reset_mask")
        self._reset_mask = np.ones(self.num_envs, np.bool_) if mask is None else np.array(mask)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Return what `reset` returns, after `reset_async`.

        Args:
            timeout: Seconds to wait; None: as long as `reset` does.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; `reset_wait` can be called again.
            NothingPendingError: There was no `reset_async`.
        """
        results = self.wait_for_all("reset", timeout)
        return results.batched(), results.merged_infos()

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply an action in every slot; the autoreset mode says what becomes of one whose episode ended.

        Args:
            actions: A batch of `action_space`.

        Returns:
            A batch of `observation_space`, float64 rewards, bool terminations and truncations, each `(num_envs,)`, and
            the infos.

        Raises:
            InvalidActionError: An action is not in its space; nothing was sent.
            ResetNeededError: `reset` was never called; or in the mode DISABLED, a slot's episode has ended.
            RemoteTimeoutError: A slot has no observation after `timeout` seconds.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send what `step` sends; `step_wait` gathers."""
        if self._mode is AutoresetMode.DISABLED and self._finished.any():
            raise ResetNeededError(
                f"expected slots in an episode, but those of {np.flatnonzero(self._finished).tolist()} have ended; "
                "call reset(options={'reset_mask': terminations | truncations})"
            )
        self.env.step_async(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return what `step` returns, after `step_async`.

        Args:
            timeout: Seconds to wait; None: as long as `step` does.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; `step_wait` can be called again, or everything be reset.
            NothingPendingError: There was no `step_async`.
        """
        results = self.wait_for_all("step", timeout)
        batch = results.batch
        return results.batched(), batch.rewards, batch.terminations, batch.truncations, results.merged_infos()

    def wait_for_all(self, pending: Literal["reset", "step"], timeout: float | None = None) -> Results:
        """Wait for what `reset_async` or `step_async` asked for, and note whose episodes ended.

        Args:
            pending: The asynchronous call.
            timeout: Seconds; None: as long as `reset` and `step` wait.

        Raises:
            RemoteTimeoutError: A slot has no observation yet; this method can be called again.
            NothingPendingError: That call is not pending.
        """
        seconds = self._timeout if timeout is None else timeout
        same_step = pending == "step" and self._mode is AutoresetMode.SAME_STEP
        results = self.env.wait_for_all(pending, seconds, same_step=same_step)
        if pending == "step":
            self._finished = results.ended
        elif self._reset_mask is not None:
            self._finished = self._finished & ~self._reset_mask
        return results

    def send(self, actions: Any, slots: Any = None) -> None:
        """Apply actions to some slots and return at once; as `RemoteVectorEnv.send`."""
        self.env.send(actions, slots)

    def recv(self, at_least: int = 1) -> Received:
        """Wait until at least this many slots have answered, and return all that have; as `RemoteVectorEnv.recv`."""
        return self.env.recv(at_least)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a public method of every environment, or read a public attribute; return a result a slot."""
        return self.env.call(name, *args, **kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send what `call` sends; `call_wait` gathers."""
        self.env.call_async(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of `call_async`; after a timeout it can be called again."""
        return self.env.call_wait(timeout)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read a public attribute of every environment."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set a public attribute: a list or tuple gives each slot's value, anything else that of all."""
        self.env.set_attr(name, values)


def make_blocking(
    num_envs: int = 1,
    *,
    urls: str | Sequence[str] | None = None,
    url: str | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    blocking_timeout: float | None = None,
    **kwargs: Any,
) -> BlockingReset:
    """Make what `gymnasium.make_vec("bridge:bridge/Remote-v0", …)` returns.

    Args:
        num_envs: The number of slots; 1 where as many are wanted as the URLs give.
        urls: As for `make_vec_remote`.
        url: One URL, as for `make_remote`; give this or `urls`.
        autoreset_mode: As for `BlockingReset`.
        blocking_timeout: The `timeout` of `BlockingReset`.
        kwargs: As for `make_vec_remote`.

    Raises:
        SettingError: Both or neither of `urls` and `url` were given.
    """
    if (urls is None) == (url is None):
        raise SettingError(f"expected urls=[…] or url=…, got urls={urls!r} and url={url!r}")
    target = urls if urls is not None else str(url)
    env = make_vec_remote(target, num_envs=None if num_envs == 1 else num_envs, **kwargs)
    return BlockingReset(env, blocking_timeout, autoreset_mode=autoreset_mode)
