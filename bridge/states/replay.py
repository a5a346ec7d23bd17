"""States by replay: the operations on an environment, repeated in another one and compared with the original results.

A replay compares the first observation, each reward, the flags of each step, and at the end all copyable fields with
the generators. Wrappers whose fields can all be copied are put back instead, because they may hold the time. Around
each step the replay checks the generators of `random` and `numpy.random`.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.core.encoding import values
from bridge.core.worlds import kinds
from bridge.states.copyable import Fields, put_fields, take_fields
from bridge.states.generators import seed_generators
from bridge.states.history import Event, History, Track, told
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError

__all__ = ["ReplayState", "StateReplay", "replayed"]


@dataclasses.dataclass(frozen=True)
class ReplayState:
    """A state by replay."""

    track: Track
    """The operations; this track does not grow any more."""
    after: Fields
    """The copyable fields when the state was saved."""
    size: int
    """The approximate size in bytes."""
    how: tuple[str, ...] = ("replay",)

    @property
    def kinds(self) -> list[type]:
        """The classes of the layers."""
        return self.after.kinds


def replayed(history: History) -> ReplayState:
    """Return the state of an environment from its history.

    Raises:
        CannotCopyError: There is no history, or shared values have changed since it began.
    """
    track = history.track
    if track is None:
        raise CannotCopyError(history.why)
    after = take_fields(history.env)
    if track.before.common.digest() != track.before.digest:
        raise CannotCopyError("what its class or its module holds has changed since its reset")
    kept = dataclasses.replace(track, events=list(track.events))
    return ReplayState(kept, after, track.size + after.size)


class StateReplay:
    """The replay of a state, in slices.

    Args:
        state: The state.
        env: The environment that will continue from the state.
        make: Makes another environment.
        in_place: True: replay in `env` itself, because its user may hold it.

    Raises:
        CannotCopyError: It cannot be replayed.
    """

    def __init__(self, state: ReplayState, env: Any, make: Callable[[], Any], *, in_place: bool) -> None:
        self.state, self.began = state, False
        self.in_place = in_place
        self.env = env if in_place else make()
        """The environment in which the state is replayed."""
        if not in_place and {id(layer) for layer in layers_of(env)} & {id(layer) for layer in layers_of(self.env)}:
            self.env, self.in_place = env, True  # `make` always returns the same environment
        if self.in_place and not state.track.clean:
            raise CannotCopyError(
                "what has made it may hold it, so it would be replayed in place, but a reset leaves things as they were"
            )
        self._place = 0

    def advance(self, seconds: float) -> bool:
        """Replay for some seconds; return True at the end.

        Raises:
            CannotCopyError: A result differs from the original's.
        """
        until = time.monotonic() + seconds
        events, before = self.state.track.events, self.state.track.before
        if not self.began:
            self.began = True
            if before.common.digest() != before.digest:
                raise CannotCopyError("what its class or its module holds has changed since its reset")
            put_fields(before, self.env)
        while self._place < len(events):
            self._do(events[self._place])
            self._place += 1
            if time.monotonic() >= until:
                return self._place == len(events)
        return True

    def _do(self, event: Event) -> None:
        of_random, of_numpy = random.getstate(), np.random.get_state()
        try:
            found = _done(self.env, event)
        except Exception as error:
            raise CannotCopyError(f"its replay raised {type(error).__name__}: {error}") from error
        finally:
            moved = of_random != random.getstate() or not _alike(of_numpy, np.random.get_state())
            if moved:
                random.setstate(of_random)
                np.random.set_state(of_numpy)
        if moved:
            raise CannotCopyError("its replay drew from random or numpy.random, which all share")
        if found != event.told:
            raise CannotCopyError(f"its replay came to something else, by a {event.kind}")

    def finish(self, seed: int | None) -> Track:
        """Compare the environment with the saved fields, and return the track that leads to its state.

        Args:
            seed: Reseeds the generators; None: they go on.

        Raises:
            CannotCopyError: A field differs from the saved one.
        """
        after = self.state.after
        reached = take_fields(self.env)
        if reached.kinds != after.kinds:
            raise CannotCopyError("its replay made an environment of other wrappers")
        for index, (mine, theirs) in enumerate(zip(reached.digests, after.digests, strict=True)):
            if index in after.apart and mine.keys() == theirs.keys():
                continue
            for name in mine.keys() | theirs.keys():
                if mine.get(name) != theirs.get(name):
                    raise CannotCopyError(f"its replay came to another {name}")
        put_fields(after, self.env, whole=True)
        track = self.state.track
        if seed is None:
            return track
        event = Event("seed", seed)
        _done(self.env, event)
        return dataclasses.replace(track, events=[*track.events, event])

    def close(self) -> None:
        """Close the environment if this replay made it."""
        if not self.in_place:
            self.env.close()


def _done(env: Any, event: Event) -> str:
    given = copy.deepcopy(event.given)
    if event.kind == "reset":
        return told(env.reset(**given))
    if event.kind == "step":
        return told(env.step(given))
    if event.kind == "seed":
        seed_generators(layers_of(env), given)
        return ""
    if event.kind == "set":
        kinds.set_attribute(env, *given)
        return ""
    found = kinds.attribute_of(env, given.name)
    if callable(found):
        args = [values.from_value(item) for item in given.args.items]
        named = zip(given.kwargs.keys, given.kwargs.values, strict=True)
        try:
            found(*args, **{key: values.from_value(item) for key, item in named})
        except Exception:  # the original call may have raised too
            return ""
    return ""


def _alike(one: Any, other: Any) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
