"""A vector of PERLERT slots, in one thread: each goes at its own pace, and none waits for another one's reset."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import selectors
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from bridge.errors import ClosedError, RemoteError, ResetNeededError, SettingError
from bridge.perlert.client import PerlertEnv

__all__ = ["PerlertVectorEnv", "SlotState"]


class SlotState(enum.IntEnum):
    """Where a slot is; `infos["slot_state"]` holds these numbers, those of `RemoteVectorEnv`."""

    CONNECTING = 0
    RESETTING = 1
    RUNNING = 2
    LOST = 3


@dataclasses.dataclass
class _Results:
    """What a call returns, by slot."""

    observations: list[Any]
    infos: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)


class PerlertVectorEnv(VectorEnv[Any, Any, Any]):
    """Slots of one or several PERLERT servers as a `gymnasium.vector.VectorEnv`.

    Observations are a tuple with an entry a slot, None while it waits for its next run; its reward is then 0, both its
    flags False, and its action is not sent. A slot whose episode ended goes for the next run by itself. `step` never
    waits for a slot that is between its runs, so agents of one world can be slots of one vector.

    Args:
        urls: A URL for each slot, or one for all of `agents`.
        agents: The slots' keys; None: the URLs', or the first open ones.
        settings: Keywords of `PerlertEnv`.

    Raises:
        SettingError: The slots' spaces differ, or `agents` does not fit `urls`.
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
        self._selector = selectors.DefaultSelector()
        try:
            for url, agent in zip(urls, agents, strict=True):
                self.envs.append(PerlertEnv(url, agent=agent, **settings))
            first = self.envs[0]
            for env in self.envs[1:]:
                if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                    raise SettingError(
                        f"expected the same spaces in all slots, got {env.observation_space} and {env.action_space} at "
                        f"{env.url}, {first.observation_space} and {first.action_space} at {first.url}"
                    )
        except BaseException:
            self.close()
            raise
        for env in self.envs:
            self._selector.register(env, selectors.EVENT_READ)
        self.num_envs = len(self.envs)
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self._states = [SlotState.CONNECTING] * self.num_envs
        self._ended = [False] * self.num_envs

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("expected an open environment, got a closed one; make a new one")

    def _begin(self, slot: int, results: _Results) -> None:
        """Let a slot go for its next run."""
        try:
            self.envs[slot].begin_reset()
            self._states[slot] = SlotState.RESETTING
        except RemoteError as error:
            self._states[slot] = SlotState.LOST
            results.errors[slot] = str(error)

    def _look(self, slot: int, results: _Results) -> None:
        """Deliver the first observation of a slot whose run has begun."""
        try:
            begun = self.envs[slot].poll_reset()
        except RemoteError as error:
            results.errors[slot] = str(error)
            self._begin(slot, results)  # another deadline
            return
        if begun is not None:
            results.observations[slot], results.infos[slot] = begun
            self._states[slot] = SlotState.RUNNING

    def _infos(self, results: _Results) -> dict[str, Any]:
        infos: dict[str, Any] = {"slot_state": np.array(self._states, np.int64)}
        for slot, info in results.infos.items():
            infos = self._add_info(infos, info, slot)
        if results.errors:
            infos["error"] = np.array([results.errors.get(slot) for slot in range(self.num_envs)], object)
            infos["_error"] = np.array([slot in results.errors for slot in range(self.num_envs)])
        return infos

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Let every slot, or those of `options["reset_mask"]`, go for its next run, and return at once.

        Returns:
            A tuple of observations, None for slots whose run has not begun; and the infos.
        """
        self._check_open()
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, np.bool_)))
        if options or mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise SettingError(
                f"expected no options but reset_mask, a bool array ({self.num_envs},), got {options or mask!r}"
            )
        results = _Results([None] * self.num_envs)
        slots = np.flatnonzero(mask).tolist()
        for slot in slots:
            self._ended[slot] = False
            self._begin(slot, results)
        for slot in slots:
            if self._states[slot] is SlotState.RESETTING:
                self._look(slot, results)
        return tuple(results.observations), self._infos(results)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Act in the slots that are in a run and wait for the next step of each; the others are looked after.

        When no slot is in a run, it waits for one to begin, at most a tenth of a second.

        Returns:
            A tuple of observations or None, float64 rewards, bool terminations and truncations, each `(num_envs,)`; and
            the infos.

        Raises:
            ResetNeededError: `reset` was never called.
            InvalidActionError: An action is not in its space.
        """
        self._check_open()
        if all(state is SlotState.CONNECTING for state in self._states):
            raise ResetNeededError("expected reset() before the first step()")
        results = _Results([None] * self.num_envs)
        rewards, flags = np.zeros(self.num_envs), np.zeros((2, self.num_envs), np.bool_)
        waiting = set()
        for slot, action in enumerate(iterate(self.action_space, actions)):
            if self._ended[slot] or self._states[slot] is SlotState.LOST:
                self._ended[slot] = False
                self._begin(slot, results)
            elif self._states[slot] is SlotState.RUNNING:
                self.envs[slot].begin_step(action)
                waiting.add(slot)
        idle_until = time.monotonic() + 0.1
        while True:
            for slot in sorted(waiting):
                try:
                    stepped = self.envs[slot].poll_step()
                except RemoteError as error:
                    results.errors[slot] = str(error)
                    flags[1, slot], self._states[slot] = True, SlotState.LOST
                    waiting.discard(slot)
                    continue
                if stepped is not None:
                    waiting.discard(slot)
                    results.observations[slot], rewards[slot], *ends, results.infos[slot] = stepped
                    flags[:, slot], self._ended[slot] = ends, any(ends)
            for slot, state in enumerate(self._states):
                if state is SlotState.RESETTING:
                    self._look(slot, results)
            any_seen = any(seen is not None for seen in results.observations)
            if not waiting and (any_seen or time.monotonic() >= idle_until):
                return tuple(results.observations), rewards, *flags, self._infos(results)
            until = idle_until if not waiting else time.monotonic() + 0.5
            wake = min(until, *(env.wake() for env in self.envs))
            self._selector.select(max(0.0, wake - time.monotonic()))

    def close_extras(self, **kwargs: Any) -> None:
        """Leave all slots and close their sockets."""
        self._selector.close()
        for env in self.envs:
            with contextlib.suppress(RemoteError):
                env.close()
