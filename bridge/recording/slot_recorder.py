"""Record the slots of a remote vector environment, each as a separate environment.

The caller decides what is recorded: `Recorder` passes everything, an evaluation only the episodes that its policy
plays.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.client.envs.vector_env import slots_of
from bridge.core.encoding.infos import ACTION
from bridge.core.encoding.message_form import Origin
from bridge.core.ownership import end_apart
from bridge.core.worlds.environment import kept
from bridge.recording.facts import facts_of
from bridge.recording.record import Recording
from bridge.recording.rows import DISCARDED, Encoder, Kind, Row
from bridge.recording.tape import Tape, branch_points, size_of
from bridge.recording.writer import Journal

__all__ = ["SlotRecorder"]

_OF_VECTORS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""The keywords in a vector environment's spec that one environment's does not have."""


class SlotRecorder:
    """A recording on the client, with one stream per slot.

    Observations, actions and rewards are copied, because they are the caller's, and rows are encoded later.

    Args:
        envs: The result of `make_vec_remote`, wrapped or not.
        record: The folder, and whether to record observations.

    Raises:
        SettingError: The folder cannot be written, or `envs` is another kind of environment.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], record: Recording) -> None:
        world = slots_of(envs).world_info()
        self._journal = Journal(record)
        self.run = self._journal.run
        """The name of the recording."""
        # Each slot is recorded as one environment: a replay makes it without the vector's keywords.
        kwargs = (world.spec or {}).get("kwargs") or {}
        kwargs = {key: value for key, value in kwargs.items() if key not in _OF_VECTORS}
        if world.render_mode:
            kwargs["render_mode"] = world.render_mode
        pair = (world.observation_space, world.action_space)
        self._action_space, self._batched = world.action_space, batch_space(world.action_space, envs.num_envs)
        title = world.env_id or "remote"
        made_by = {"env_id": world.env_id or "", "title": title, "entry_point": "", "kwargs": kwargs}
        rest: Any = {"versions": {}, "recorded_by": "client", "fps": world.fps}  # the server's versions are unknown
        facts = [
            facts_of(self._journal, "env", pair, made_by, world.reward_space, **rest) for _ in range(envs.num_envs)
        ]
        self._tapes = [Tape(self._journal, Encoder(each)) for each in facts]
        self._running: set[int] = set()
        """The slots with a running episode."""
        self._open = True
        """True while it records."""

    def reset(self, slot: int, observation: Any, seed: int | None = None, options: Any = None) -> None:
        """Record the first observation of a slot's next episode."""
        self._running.add(slot)
        self._add(slot, Kind.RESET, observation=kept(observation), seed=seed, options=options)

    def moment(self, slot: int) -> str:
        """Return a name for the newest reset or step of a slot, for a branch that may continue it."""
        return self._tapes[slot].moment

    def branch(self, slot: int, observation: Any, origin: Origin | None) -> None:
        """Record the first observation of an episode that continues another one.

        Args:
            slot: The slot.
            observation: The observation.
            origin: The point at which a slot was there before; None: unknown.
        """
        self._running.add(slot)
        if origin is not None:
            # If there are several recordings, prefer our own: it contains the other episode.
            moments = sorted(origin.moment.split(), key=lambda moment: not moment.startswith(f"{self.run}-"))
            origin = dataclasses.replace(origin, moment=moments[0] if moments else "")
        points = branch_points([(0, origin)], 1)
        self._add(slot, Kind.RESET, observation=kept(observation), branch=points)

    def step(
        self, slot: int, by: str, action: Any, observation: Any, reward: Any, *, terminated: bool, truncated: bool
    ) -> None:
        """Record a step; `by` is the player, such as `agent` or `person:Ann`."""
        if terminated or truncated:
            self._running.discard(slot)
        self._add(slot, Kind.STEP, by=by, action=kept(action), observation=kept(observation), reward=kept(reward),
                  terminated=terminated, truncated=truncated)  # fmt: skip

    def fail(self, slot: int, by: str, action: Any, error: str, *, discards: bool = False) -> None:
        """Record a step without an outcome, which ends the episode; do nothing if none has begun.

        Args:
            slot: The slot.
            by: The player.
            action: The action.
            error: The reason.
            discards: True if readers of the recording must ignore the episode.
        """
        # Without an episode, the row would belong to the slot's previous episode, and end it.
        if slot in self._running:
            self._running.discard(slot)
            told = DISCARDED if discards else None
            self._add(slot, Kind.FAILED_STEP, by=by, action=kept(action), error=error, options=told)

    def _add(self, slot: int, kind: int, **fields: Any) -> None:
        row = Row(kind, time.monotonic() + self._journal.epoch, **fields)
        self._tapes[slot].add(row, size_of(row.observation))

    def interventions(self, infos: Mapping[str, Any]) -> dict[int, tuple[str, Any]]:
        """Return the players that acted instead of the own one, with the executed actions, by row of the infos.

        Args:
            infos: A dict of arrays with masks, as returned by a vector environment.
        """
        mask = infos.get(f"_{ACTION}")
        if mask is None:  # the usual case
            return {}
        names, actions = infos.get("intervened_by"), list(iterate(self._batched, infos[ACTION]))
        found: dict[int, tuple[str, Any]] = {}
        for row in np.flatnonzero(mask).tolist():
            # An environment may have its own info of this name, with any value.
            if self._action_space.contains(actions[row]):
                name = None if names is None else names[row]
                found[row] = f"person:{name}" if isinstance(name, str) and name else "person", actions[row]
        return found

    def skip(self) -> None:
        """Leave out a reset or a step of all slots, for example because its results are lost."""
        for tape in self._tapes:
            tape.skip()

    def close(self) -> None:
        """Finish the recording."""
        self._open = False
        _end(self._tapes, self._journal)

    def __del__(self) -> None:
        if self.__dict__.get("_open"):  # False if it was closed, or __init__ raised
            end_apart(functools.partial(_end, self._tapes, self._journal))


def _end(tapes: Sequence[Tape], journal: Journal) -> None:
    """Finish a recording. May be called twice."""
    for tape in tapes:
        tape.end()
    journal.close()
