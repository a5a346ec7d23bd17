"""An environment that repeats recorded calls, from any streams and lanes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from gymnasium.vector import VectorEnv

from bridge.core.encoding.properties import PropertyTree, encoded, read_encoded
from bridge.core.extras import provided
from bridge.core.worlds.base import in_environment
from bridge.core.worlds.environment import kept
from bridge.core.worlds.hosts import Host
from bridge.core.worlds.kinds import local_parts
from bridge.core.worlds.local import host_of
from bridge.core.worlds.settings import without_mask
from bridge.errors import RecordingError, RequestError, SettingError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.recording.branches import PathPart
from bridge.recording.rows import Kind

__all__ = ["LaneWalk", "made", "reseeded"]


def made(make: Callable[[], Any]) -> Host[Any]:
    """Return an environment of a recording; raise SettingError if making it failed."""
    try:
        host: Host[Any] = in_environment("its construction", lambda: host_of(make(), make))
    except RequestError as error:
        raise SettingError(f"the environment of the recording cannot be made: {error.message}") from error
    return host


def reseeded(env: Any, seed: int) -> None:
    """Seed an environment's random generators again, without a reset.

    Raises:
        RecordingError: They cannot be seeded.
    """
    try:
        in_environment("seeding", provided("reseed"), env, seed)
    except (RequestError, LookupError, ImportError) as error:
        raise RecordingError(f"a branch was seeded anew, which cannot be done here: {error}") from error


class LaneWalk:
    """An environment that repeats the recorded calls of lanes.

    Args:
        make: Makes the environment, or the lanes of a world.
        lane: The index of the lane that this stands for.

    Raises:
        SettingError: Making it failed.
    """

    def __init__(self, make: Callable[[], Any], lane: int = 0) -> None:
        self.host = made(lambda: _one(_single(make)(), lane))
        self._tree: PropertyTree = self.host.properties()
        self._result: tuple[Any, Any] | None = None

    @property
    def env(self) -> Any:
        """The environment."""
        return self.host.env

    def follow(self, way: Sequence[PathPart]) -> tuple[Any, Any]:
        """Repeat calls, and seed the generators where a branch did; return the last observation and info.

        Raises:
            RecordingError: The calls return no observation, or the generators cannot be seeded.
        """
        for number, part in enumerate(way):
            calls = sorted(call for call in part.stream.calls if part.first <= call <= part.last)
            if not number:
                # The effect of earlier method calls, such as setting an attribute, may last.
                calls = sorted(call for call in part.stream.calls if call <= part.last)
            rows = part.stream.rows_of(part.lane, part.first, part.last)
            for row, action in zip(rows.tolist(), part.stream.samples("action", rows), strict=True):
                at = int(part.stream.column("call")[row])
                while calls and calls[0] <= at:
                    self._make_calls(part, calls.pop(0))
                self._do(part, row, at, action)
            for call in calls:
                self._make_calls(part, call)
            if part.seed is not None:
                reseeded(self.env, part.seed)
        if self._result is None:
            raise RecordingError("a branch goes on from where nothing was recorded")
        return self._result

    def _do(self, part: PathPart, row: int, call: int, action: Any) -> None:
        function: Callable[..., Any]
        arguments: tuple[Any, ...]
        kind, reset = int(part.stream.column("kind")[row]), part.stream.resets.get(call)
        if kind in (Kind.STEP, Kind.FAILED_STEP):
            if action is None:
                return
            function, arguments = self.host.step, (action,)
        elif reset is None:  # autoreset
            function, arguments = self.host.reset, (None, None)
        else:
            seed = reset.seeds(part.stream.lanes)[part.lane]
            function, arguments = self.host.reset, (seed, kept(without_mask(reset.options)[0]))
        # If this call raises, the recorded one did, too, and its lane continued.
        with contextlib.suppress(RequestError) if kind >= Kind.FAILED_STEP else contextlib.nullcontext():
            try:
                result = in_environment("a replay", function, *arguments)
            except RequestError as error:
                raise RecordingError(f"what a branch goes on from cannot be replayed: {error.message}") from error
            self._result = kept(result[0]), kept(result[-1])

    def _make_calls(self, part: PathPart, call: int) -> None:
        """Make the method calls before a call that were calls of this lane."""
        for kind, data in part.stream.calls[call]:
            with contextlib.suppress(RequestError, DecodeError):  # the recorded call may have failed as well
                if kind == "call":
                    request = bridge_pb2.CallRequest.FromString(data)
                    if part.lane in request.lanes or not request.lanes:
                        del request.lanes[:]
                        in_environment("a call", self.host.call, request)
                else:
                    written = properties_pb2.PropertyRequest.FromString(data)
                    value = written.write_property.value
                    if part.stream.lanes > 1:
                        each = read_encoded(value)
                        value.CopyFrom(encoded([each[part.lane]]))
                    in_environment("writing a property", self._tree.answer, written)


def _single(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that makes one environment if `make` is a recipe's method that makes lanes."""
    recipe = getattr(make, "__self__", None)
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type) and hasattr(recipe, "num_envs"):
        return getattr(dataclasses.replace(recipe, num_envs=1), make.__name__)  # type: ignore[no-any-return]
    return make


def _one(given: Any, lane: int) -> Any:
    """Return a single environment from the result of a maker."""
    if not isinstance(given, VectorEnv):
        return given
    parts = local_parts(given)
    if not parts:
        raise SettingError("the lanes of the recording are in a simulator, and cannot be played one by one")
    for other in np.flatnonzero(np.arange(len(parts)) != min(lane, len(parts) - 1)).tolist():
        parts[other].close()
    return parts[min(lane, len(parts) - 1)]
