"""A state that is what was done with an environment: done again with another one, and compared with what came of it.

Compared are the first observation, each reward, whether each step ended the episode, and at the end all that can be
copied of the environment, with its generators. Wrappers all of whose fields can be copied are put back instead: they
may know the time. Around each step the generators of `random` and `numpy.random` are looked at.
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
    """What was done; nothing is added to it any more."""
    after: Fields
    """What could be copied when it was saved."""
    size: int
    """About how many bytes it takes."""
    how: tuple[str, ...] = ("replay",)

    @property
    def kinds(self) -> list[type]:
        """The classes of the layers."""
        return self.after.kinds


def replayed(history: History) -> ReplayState:
    """Return the state of an environment by its history.

    Raises:
        CannotCopyError: There is no history, or something that all environments share has changed since it began.
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
    """A state that is replayed, in slices.

    Args:
        state: The state.
        env: The environment that is to go on from it.
        make: Makes another one.
        in_place: True: the environment itself plays it, as one that its user holds.

    Raises:
        CannotCopyError: It cannot be replayed.
    """

    def __init__(self, state: ReplayState, env: Any, make: Callable[[], Any], *, in_place: bool) -> None:
        self.state, self.began = state, False
        self.in_place = in_place
        self.env = env if in_place else make()
        """The environment that plays it."""
        if not in_place and {id(layer) for layer in layers_of(env)} & {id(layer) for layer in layers_of(self.env)}:
            self.env, self.in_place = env, True  # what makes it has but this one
        if self.in_place and not state.track.clean:
            raise CannotCopyError(
                "what has made it may hold it, so it would be replayed in place, but a reset leaves things as they were"
            )
        self._place = 0

    def advance(self, seconds: float) -> bool:
        """Replay for some time; return whether it is at its end.

        Raises:
            CannotCopyError: What came of it is not what came of the original.
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
        """Compare what was reached, and return what was done to get there.

        Args:
            seed: Seeds the generators anew; None: they go on.

        Raises:
            CannotCopyError: It is not what was saved.
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
        """End an environment that is of no use."""
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
        except Exception:  # as it may have done then
            return ""
    return ""


def _alike(one: Any, other: Any) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
