"""Records the slots of a vector environment of remotes, each as an environment of its own.

What is recorded is what the caller tells: `Recorder` tells all that goes through it, an evaluation only the episodes
that its policy plays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.client.envs.vector_env import slots_of
from bridge.core.encoding.infos import ACTION
from bridge.core.ownership import end_apart
from bridge.core.worlds.environment import kept
from bridge.recording.facts import facts_of
from bridge.recording.record import Recording
from bridge.recording.rows import DISCARDED, Encoder, Kind, Row
from bridge.recording.tape import Tape, size_of
from bridge.recording.writer import Journal

__all__ = ["SlotRecorder"]

_OF_VECTORS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""The keywords in the spec of a vector environment beside those of one environment."""


class SlotRecorder:
    """A recording on the client, with a stream for each slot.

    Observations, actions and rewards are copied: they are the caller's, and rows are encoded later.

    Args:
        envs: What `make_vec_remote` returns, wrapped or not.
        record: Where to, and whether observations are recorded.

    Raises:
        SettingError: The folder cannot be written, or `envs` is another kind of environment.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], record: Recording) -> None:
        world = slots_of(envs).world_info()
        self._journal = Journal(record)
        self.run = self._journal.run
        """The name of the recording."""
        # Each slot is recorded as one environment: a replay makes it without the keywords of the vector.
        kwargs = (world.spec or {}).get("kwargs") or {}
        kwargs = {key: value for key, value in kwargs.items() if key not in _OF_VECTORS}
        if world.render_mode:
            kwargs["render_mode"] = world.render_mode
        pair = (world.observation_space, world.action_space)
        self._action_space, self._batched = world.action_space, batch_space(world.action_space, envs.num_envs)
        title = world.env_id or "remote"
        made_by = {"env_id": world.env_id or "", "title": title, "entry_point": "", "kwargs": kwargs}
        rest: Any = {"versions": {}, "recorded_by": "client", "fps": world.fps}  # the server's versions are not known
        facts = [
            facts_of(self._journal, "env", pair, made_by, world.reward_space, **rest) for _ in range(envs.num_envs)
        ]
        self._tapes = [Tape(self._journal, Encoder(each)) for each in facts]
        self._running: set[int] = set()
        """The slots in whose episodes a step may be recorded."""
        self._open = True
        """True if the recording goes on."""

    def reset(self, slot: int, observation: Any, seed: int | None = None, options: Any = None) -> None:
        """Record the first observation of a slot's next episode."""
        self._running.add(slot)
        self._add(slot, Kind.RESET, observation=kept(observation), seed=seed, options=options)

    def step(
        self, slot: int, by: str, action: Any, observation: Any, reward: Any, *, terminated: bool, truncated: bool
    ) -> None:
        """Record a step; `by` is who acted, such as `agent` or `person:Ann`."""
        if terminated or truncated:
            self._running.discard(slot)
        self._add(slot, Kind.STEP, by=by, action=kept(action), observation=kept(observation), reward=kept(reward),
                  terminated=terminated, truncated=truncated)  # fmt: skip

    def fail(self, slot: int, by: str, action: Any, error: str, *, discards: bool = False) -> None:
        """Record that a step has no outcome, which ends the episode; nothing where none has begun.

        Args:
            slot: The slot.
            by: Who acted.
            action: The action.
            error: The reason.
            discards: Whether the episode is left out when the recording is read.
        """
        # Without this, the row would belong to the slot's episode before, and end that.
        if slot in self._running:
            self._running.discard(slot)
            told = DISCARDED if discards else None
            self._add(slot, Kind.FAILED_STEP, by=by, action=kept(action), error=error, options=told)

    def _add(self, slot: int, kind: int, **fields: Any) -> None:
        row = Row(kind, time.monotonic() + self._journal.epoch, **fields)
        self._tapes[slot].add(row, size_of(row.observation))

    def interventions(self, infos: Mapping[str, Any]) -> dict[int, tuple[str, Any]]:
        """Return who acted in the player's place in a step, and the action that was executed, by row of the infos.

        Args:
            infos: Arrays with masks, as a vector environment returns them.
        """
        mask = infos.get(f"_{ACTION}")
        if mask is None:  # as nearly always
            return {}
        names, actions = infos.get("intervened_by"), list(iterate(self._batched, infos[ACTION]))
        found: dict[int, tuple[str, Any]] = {}
        for row in np.flatnonzero(mask).tolist():
            # An environment may have an info of this name by itself, with anything in it.
            if self._action_space.contains(actions[row]):
                name = None if names is None else names[row]
                found[row] = f"person:{name}" if isinstance(name, str) and name else "person", actions[row]
        return found

    def skip(self) -> None:
        """Leave a reset or a step of all slots out, as one whose results are lost."""
        for tape in self._tapes:
            tape.skip()

    def close(self) -> None:
        """Write the recording to its end."""
        self._open = False
        _end(self._tapes, self._journal)

    def __del__(self) -> None:
        if self.__dict__.get("_open"):  # else it was closed, or __init__ has raised
            end_apart(functools.partial(_end, self._tapes, self._journal))


def _end(tapes: Sequence[Tape], journal: Journal) -> None:
    """Write a recording to its end. May be called twice."""
    for tape in tapes:
        tape.end()
    journal.close()
