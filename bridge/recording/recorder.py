"""A recorder on the client, for servers that are not ours: the same files as a server's own recording."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from bridge.client.vector_env import RemoteVectorEnv, slots_of
from bridge.encoding.tensors import Array
from bridge.errors import SettingError, UsageError
from bridge.facade.record import Recording
from bridge.finalizers import end_apart
from bridge.gymnasium_versions import BatchWrapper
from bridge.recording.facts import facts_of
from bridge.recording.rows import Encoder, Kind, Row
from bridge.recording.tape import Tape, size_of
from bridge.recording.writer import Journal
from bridge.worlds.environment import kept

__all__ = ["Recorder"]


_OF_VECTORS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""The keywords in the spec of a vector environment beside those of one environment."""


def _parts(space: Space[Any], batch: Any) -> list[Any]:
    """Return each slot's part of a batch, a copy: the arrays are the caller's, and rows are encoded later."""
    return kept(list(iterate(space, batch)))  # type: ignore[no-any-return]


class _Slot:
    """The state of a slot."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.running = False
        """True if it is in an episode."""
        self.seed: int | None = None
        self.options: Any = None


class Recorder(BatchWrapper):
    """Records what goes through remote environments, as far as the client sees it.

    Each slot is an environment of the recording. Where a server can record itself (`serve_gym(record=…)`), that sees
    more: what other clients do, and in real time every frame.

    Examples:
        >>> import tempfile
        >>> from bridge import Recorder, make_vec_remote, serve_gym
        >>> from bridge.wrappers import BlockingReset
        >>> folder = tempfile.mkdtemp()
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = Recorder(BlockingReset(make_vec_remote(server.url, num_envs=2)), folder)
        ...     observations, infos = envs.reset(seed=0)
        ...     observations, *_ = envs.step(envs.action_space.sample())
        ...     envs.close()

    Args:
        env: What `make_vec_remote` returns, or `BlockingReset` around it.
        folder: Where the files go; made where there is none.
        observations: Whether observations are recorded; otherwise their hashes are.
        player: Who acts: `agent` or `person`, with a name as in `agent:PPO`.
        max_bytes: The most bytes of the recording, after which its oldest file is deleted; None: no limit.

    Raises:
        SettingError: The folder cannot be written, or `env` is another kind of environment.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Array],
        folder: str | os.PathLike[str],
        *,
        observations: bool = False,
        player: str = "agent",
        max_bytes: int | None = None,
    ) -> None:
        base = env.unwrapped
        if not isinstance(base, RemoteVectorEnv):
            raise SettingError(f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}")
        super().__init__(env)
        self._journal = Journal(Recording(folder, observations, max_bytes=max_bytes))
        self.run = self._journal.run
        """The name of the recording."""
        self._player = player
        self._bare = env.observation_space if env is base else None
        self._same_step = env is not base and env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        self._slots = [_Slot(self._tape(base)) for _ in range(env.num_envs)]
        self._given: Any = None
        self._untold = False
        """True if results of a reset or a step have not been told."""
        self._open = True
        """True if the recording goes on."""

    def _tape(self, base: RemoteVectorEnv) -> Tape:
        """Return what records a slot."""
        world = slots_of(base).pool.members.world_info()
        # Each slot is recorded as one environment: a replay makes it without the keywords of the vector.
        kwargs = (world.spec or {}).get("kwargs") or {}
        kwargs = {key: value for key, value in kwargs.items() if key not in _OF_VECTORS}
        if world.render_mode:
            kwargs["render_mode"] = world.render_mode
        pair = (base.single_observation_space, base.single_action_space)
        made_by = {"env_id": world.env_id or "", "title": world.env_id or "remote", "entry_point": "", "kwargs": kwargs}
        rest: Any = {"versions": {}, "recorded_by": "client", "fps": world.fps}  # the server's versions are not known
        return Tape(self._journal, Encoder(facts_of(self._journal, "env", pair, made_by, world.reward_space, **rest)))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, as the environment does."""
        # The mask says which slots are reset; to an environment it is no option.
        mask = (options or {}).get("reset_mask")
        rest = {key: kept(value) for key, value in (options or {}).items() if key != "reset_mask"} or None
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else np.asarray(mask, np.bool_)
        with self._sending():
            observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        errors = self._errors_of(infos)
        for index, (slot, observation) in enumerate(zip(self._slots, self._split(observations), strict=True)):
            if chosen[index]:
                slot.running, slot.options = False, rest
                slot.seed = seed[index] if isinstance(seed, Sequence) else None if seed is None else int(seed) + index
                if observation is not None and not errors[index]:
                    self._begin(index, observation)
        return observations, infos

    def _errors_of(self, infos: dict[str, Any]) -> list[str]:
        """Return for each slot why it is lost; empty: it is not. A lost slot's observation is an old one or None."""
        # An environment may have an info of this name, too, of another kind.
        told: Any = infos.get("error")
        told = told if np.ndim(told) == 1 else [None] * self.num_envs
        return [error if isinstance(error, str) else "" for error in told]

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Apply actions, as the environment does."""
        given = _parts(self.env.action_space, actions)
        with self._sending(given):
            result = self.env.step(actions)
        return self._record(given, result)

    def step_async(self, actions: Any) -> None:
        """Send the actions and return at once, as the environment does; `step_wait` returns the results."""
        given, waiting = _parts(self.env.action_space, actions), cast(Any, self.env)
        with self._sending(given):
            waiting.step_async(actions)
        self._given, self._untold = given, True

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Return what `step` returns, after `step_async`."""
        result = cast(Any, self.env).step_wait()
        self._untold = False
        return self._record(self._given, result)

    @contextlib.contextmanager
    def _sending(self, given: Any = None) -> Iterator[None]:
        """Send a reset or a step. Where the call before it returned no results, leave that out of the recording.

        Args:
            given: The actions of a step. Where it raises, `step_wait` may still tell its results.
        """
        try:
            yield
        except UsageError:  # nothing was sent
            raise
        except BaseException:
            self._given, self._untold = given, True
            raise
        if self._untold:
            self._untold = False
            for slot in self._slots:
                slot.tape.skip()

    def _record(self, given: list[Any], result: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Record a step, and return its results."""
        observations, rewards, terminations, truncations, infos = result
        finals = infos.get("final_obs") if self._same_step else None
        errors = self._errors_of(infos)
        for index, observation in enumerate(self._split(observations)):
            slot, ended = self._slots[index], bool(terminations[index] or truncations[index])
            error = errors[index] if truncations[index] or not slot.running else ""  # else the environment's own
            # After an end, the next step begins the slot's episode: its observation is that of a reset, and its action
            # was ignored.
            if not slot.running:
                if observation is not None and not ended and not error:
                    self._begin(index, observation)
                continue
            # In the mode SAME_STEP the observation is the first of the next episode already.
            last = kept(finals[index]) if finals is not None and ended else observation
            # A slot that lost its server has nothing to tell until it is back.
            if last is None and not error:
                continue
            kind, seen = (Kind.FAILED_STEP, None) if error else (Kind.STEP, last)
            row = Row(
                kind, time.time(), self._player, given[index], seen, kept(rewards[index]), bool(terminations[index]),
                bool(truncations[index]), error=error,
            )  # fmt: skip
            slot.tape.add(row, size_of(seen))
            slot.running = not (ended or error)
            if finals is not None and ended and observation is not None and not error:
                self._begin(index, observation)
        return observations, rewards, terminations, truncations, infos

    def _begin(self, index: int, observation: Any) -> None:
        """Record the first observation of an episode."""
        slot = self._slots[index]
        row = Row(Kind.RESET, time.time(), observation=observation, seed=slot.seed, options=slot.options)
        slot.tape.add(row, size_of(observation))
        slot.running, slot.seed, slot.options = True, None, None

    def _split(self, observations: Any) -> list[Any]:
        """Return each slot's observation, a copy; None: it has none."""
        return kept(list(observations)) if self._bare is not None else _parts(self.env.observation_space, observations)

    def send(self, actions: Any, slots: Any = None) -> None:
        """Refuse: steps of some slots are not recorded."""
        raise SettingError("Recorder takes step(), not send() and recv(); have the server record: serve_gym(record=…)")

    recv = send

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and write the recording to its end."""
        super().close(**kwargs)
        self._open = False
        _end(self._slots, self._journal)

    def __del__(self) -> None:
        if self.__dict__.get("_open"):  # else it was closed, or __init__ has raised
            end_apart(functools.partial(_end, self._slots, self._journal))


def _end(slots: Sequence[_Slot], journal: Journal) -> None:
    """Write a recording to its end. May be called twice."""
    for slot in slots:
        slot.tape.end()
    journal.close()
