"""Saves and restores the environments of one world, in their process, on request of `bridge.states.handler`.

States stay in the process of the environment. Worlds in the server's process share their states, so that a state of one
world can be restored in another. An isolated world keeps its states in its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from bridge.core.encoding import values
from bridge.core.encoding.message_form import Origin
from bridge.core.worlds.messages import MessagePart, Stage
from bridge.errors import Code, RequestError
from bridge.states.check import single
from bridge.states.graph import EnvSnapshot, copied, restore, take
from bridge.states.history import History, Ledger, Track
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError
from bridge.states.replay import ReplayState, StateReplay, replayed

__all__ = ["StatesPart", "drop", "forget", "left"]


_SLICE = 0.05
"""The length of a slice of a replay, in seconds."""


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A state, by copy or by replay, with the observation and the info of that moment."""

    state: EnvSnapshot | ReplayState
    result: tuple[Any, ...]
    origin: Origin
    """Where its episode was, for recordings."""


@dataclasses.dataclass
class _Job:
    """A restore of one environment."""

    saved: _Saved
    lane: int
    seed: int | None
    replay: StateReplay | None = None
    """The running replay; None: it has not begun, or the state is a copy."""


_stores: dict[str, dict[str, _Saved]] = {}
"""The states by identifier, for each start of a server."""
_ledgers: dict[tuple[str, int], Ledger] = {}
"""The memory accounts of clients, by start of the server and number of the client."""


def left(start: str, client: int) -> None:
    """Stop keeping actions for a client that has left."""
    ledger = _ledgers.pop((start, client), None)
    if ledger is not None:
        ledger.gone = True


def forget(start: str) -> None:
    """Delete all states of a start of a server."""
    _stores.pop(start, None)
    for key in [key for key in _ledgers if key[0] == start]:
        left(*key)


def drop(start: str, identifiers: Iterable[str]) -> None:
    """Delete states of this process."""
    store = _stores.get(start, {})
    for identifier in identifiers:
        store.pop(identifier, None)


class StatesPart(MessagePart):
    """Saves and restores the environments of one world.

    Args:
        stage: Gives access to the environments.
        start: Identifies the start of the server.
    """

    def __init__(self, stage: Stage, start: str) -> None:
        super().__init__(stage)
        self._start = start
        self._states = _stores.setdefault(start, {})
        self._histories: dict[int, History] = {}
        self._jobs: list[_Job] = []
        """The jobs of the current restore."""
        self._limits: tuple[int, ...] = ()
        """The client and its limits, as in `_keep`."""

    def answer(self, request: bytes) -> bytes:
        """Answer a request of the handler: the name of a method and its arguments."""
        name, *arguments = values.decode(request)
        return values.encode(getattr(self, f"_{name}")(*arguments))

    def _describe(self, whole: bool) -> Any:
        """Return a description of the environments.

        Args:
            whole: True: also return the pickled function that makes another one, or why it cannot be pickled.
        """
        env = self._one(0)
        if not whole:
            return [_title(env, self.stage), b"", ""]
        try:
            return [_title(env, self.stage), cloudpickle.dumps(self._make_one()), ""]
        except Exception as error:  # pickling a user's objects may raise anything
            return [_title(env, self.stage), b"", f"what makes it cannot be sent to a process of its own: {error!r}"]

    @property
    def _together(self) -> bool:
        """True if one call steps all lanes: in a batched simulator, or in wrappers around all lanes."""
        facts = self.stage.facts
        return facts.num_envs is not None and not facts.steps_lanes

    def _make_one(self) -> Callable[[], Any]:
        """Return a function that makes another environment of the kind that is copied."""
        return self.stage.make if self._together else single(self.stage.make)

    def _keep(self, client: int, max_steps: int, max_bytes: int) -> Any:
        """Begin to record operations, for a client."""
        if self._together:  # such lanes are not replayed
            return None
        for lane in range(len(self.stage.envs)):
            self._history(lane, client, max_steps, max_bytes)
        return None

    def _history(self, lane: int, client: int, max_steps: int, max_bytes: int) -> History:
        env, history = self._one(lane), self._histories.get(lane)
        ledger = _ledgers.setdefault((self._start, client), Ledger(max_steps, max_bytes))
        if history is None or history.env is not env:
            history = self._histories[lane] = History(env, ledger, fresh=self.stage.fresh)
            self.stage.intercept(lane, history)
        elif history.ledger is not ledger:
            history.move(ledger)
        return history

    def _save(self, lanes: Sequence[int], identifiers: Sequence[str], way: str, *limits: int) -> Any:
        if self._together:
            return self._save_together(lanes, identifiers)
        found: list[_Saved] = []
        for lane in lanes:
            env, origin = self._one(lane), Origin(self.stage.moment, lane)
            # Do this before `newest`, which raises if no episode runs: actions must be recorded from now on.
            history = self._history(lane, *limits) if way == "replay" else None
            observation, info = self.stage.newest(lane)
            try:
                if history is not None:
                    result = copied(env, (observation, dict(info)))
                    found.append(_Saved(replayed(history), result, origin))
                    continue
                if lane in self._histories:
                    # Actions were recorded before the check showed that a copy works.
                    self._histories.pop(lane).stop("it is copied")
                    self.stage.intercept(lane, None)
                found.append(_Saved(*take(env, observation, dict(info)), origin))
            except CannotCopyError as error:
                raise _refused(error) from error
        # Only now: if one lane cannot be saved, none is.
        self._states.update(zip(identifiers, found, strict=True))
        return [["+".join(saved.state.how), saved.state.size] for saved in found]

    def _save_together(self, lanes: Sequence[int], identifiers: Sequence[str]) -> Any:
        """Save all lanes at once, as one state."""
        whole, moment = self._all(lanes), self.stage.moment
        try:
            state, result = take(whole, *self.stage.newest(None))
        except CannotCopyError as error:
            raise _refused(error) from error
        for lane, identifier in zip(lanes, identifiers, strict=True):
            self._states[identifier] = _Saved(state, result, Origin(moment, lane))
        return [["+".join(state.how), state.size // len(lanes)]] * len(lanes)

    def _restore_together(self, branches: Sequence[Any]) -> Any:
        self.stage.check_place(None)
        whole = self._all([lane for _, lane, _ in branches])
        saved = {lane: self._saved(identifier) for identifier, lane, _ in branches}
        first = saved[0]
        if any(one.state is not first.state or one.origin.lane != lane for lane, one in saved.items()):
            text = f"the lanes of {self.stage.facts.kind} are restored all at once, each to its own state of one save"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        assert isinstance(first.state, EnvSnapshot), "lanes that are stepped together are not replayed"
        (seed,) = [seed for _, lane, seed in branches if lane == 0]
        try:
            observation, info = restore(first.state, whole, *first.result, seed=seed)
        except CannotCopyError as error:
            raise _refused(error) from error
        self.stage.place(None, observation, info, dataclasses.replace(first.origin, seed=seed))
        return True

    def _all(self, lanes: Sequence[int]) -> Any:
        """Return the environment that steps all lanes; raise unless `lanes` names all of them."""
        whole, count = self._one(0), self.stage.facts.num_envs
        if sorted(lanes) != list(range(count)):
            text = f"the lanes of {self.stage.facts.kind} are saved and restored as a whole: name all {count} of them"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        return whole

    def _saved(self, identifier: str) -> _Saved:
        saved = self._states.get(identifier)
        if saved is None:
            text = "the state is not where this environment is: it is kept in the process of another world"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        return saved

    def _restore(self, branches: Sequence[Any], *limits: int) -> Any:
        """Begin a restore; return True if it is complete, otherwise the handler calls `go_on`."""
        if self._together:
            return self._restore_together(branches)
        self.stage.check_place()
        self._end_jobs()
        jobs = []
        for identifier, lane, seed in branches:
            saved, env = self._saved(identifier), self._one(lane)
            kinds = [type(layer) for layer in layers_of(env)]
            if kinds != saved.state.kinds:
                raise RequestError(Code.FAILED_PRECONDITION, "the state is of an environment with other wrappers")
            jobs.append(_Job(saved, lane, seed))
        self._jobs, self._limits = jobs, limits
        return self._go_on()

    def _go_on(self) -> Any:
        """Replay for one slice; return True once all environments are restored."""
        if not self._jobs:
            raise RequestError(Code.CANCELLED, "the restore was given up")
        until = time.monotonic() + _SLICE
        try:
            for job in self._jobs:
                if isinstance(job.saved.state, EnvSnapshot):
                    continue
                if job.replay is None:
                    make, held = self._make_one(), self._may_be_held()
                    job.replay = StateReplay(job.saved.state, self._one(job.lane), make, in_place=held)
                if not job.replay.advance(until - time.monotonic()) or time.monotonic() > until + _SLICE:
                    return False
            tracks = [None if job.replay is None else job.replay.finish(job.seed) for job in self._jobs]
            compared: set[int] = set()
            for job, track in zip(self._jobs, tracks, strict=True):
                self._put(job, track, compared=id(job.saved.state) in compared)
                # No environment runs in between, so a fork over many lanes compares shared values once.
                compared.add(id(job.saved.state))
        except (CannotCopyError, ValueError) as error:
            self._end_jobs()
            raise _refused(error) from error
        except BaseException:
            self._end_jobs()
            raise
        self._jobs = []
        return True

    def _put(self, job: _Job, track: Track | None, *, compared: bool) -> None:
        """Put a copied state into its environment, or replace the environment by the one that replayed the state."""
        saved, env = job.saved, self._one(job.lane)
        history = self._histories.get(job.lane)
        if isinstance(saved.state, EnvSnapshot):
            observation, info = restore(saved.state, env, *saved.result, seed=job.seed, compared=compared)
            if history is not None:
                history.stop("a copy was put into it since")
        else:
            assert job.replay is not None, "a state that is no copy was replayed"
            assert track is not None, "a replay returns its track"
            observation, info = copied(env, saved.result, back=True)
            env = job.replay.env
            if not job.replay.in_place:
                self.stage.replace(job.lane, env)
            job.replay = None
            # Also for a lane without a history so far: its operations are known now.
            history = self._history(job.lane, *self._limits)
            history.go_on(env, track)
        self.stage.place(job.lane, observation, info, dataclasses.replace(saved.origin, seed=job.seed))

    def _end_jobs(self) -> None:
        """Give up the current restore."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if job.replay is None:
                continue
            if job.replay.in_place and job.replay.began:
                # The environment is in an unknown state: refuse steps until it is reset.
                history = self._histories.get(job.lane)
                if history is not None:
                    history.stop("a replay has failed in it since")
                self.stage.intercept(job.lane, _Spoiled(self.stage, job.lane, history))
            with contextlib.suppress(Exception):
                job.replay.close()

    def _may_be_held(self) -> bool:
        """True if a user's function made the environment: that function may still hold it."""
        made = getattr(getattr(self.stage.make, "__self__", None), "factory", None)
        while isinstance(made, functools.partial):
            made = made.func
        return made is not None and not isinstance(made, type)

    def close(self) -> None:
        """Drop the histories."""
        self._end_jobs()
        for history in self._histories.values():
            history.stop("it is closed")

    def _drop(self, identifiers: Sequence[str]) -> Any:
        for identifier in identifiers:
            self._states.pop(identifier, None)
        return None

    def _one(self, lane: int) -> Any:
        """Return the object that is copied for a lane: its environment, or the one that steps all lanes."""
        envs, whole = self.stage.envs, self.stage.whole
        if self._together:
            if isinstance(whole.unwrapped, AsyncVectorEnv):
                text = f"the lanes of {self.stage.facts.kind} are in other processes, and are not saved"
                raise RequestError(Code.UNIMPLEMENTED, text)
            return whole
        if not 0 <= lane < len(envs):
            raise RequestError(Code.INVALID_ARGUMENT, f"expected lanes 0 to {len(envs) - 1}, got {lane}")
        return envs[lane]


class _Spoiled:
    """Is called in place of an environment whose replay in place has failed, until it is reset.

    Args:
        stage: Gives access to the environment.
        lane: The environment's lane.
        history: The history that is called after the reset; None: the environment itself.
    """

    def __init__(self, stage: Stage, lane: int, history: History | None) -> None:
        self._stage, self._lane, self._history = stage, lane, history

    def reset(self, **given: Any) -> Any:
        """Begin a new episode in the environment."""
        self._stage.intercept(self._lane, self._history)
        if self._history is None:
            return self._stage.envs[self._lane].reset(**given)
        return self._history.reset(**given)

    def step(self, action: Any) -> Any:
        """Raise FAILED_PRECONDITION."""
        text = "a state could not be replayed in this environment, and its episode is over: reset it"
        raise RequestError(Code.FAILED_PRECONDITION, text)

    def called(self, request: Any) -> None:
        """Do nothing: there is no history."""

    def changed(self, name: str, value: Any) -> None:
        """Do nothing: there is no history."""


def _refused(why: object) -> RequestError:
    return RequestError(Code.FAILED_PRECONDITION, f"this environment has no state that can be copied: {why}")


def _title(env: Any, stage: Stage) -> str:
    """Return a description of an environment: its wrappers, class, id and arguments."""
    names = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers_of(env)]
    if isinstance(env, VectorEnv):
        names.insert(0, f"{env.num_envs} lanes of")
    spec = getattr(env, "spec", None)
    recipe = getattr(stage.make, "__self__", None)
    kwargs: Mapping[str, Any] = {**(getattr(spec, "kwargs", None) or {}), **(getattr(recipe, "kwargs", None) or {})}
    given = ", ".join(f"{name}={value!r:.200}" for name, value in sorted(kwargs.items()))
    process = f" {os.getpid()}" if "__main__" in names[-1] else ""
    return f"{' '.join(names)} {getattr(spec, 'id', '')}({given}){process}"
