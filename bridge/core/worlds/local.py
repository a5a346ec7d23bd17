"""Environments of this process.

All code of an environment runs through its executor, in the one thread that the environment belongs to. The last
reference to the environment is dropped in that thread too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from bridge.core.encoding.properties import ENCODED, NUMBER, Property, PropertyTree, encoded, read_encoded
from bridge.core.worlds import kinds
from bridge.core.worlds.base import answer_to, in_environment
from bridge.core.worlds.environment import (
    Call,
    Environment,
    EnvironmentProxy,
    Result,
    StepTimes,
    environment_properties,
)
from bridge.core.worlds.hosts import (
    LANE_WRAPPERS,
    EnvHost,
    Host,
    ParallelHost,
    checked_lanes,
    checked_values,
    wrappers_by_lane,
)
from bridge.core.worlds.kinds import Known
from bridge.core.worlds.messages import PartOutcome, SessionMessage
from bridge.core.worlds.scheduling import Executor, Scheduler, gather
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2

__all__ = ["LaneGroup", "LocalEnv", "adopt", "host_of"]

T = TypeVar("T")
_owners: weakref.WeakValueDictionary[int, LocalEnv] = weakref.WeakValueDictionary()
"""The owners of this process's environments, by the `id` of the unwrapped environment; some may be closed."""


def host_of(env: Known, make: Callable[[], Known]) -> Host[Any]:
    """Return the host of an environment; `make` makes another one like it.

    Raises:
        SettingError: The space of its rewards is no Box, or has a shape that lanes cannot have.
        RequestError: Two of its lanes are one object.
    """
    lanes = _innermost(env)
    if len({id(lane) for lane in lanes}) < len(lanes):
        raise _shared(lanes[0], "lane")
    facts = kinds.facts_of(env)
    if isinstance(env, VectorEnv):
        from bridge.core.worlds.lane_hosts import LanesHost  # most environments have no lanes

        return LanesHost(env, facts, make)
    return EnvHost(env, facts, make) if isinstance(env, gymnasium.Env) else ParallelHost(env, facts, make)


def _own(value: Any) -> Any:
    """Return a copy of a value that shares no array or container with the original."""
    if isinstance(value, np.ndarray):
        return value.copy()
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return kind((key, _own(item)) for key, item in value.items())
    if kind is tuple or kind is list:
        return kind(map(_own, value))
    # A namedtuple, such as an element of a Graph space.
    return kind(*map(_own, value)) if isinstance(value, tuple) and hasattr(kind, "_fields") else value


class LocalEnv:
    """An environment of this process, constructed in the thread that it belongs to.

    Args:
        host: Calls the environment; owned by this object from here on.
        executor: Runs its calls, and is closed with it.
    """

    def __init__(self, host: Host[Any], executor: Executor) -> None:
        self._host: Host[Any] | None = host
        self._tree = host.properties()
        self.executor = executor
        self._closed = RequestError(Code.FAILED_PRECONDITION, "the environment was closed")
        self.facts = host.facts
        self.times = StepTimes()
        self.notes = host.notes
        self.failures, self.retried = host.failures, host.retried
        self.step = partial(executor.run, self.step_now)  # type: ignore[method-assign]  # one call less in each step

    ended: RequestError | None = None

    def owns(self, innermost: object) -> bool:
        """True if this environment is open, and it, or one of its lanes, is this object without its wrappers."""
        return self._host is not None and any(each is innermost for each in _innermost(self._host.env))

    def _hosted(self, lane: int | None = None) -> Host[Any]:
        if self._host is None:
            raise self._closed
        return self._host if lane is None else self._host.lanes[lane]

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset the environment, or one lane by itself."""
        return self.executor.run(self._reset, seed, options, lane)

    def _reset(self, seed: object, options: object, lane: int | None) -> Result:
        host, began = self._hosted(lane), time.perf_counter()
        host.result = None
        try:
            host.result = result = in_environment("reset", host.reset, seed, options)
            return result
        finally:
            self.times.reset.add(time.perf_counter() - began)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step the environment, or one lane by itself."""
        return self.executor.run(self.step_now, action, lane)

    def step_in_row(self, action: object) -> Result:
        """Step in the thread of the executor, and return copies of what the environment returned."""
        result = self.step_now(action)
        # `EnvAgent.take_step` refuses anything else.
        if type(result) is not tuple or len(result) != 5:
            return result
        observation, reward, terminated, truncated, info = result
        # Nearly always an array: this saves a call in each step.
        observation = observation.copy() if type(observation) is np.ndarray else _own(observation)
        return observation, reward, terminated, truncated, _own(info) if info else info

    def step_now(self, action: object, lane: int | None = None) -> Result:
        """Step in the thread of the executor."""
        # Every step runs this function, so it makes as few calls as possible.
        host = self._host if lane is None else self._hosted(lane)
        if host is None:
            raise self._closed
        began = time.perf_counter()
        try:
            host.result = result = host.step(action)
            return result
        except BaseException as error:
            host.result = None
            answer = answer_to("step", error)
        finally:
            times = self.times.step
            times.recent.append(time.perf_counter() - began)
            times.count += 1
        answer.__cause__ = answer.__context__ = answer.__traceback__ = None  # its frames would keep the environment
        raise answer

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment and drop the last reference to it.

        Args:
            reason: What later calls raise; None: an error that says that the environment was closed.
        """
        try:
            await self.executor.run(self._close, reason)
        finally:
            self.executor.close()

    def _close(self, reason: RequestError | None) -> None:
        self._closed = reason or self._closed
        host, self._host = self._host, None
        # Worlds and agents may keep the tree, whose functions refer to the environment.
        self._tree = _without_environment(self._tree)
        if host is not None:
            # `step` refers to this object: the cycle would keep it, and its spaces, until a garbage collection.
            del self.step
            in_environment("close", host.close)

    @property
    def home(self) -> object:
        """The process of the environment: equal for all environments of this process."""
        return os.getpid()

    def run_message(self, message: SessionMessage, request: bytes) -> Call[PartOutcome]:
        """Have the environment's part of a message answer a request."""
        return self.executor.run(self._run_message, message, request, threading.get_ident())

    def _run_message(self, message: SessionMessage, request: bytes, asked_in: int) -> PartOutcome:
        began = time.thread_time()
        outcome = in_environment(f"the message {message.form.name}", self._hosted().run_message, message, request)
        # The session measures the time that its own thread uses.
        if threading.get_ident() == asked_in:
            return outcome
        return dataclasses.replace(outcome, seconds=time.thread_time() - began)

    def _run(self, where: str, function: Callable[[Host[Any]], T]) -> Call[T]:
        """Call a function with the host; the environment may be closed before the call runs."""
        return self.executor.run(in_environment, where, lambda: function(self._hosted()))

    def render(self, lanes: Sequence[int]) -> Call[list[object]]:
        """Return copies of what `render()` returns now for some lanes."""
        return self._run("render", lambda host: host.draw(lanes))

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self._tree

    def answer_property(self, request: properties_pb2.PropertyRequest) -> Call[properties_pb2.PropertyResponse]:
        """Read, write or list a property for which code of the environment runs."""
        return self._run("reading its properties", lambda host: self._tree.answer(request))

    def call(self, request: bridge_pb2.CallRequest) -> Call[bridge_pb2.CallResponse]:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        return self._run(f"call of {request.name}", lambda host: host.call(request))


def _without_environment(tree: PropertyTree) -> PropertyTree:
    """Return a copy of a property tree that keeps no reference to the environment."""

    def closed(*arguments: object) -> Any:
        raise RequestError(Code.FAILED_PRECONDITION, "the environment was closed")

    leaves = [dataclasses.replace(leaf, read=closed) if leaf.in_environment else leaf for leaf in tree.leaves]
    access: Any = dict.fromkeys(("read", "write", "names", "find"), closed)
    return PropertyTree(leaves, [dataclasses.replace(family, **access) for family in tree.families])


class LaneGroup(EnvironmentProxy):
    """Environments, each with a thread or a process of its own, as the lanes of one world.

    Args:
        lanes: The environments, all of one kind.
        scheduler: Runs calls of several lanes side by side.
    """

    def __init__(self, lanes: Sequence[Environment], scheduler: Scheduler) -> None:
        super().__init__(lanes[0])
        self.lanes = lanes
        """The environments."""
        self._scheduler = scheduler
        self.facts = dataclasses.replace(lanes[0].facts, kind="LaneGroup", num_envs=len(lanes), steps_lanes=True)
        for lane in lanes:
            # Shared, so that the world counts the steps of all lanes and reports the notes of every lane.
            lane.times, lane.notes = self.times, self.notes

    @property
    def ended(self) -> RequestError | None:
        """The error of the first lane whose process has ended; None: no process has ended."""
        return next((lane.ended for lane in self.lanes if lane.ended is not None), None)

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset one lane by itself."""
        return self.lanes[lane or 0].reset(seed=seed, options=options)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step one lane by itself."""
        return self.lanes[lane or 0].step(action)

    async def close(self, reason: RequestError | None = None) -> None:
        """Close all environments."""
        await gather(self._scheduler, [lane.close(reason) for lane in self.lanes])

    async def render(self, lanes: Sequence[int]) -> list[object]:
        """Return copies of what `render()` returns now for some lanes."""
        drawn = await gather(self._scheduler, [self.lanes[lane].render([0]) for lane in lanes])
        return [frame for frames in drawn for frame in frames]

    def properties(self) -> PropertyTree:
        """Return what the environments add to the tree below `world`."""
        leaves = [Property("world.num_envs", NUMBER, "the number of lanes", lambda: len(self.lanes))]
        key = f"world.{LANE_WRAPPERS}"
        # Each lane reports its own wrappers only.
        found = [lane.properties().get(key) for lane in self.lanes]
        if None not in found:
            wrappers = wrappers_by_lane([kinds[index] for kinds, indices in found for index in indices])
            leaves.append(
                Property(key, ENCODED, "lists of wrappers' classes, and which each lane has", lambda: wrappers)
            )
        return self.lanes[0].properties().merged(PropertyTree(leaves))

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read or write a property of all lanes, as a list with one item per lane; list the first lane's properties."""
        kind = request.WhichOneof("payload")
        # These have one value for all lanes, not a list.
        shared = {each.key for each in environment_properties()}
        if kind == "list_property" or request.read_property.key in shared:
            return await self.lanes[0].answer_property(request)
        requests = [request] * len(self.lanes)
        if kind == "write_property":
            value = checked_values(read_encoded(request.write_property.value), len(self.lanes))
            write = partial(properties_pb2.WritePropertyRequest, key=request.write_property.key)
            requests = [properties_pb2.PropertyRequest(write_property=write(value=encoded([item]))) for item in value]
        parts = zip(self.lanes, requests, strict=True)
        responses = await gather(self._scheduler, [lane.answer_property(part) for lane, part in parts])
        if kind == "read_property":
            merged = [item for response in responses for item in read_encoded(response.read_property.value)]
            responses[0].read_property.value.CopyFrom(encoded(merged))
        return responses[0]

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Refuse: each lane has a thread or a process of its own, so no part of a message can reach all of them."""
        text = f"the message {message.form.name!r} is not served for lanes with a thread or a process each"
        raise RequestError(Code.UNIMPLEMENTED, text)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes of the request; without lanes, on all."""
        chosen = checked_lanes(request.lanes, len(self.lanes))
        part = bridge_pb2.CallRequest()
        part.CopyFrom(request)
        # Each environment has one lane, number 0, and refuses the number of its lane in this group.
        del part.lanes[:]
        responses = await gather(self._scheduler, [self.lanes[lane].call(part) for lane in chosen])
        results = [result for response in responses for result in response.results]
        return bridge_pb2.CallResponse(results=results, is_method=responses[0].is_method)


def _innermost(env: Known) -> list[object]:
    """Return the environment without its wrappers, or its lanes without theirs if they are objects of this process."""
    parts = kinds.local_parts(env)
    return [kinds.attribute_layers(part)[-1] for part in parts] or [list(kinds.layers_of(env))[-1]]


def _refuse_owned(env: Known) -> None:
    """Raise RequestError if another world steps the same object already."""
    for each in _innermost(env):
        owner = _owners.get(id(each))
        if owner is not None and owner.owns(each):
            raise _shared(each, "world")


def _shared(env: object, who: str) -> RequestError:
    """Return the error for a function such as `lambda: env`, whose one environment two worlds or lanes would step."""
    text = (
        f"its function returned the same {type(env).__name__} again, which another {who} steps already; expected a "
        "function that makes a new environment each time, as `lambda: MyEnv()` does and `lambda: env` does not"
    )
    return RequestError(Code.FAILED_PRECONDITION, text)


async def adopt(make: Callable[[], Known], executor: Executor) -> LocalEnv:
    """Make an environment in the thread of an executor, and return what worlds see of it.

    Args:
        make: Returns the environment.
        executor: Runs this call and all others of the environment, and is closed with it.

    Raises:
        RequestError: It could not be made.
    """

    def here() -> LocalEnv:
        env = make()
        _refuse_owned(env)
        try:
            made = LocalEnv(host_of(env, make), executor)
            _owners.update((id(each), made) for each in _innermost(env))
            return made
        except BaseException:
            # No world will own the environment. An error of its `close` must not replace the reason of the refusal.
            with contextlib.suppress(Exception):
                env.close()
            raise

    try:
        return await executor.run(in_environment, "its construction", here)
    except BaseException:
        # Without an environment, nothing else closes the executor.
        executor.close()
        raise
