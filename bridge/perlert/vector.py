"""A vector of PERLERT slots that run independently: no slot waits for another one's reset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.client.slots.resets import check_mask
from bridge.core.client.slots.slot import SlotState
from bridge.errors import InvalidActionError, RemoteError, ResetNeededError, SettingError
from bridge.perlert.client import PerlertEnv

__all__ = ["PerlertVectorEnv"]

_IDLE = 0.1
"""Seconds for which `step` waits for a run to begin if no slot is in one."""


class PerlertVectorEnv(VectorEnv[Any, Any, Any]):
    """Slots of one or several PERLERT servers as a `gymnasium.vector.VectorEnv`, with a thread each.

    Observations are a tuple with one entry per slot, None while the slot waits for its next run. Such a slot has reward
    0 and both flags False, and its action is not sent. A slot whose episode ended waits for its next run automatically.
    `step` never waits for a slot between two runs, so agents of one world can be slots of one vector.
    `infos["slot_state"]` contains the state of each slot, a `SlotState` as in `RemoteVectorEnv`, and `infos["error"]`
    the reason of a failure.

    Args:
        urls: One URL per slot, or one URL for all of `agents`.
        agents: The slots' keys; None: those of the URLs, or the first free ones.
        settings: Keywords of `PerlertEnv`.

    Raises:
        SettingError: The slots' spaces differ, or `agents` does not match `urls`.
    """

    def __init__(
        self, urls: str | Sequence[str], *, agents: Sequence[str | None] | None = None, **settings: Any
    ) -> None:
        if isinstance(urls, str):
            urls = [urls] * (len(agents) if agents is not None else 1)
        agents = list(agents) if agents is not None else [None] * len(urls)
        if not urls or len(agents) != len(urls):
            raise SettingError(f"expected as many agents as URLs, one or more, got {len(agents)} and {len(urls)}")
        self.envs: list[PerlertEnv] = []
        # One thread per slot, because `PerlertEnv.reset` blocks until the next run.
        self._threads = ThreadPoolExecutor(len(urls), "bridge-perlert-slot")
        try:
            for url, agent in zip(urls, agents, strict=True):
                self.envs.append(env := PerlertEnv(url, agent=agent, **settings))
                first = self.envs[0]
                if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                    raise SettingError(
                        f"expected the same spaces in all slots, got {env.observation_space} and {env.action_space} at "
                        f"{env.url}, {first.observation_space} and {first.action_space} at {first.url}"
                    )
        except BaseException:
            self.close()
            raise
        self.num_envs = len(self.envs)
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self._states = [SlotState.CONNECTING] * self.num_envs
        self._calls: dict[int, Future[Any]] = {}
        """The current call of each slot: a step, or a reset, which may last for several steps of the others."""

    def _begin(self, slots: Iterable[int]) -> None:
        """Begin resets of slots, except of those that are resetting already."""
        for env in self.envs:
            env.check_open()
        for slot in set(slots) - self._calls.keys():
            self._states[slot] = SlotState.RESETTING
            self._calls[slot] = self._threads.submit(self.envs[slot].reset)

    def _collect(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Return the results of the calls that have ended, in the form that `step` returns."""
        observations: list[Any] = [None] * self.num_envs
        rewards, flags = np.zeros(self.num_envs), np.zeros((2, self.num_envs), np.bool_)
        infos: dict[str, Any] = {}
        ended = {slot: call for slot, call in self._calls.items() if call.done()}
        self._calls = {slot: call for slot, call in self._calls.items() if slot not in ended}
        for slot, call in ended.items():
            was_reset = self._states[slot] is SlotState.RESETTING
            try:
                observations[slot], *rest, info = call.result()
                self._states[slot] = SlotState.RUNNING
                if rest:
                    rewards[slot], *flags[:, slot] = rest
            except RemoteError as error:
                info = {"error": str(error)}
                # The run did not start in time, maybe because others are not ready. The slot waits again, and the other
                # slots get no exception.
                if was_reset:
                    self._begin([slot])  # with a new deadline
                else:
                    self._states[slot], flags[1, slot] = SlotState.LOST, True
            infos = self._add_info(infos, info, slot)
        infos["slot_state"] = np.array(self._states, np.int64)
        return tuple(observations), rewards, *flags, infos

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the reset of every slot, or of those in `options["reset_mask"]`, and return at once.

        Returns:
            A tuple of observations, None for slots whose run has not begun, and the infos.
        """
        given = dict(options or {})
        mask = given.pop("reset_mask", np.ones(self.num_envs, np.bool_))
        check_mask(mask, self.num_envs)
        if given:
            raise SettingError(f"expected no options but reset_mask, because PERLERT carries none, got {given!r}")
        slots = np.flatnonzero(mask).tolist()
        # Steps of a call that Ctrl-C interrupted are still running.
        steps = [slot for slot in slots if slot in self._calls and self._states[slot] is SlotState.RUNNING]
        wait([self._calls.pop(slot) for slot in steps])
        self._begin(slots)
        observations, *_, infos = self._collect()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Act in the slots that are in a run, and wait for their next steps; check on the resets of the others.

        If no slot is in a run, wait at most a tenth of a second for one to begin.

        Returns:
            A tuple of observations or None, float64 rewards, bool terminations and truncations, each `(num_envs,)`, and
                the infos.

        Raises:
            ResetNeededError: `reset` was never called.
            InvalidActionError: An action is not in its space, or the number of actions is wrong; none was sent.
        """
        if all(state is SlotState.CONNECTING for state in self._states):
            raise ResetNeededError("expected reset() before the first step()")
        running = [slot for slot, state in enumerate(self._states) if state is SlotState.RUNNING]
        playing = {slot for slot in running if self.envs[slot].in_episode}
        chosen = list(iterate(self.action_space, actions))
        if len(chosen) != self.num_envs:
            raise InvalidActionError(f"expected {self.num_envs} actions, got {len(chosen)}")
        for slot in playing:
            # Checked before any slot acts: the results of other slots' steps would be lost with the exception.
            self.envs[slot].action_text(chosen[slot])
        # Slots whose episode ended in the last step, and lost ones, begin a reset.
        self._begin(set(range(self.num_envs)) - playing)
        # Not if Ctrl-C interrupted the last call and its step still runs: the reward of that step would be lost.
        for slot in playing - self._calls.keys():
            self._calls[slot] = self._threads.submit(self.envs[slot].step, chosen[slot])
        if playing:
            # Each call is limited by its own `timeout`.
            wait([self._calls[slot] for slot in playing])
        else:
            wait(self._calls.values(), _IDLE, FIRST_COMPLETED)
        return self._collect()

    def close_extras(self, **kwargs: Any) -> None:
        """Leave all slots and close their sockets."""
        for env in self.envs:
            with contextlib.suppress(RemoteError):
                env.close()
        self._threads.shutdown()
