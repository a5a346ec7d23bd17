"""The history of an environment since a reset, kept to be replayed in another environment.

An environment that holds something that cannot be copied, such as the world of a physics library, can still be
restored. We make another environment, put back the generators and everything else that could be copied before the
reset, and repeat the reset options, calls and actions. That is right if the reset makes everything anew that cannot be
copied. If it does not, earlier episodes count too, so the history must begin when the environment is made.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import random
import threading
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from bridge.pb import bridge_pb2
from bridge.states.constants import has_cells
from bridge.states.copyable import Fields, take_fields
from bridge.states.digest import digest_of
from bridge.states.fields import fields_of, held_by, is_pure, module_of
from bridge.states.kinds import draws
from bridge.states.layers import layers_of, make_generators
from bridge.states.refusal import CannotCopyError

__all__ = ["Event", "History", "Ledger", "Track", "foreign_in", "told"]

_EXTERNAL = frozenset(
    (
        *("_io", "io", "socket", "_socket", "subprocess", "_sqlite3", "sqlite3", "mmap", "multiprocessing", "ssl"),
        *("selectors", "select", "asyncio", "tempfile", "concurrent", "ctypes", "_ctypes"),
    )
)
"""Modules whose objects reach resources outside the environment."""
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_ATOMS = (
    logging.Logger,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    np.generic,
    np.dtype,
)
_EVENT_BYTES = 200


@dataclasses.dataclass
class Ledger:
    """The memory account of one client's histories."""

    max_steps: int
    """The most steps of one history."""
    max_bytes: int
    """The approximate most bytes of all of them."""
    taken: int = 0
    gone: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation on the environment."""

    kind: str
    """`reset`, `step`, `call`, `set` or `seed`."""
    given: Any
    """The keywords of a reset, the action of a step, a `CallRequest`, the name and value of an attribute, or the seed
    of a branch."""
    told: str = ""
    """A digest of the result of a reset or a step."""


@dataclasses.dataclass
class Track:
    """The operations since a reset, or since the environment was made."""

    before: Fields
    """The copyable fields before the first operation."""
    clean: bool
    """True if its first reset makes everything anew that cannot be copied: then a used environment may replay it."""
    events: list[Event]
    size: int = 0
    steps: int = 0


def told(result: Any) -> str:
    """Return a digest of a result: of a reset its observation; of a step its reward and flags.

    Observations of steps are left out, because all copyable fields are compared at the end.
    """
    return digest_of([result[0]] if len(result) == 2 else [result[1], *map(_flags, result[2:4])])


def _flags(value: Any) -> Any:
    """Return a flag as a bool, or a dict of flags by agent."""
    return {agent: bool(flag) for agent, flag in value.items()} if isinstance(value, Mapping) else bool(value)


def foreign_in(env: Any) -> list[Any]:
    """Return the objects in an environment, at any depth, that cannot be copied by their fields.

    Raises:
        CannotCopyError: An object reaches beyond the environment, such as a file or a socket.
    """
    layers = layers_of(env)
    known = {id(layer) for layer in layers}
    seen: dict[int, Any] = {}
    found: list[Any] = []
    waiting: deque[tuple[str, Any]] = deque((name, item) for layer in layers for name, item in fields_of(layer))
    while waiting:
        name, value = waiting.popleft()
        kind = type(value)
        if issubclass(kind, (*_ATOMS, *_GENERATORS, *_LOCKS, gymnasium.Space)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if id(value) in known or draws(value):
            continue
        if module_of(kind).partition(".")[0] in _EXTERNAL and kind.__name__ not in ("StringIO", "BytesIO"):
            raise CannotCopyError(
                f"{name} is a {kind.__module__}.{kind.__name__}, which reaches beyond the environment"
            )
        if isinstance(value, threading.Thread):
            raise CannotCopyError(f"{name} is a thread, which goes on by itself")
        items: list[Any] = []
        if isinstance(value, np.ndarray):
            root = value
            while isinstance(root.base, np.ndarray):
                root = root.base
            items = list(value.flat) if value.dtype.hasobject else [root.base]
        elif isinstance(value, dict):
            items = [part for pair in dict.items(value) for part in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            items = list(value)
            if kind in (set, frozenset) and any(_hash_of(item) is object.__hash__ for item in items):
                raise CannotCopyError(f"{name} is a {kind.__name__} of objects that have no fixed order")
        elif isinstance(value, types.FunctionType):
            items = held_by(value)
            if has_cells(value):
                found.append(value)
        elif isinstance(value, types.MethodType):
            items = [value.__self__, value.__func__]
        elif isinstance(value, types.BuiltinMethodType):
            items = [value.__self__]
        elif not is_pure(kind):
            found.append(value)
        waiting.extend((name, item) for item in items)
        waiting.extend((f"{name}.{own}", item) for own, item in fields_of(value))
    return found


def _hash_of(value: Any) -> Any:
    return getattr(type(value), "__hash__", None)


def _persisting(before: list[Any], after: list[Any]) -> Any:
    """Return an object of `after` that was in `before`, or refers to such an object; None: there is none."""
    known = {id(value) for value in before}
    for value in after:
        if id(value) in known or any(id(held) in known for held in gc.get_referents(value)):
            return value
    return None


class History:
    """Is called in place of an environment, and records the operations on it; a `Callee`.

    Args:
        env: The environment.
        ledger: The account of the client that asked for it.
        fresh: True if the environment has not been used yet.
    """

    def __init__(self, env: Any, ledger: Ledger, *, fresh: bool) -> None:
        self.env, self.ledger, self._fresh = env, ledger, fresh
        self.track: Track | None = None
        self.why = (
            "its actions are kept from its next reset on: reset it, and save then (states=True keeps them at once)"
        )
        """Why there is no track."""

    def reset(self, **given: Any) -> tuple[Any, Any]:
        """Reset the environment, and begin a new track if the reset makes everything anew; otherwise continue it."""
        if self.ledger.gone:
            self.stop("its client has left")
            result: tuple[Any, Any] = self.env.reset(**given)
            return result
        fresh, self._fresh = self._fresh, False
        kept: Any = None
        try:
            make_generators(layers_of(self.env))
            kept, before, foreign = copy.deepcopy(given), take_fields(self.env), foreign_in(self.env)
        except Exception as error:  # a user's objects may raise anything
            self.stop(str(error))
            fresh = False
        try:
            result = self.env.reset(**given)
        except BaseException:
            self.stop("a reset has raised since")
            raise
        if kept is None:
            return result
        try:
            left = _persisting(foreign, foreign_in(self.env))
            event = Event("reset", kept, told(result))
        except Exception as error:  # a user's objects may raise anything
            self.stop(str(error))
            return result
        if left is None or fresh:
            self.stop("")
            self.track = Track(before, left is None, [])
            self._grow(before.size)
        elif self.track is None:
            title = f"{module_of(type(left))}.{type(left).__qualname__}"
            self.stop(
                f"its reset leaves a {title} as it was, and what was done with it before is not known: states=True "
                "keeps the actions of a new environment from the start"
            )
        self._add(event)
        return result

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment, and record the action."""
        if self.track is None:
            found: tuple[Any, Any, Any, Any, Any] = self.env.step(action)
            return found
        kept = copy.deepcopy(action)
        try:
            result: tuple[Any, Any, Any, Any, Any] = self.env.step(action)
        except BaseException:
            self.stop("a step has raised since")
            raise
        self._add(Event("step", kept, told(result)))
        return result

    def called(self, request: Any) -> None:
        """Record the call of a method."""
        kept = bridge_pb2.CallRequest()
        kept.CopyFrom(request)
        self._add(Event("call", kept))

    def changed(self, name: str, value: Any) -> None:
        """Record the new value of an attribute."""
        self._add(Event("set", (name, copy.deepcopy(value))))

    def _add(self, event: Event) -> None:
        track = self.track
        if track is None:
            self._fresh = False
            return
        track.events.append(event)
        track.steps += event.kind == "step"
        self._grow(_EVENT_BYTES + _size_of(event.given))
        if track.steps > self.ledger.max_steps:
            self.stop(f"it would have to replay more than max_replay_steps={self.ledger.max_steps} steps")
        elif self.ledger.taken > self.ledger.max_bytes:
            self.stop(f"its actions take more than max_state_bytes={self.ledger.max_bytes}")

    def _grow(self, size: int) -> None:
        assert self.track is not None, "only an existing track grows"
        self.track.size += size
        self.ledger.taken += size

    def move(self, ledger: Ledger) -> None:
        """Charge the history to another account from now on."""
        if self.track is not None:
            self.ledger.taken -= self.track.size
            ledger.taken += self.track.size
        self.ledger = ledger

    def stop(self, why: str) -> None:
        """Drop the track until the next reset; `why` is the reason."""
        if self.track is not None:
            self.ledger.taken -= self.track.size
        self.track, self.why = None, why

    def go_on(self, env: Any, track: Track) -> None:
        """Continue from a track that was replayed in `env`."""
        self.stop("")
        self.env, self._fresh = env, False
        self.track = dataclasses.replace(track, events=list(track.events))
        self.ledger.taken += track.size


def _size_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, bridge_pb2.CallRequest):
        return value.ByteSize()
    if isinstance(value, Mapping):
        return sum(_size_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_size_of(item) for item in value)
    return len(value) if isinstance(value, (str, bytes)) else 32
