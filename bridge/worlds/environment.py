"""The interface of environments to worlds: a description, and calls that are awaited.

`LocalEnv` holds an environment of this process. All code of the environment runs through its executor, in the one
thread that the environment belongs to; its last reference is dropped there too. `bridge.worlds.isolated.env` has the
same interface for environments in processes of their own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.encoding.properties import NUMBER, Property, PropertyTree, encoded, read_encoded
from bridge.encoding.space_json import published_space
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.samples import Samples
from bridge.worlds.access import EnvAccess, ParallelAccess
from bridge.worlds.base import answer_to, in_environment
from bridge.worlds.broken_lanes import refusal_of_broken_lanes, without_reset_mask
from bridge.worlds.lane_infos import collect_infos, join_infos
from bridge.worlds.rewards import prepare_lanes, reward_space_of
from bridge.worlds.scheduling import Executor, Pending, Scheduler, gather

__all__ = ["Environment", "Lanes", "LocalEnv", "LocalParallelEnv", "LocalVectorEnv", "StepTimes", "adopt"]

E = TypeVar("E")
T = TypeVar("T")


class StepTimes:
    """The seconds that the calls of `reset` and of `step` took."""

    def __init__(self) -> None:
        self.reset = Samples()
        self.step = Samples()

    def summary(self) -> dict[str, dict[str, float]]:
        """Return `count`, `p50`, `p90`, `p99` and `max` of each, in seconds."""
        return {"step": self.step.summary(), "reset": self.reset.summary()}


class Environment(Protocol):
    """What every world needs of its environment."""

    times: StepTimes
    reward_space: Any
    """Of array rewards; None: rewards are numbers."""
    notes: list[str]
    """What clients are to be told of what it returned; whoever tells them takes it."""

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if the environment's process has ended; None: it has not."""

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset it; return what its own `reset` returns."""

    async def step(self, action: Any) -> Any:
        """Step it; return what its own `step` returns."""

    async def close(self, reason: RequestError | None = None) -> None:
        """Close it and give it up; later calls raise `reason`.

        Raises:
            RequestError: What its own `close` raised; it is given up all the same.
        """

    async def render(self, lanes: Sequence[int]) -> list[Any]:
        """Return what `render()` gives now for some lanes, copied; [0] for a single environment."""

    def properties(self) -> PropertyTree:
        """Return what it adds to the tree below `world`."""

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property for which code of the environment runs."""

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""


class LocalBase(Generic[E]):
    """What environments of this process have in common. Made in the thread that they belong to.

    Args:
        env: The environment, owned by this object from here on.
        access: Its properties, attributes and methods.
        executor: Runs its calls.
        own_executor: Whether the executor serves nothing else, and ends with the environment.
    """

    def __init__(self, env: E, access: EnvAccess, executor: Executor, own_executor: bool) -> None:
        self._env: E | None = env
        self._access: EnvAccess | None = access
        self._tree = access.properties()
        self._executor = executor
        self._own_executor = own_executor
        self._closed = RequestError(Code.FAILED_PRECONDITION, "the environment was closed")
        self.times = StepTimes()
        self.notes: list[str] = []

    ended: RequestError | None = None
    reward_space: Any = None

    def _require(self) -> Any:
        if self._env is None:
            raise self._closed
        return self._env

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset the environment."""
        return await self._executor.run(self._reset, seed, options)

    def step(self, action: Any) -> Coroutine[Pending[Any], None, Any]:
        """Step the environment."""
        return self._executor.run(self._step, action)

    def _reset(self, seed: Any, options: Any) -> Any:
        env, began = self._require(), time.perf_counter()
        try:
            # As a local caller would: not every `reset` takes both.
            given = {} if seed is None else {"seed": seed}
            if options is not None:
                given["options"] = options
            return in_environment("reset", env.reset, **given)
        finally:
            self.times.reset.add(time.perf_counter() - began)

    def _step(self, action: Any) -> Any:
        env: Any = self._env
        if env is None:
            raise self._closed
        began = time.perf_counter()
        try:
            return env.step(action)
        except BaseException as error:
            answer = answer_to("step", error)
        finally:
            times = self.times.step
            times.recent.append(time.perf_counter() - began)
            times.count += 1
        raise answer

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment and drop the last reference to it.

        Args:
            reason: What later calls raise; None: that it was closed.
        """
        try:
            await self._executor.run(self._close, reason)
        finally:
            if self._own_executor:
                self._executor.close()

    def _close(self, reason: RequestError | None) -> None:
        self._closed = reason or self._closed
        env, self._env, self._access = self._env, None, None
        self._tree = _without_environment(self._tree)
        if env is not None:
            in_environment("close", env.close)  # type: ignore[attr-defined]

    async def render(self, lanes: Sequence[int]) -> list[Any]:
        """Return what `render()` gives now for some lanes, copied."""
        return await self._executor.run(self._render, lanes)

    def _render(self, lanes: Sequence[int]) -> list[Any]:
        self._require()
        access: Any = self._access
        frames: list[Any] = in_environment("render", access.draw, lanes)
        return frames

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self._tree

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property for which code of the environment runs."""
        return await self._executor.run(self._answer_property, request)

    def _answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        self._require()
        return in_environment("reading its properties", self._tree.answer, request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        return await self._executor.run(self._call, request)

    def _call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        self._require()
        access: Any = self._access
        response: bridge_pb2.CallResponse = in_environment(f"call of {request.name}", access.call, request)
        return response


def _without_environment(tree: PropertyTree) -> PropertyTree:
    """Return a copy of a property tree that keeps no reference to the environment."""

    def closed(*arguments: Any) -> Any:
        raise RequestError(Code.FAILED_PRECONDITION, "the environment was closed")

    leaves = [dataclasses.replace(leaf, read=closed) if leaf.in_environment else leaf for leaf in tree.leaves]
    families = [
        dataclasses.replace(family, read=closed, write=closed, names=closed, find=closed) for family in tree.families
    ]
    return PropertyTree(leaves, families)


class LocalEnv(LocalBase[Any]):
    """A `gymnasium.Env` of this process."""

    def __init__(self, env: gymnasium.Env[Any, Any], executor: Executor, *, own_executor: bool = False) -> None:
        super().__init__(env, EnvAccess(env), executor, own_executor)
        self.observation_space = published_space(env.observation_space)
        self.action_space = published_space(env.action_space)
        self.reward_space = reward_space_of(env)

    @property
    def lanes(self) -> list[Any]:
        """The environments that a world steps separately: this one."""
        return [self]


class LocalLane(LocalEnv):
    """One environment of a SyncVectorEnv, reset and stepped by itself.

    Args:
        vector: The vector environment, which owns it.
        lane: Its number.
    """

    def __init__(self, vector: LocalVectorEnv, lane: int) -> None:
        self._vector, self._lane = vector, lane
        self._executor, self._own_executor = vector._executor, False  # noqa: SLF001 - a part of it
        self.times, self.notes = vector.times, vector.notes
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self.reward_space = vector.reward_space

    @property
    def _env(self) -> Any:  # type: ignore[override]
        vector = self._vector._env  # noqa: SLF001 - a part of it
        return None if vector is None else vector.envs[self._lane]

    @property
    def _closed(self) -> RequestError:  # type: ignore[override]
        return self._vector._closed  # noqa: SLF001 - a part of it


class LocalVectorEnv(LocalBase[Any]):
    """A `gymnasium.vector.VectorEnv` of this process. The infos that it returns are joined without loss.

    An AsyncVectorEnv is of no use any more once one of its lanes has raised, since that ended the lane's process: the
    next reset makes another one.

    Args:
        env: The environment, owned by this object from here on.
        executor: Runs its calls.
        own_executor: Whether the executor serves nothing else, and ends with the environment.
        make: Makes another one.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        executor: Executor,
        *,
        own_executor: bool = False,
        make: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(env, EnvAccess(env), executor, own_executor)
        self._make = make
        self._broken: RequestError | None = None
        self.reward_space = reward_space_of(env)
        prepare_lanes(env, self.reward_space)
        self.num_envs = env.num_envs
        self.observation_space = published_space(env.single_observation_space)
        self.action_space = published_space(env.single_action_space)
        self.autoreset_mode = (env.metadata or {}).get("autoreset_mode")
        self.kind = type(env.unwrapped).__name__
        self.resets_lanes = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._collects = collect_infos(env)
        self._text = str(env)
        self.lanes = [LocalLane(self, lane) for lane in range(env.num_envs)] if isinstance(env, SyncVectorEnv) else []
        """What a real-time world steps one by one; empty where the lanes are stepped together alone."""

    def __str__(self) -> str:
        return self._text

    def _reset(self, seed: Any, options: Any) -> Any:
        if self._broken is not None:
            in_environment("its construction", self._replace)
            options = without_reset_mask(options)
        try:
            observation, info = super()._reset(seed, options)
        except RequestError as error:
            self._note_failure(error)
            raise
        return observation, self._joined(info)

    def _step(self, action: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            observation, reward, terminated, truncated, info = super()._step(action)
        except RequestError as error:
            self._note_failure(error)
            raise
        return observation, reward, terminated, truncated, self._joined(info)

    def _call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        if self._broken is not None:
            raise self._broken
        try:
            return super()._call(request)
        except RequestError as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: RequestError) -> None:
        self._broken = refusal_of_broken_lanes(self._require(), error)

    def _replace(self) -> None:
        """Make the lanes anew."""
        if self._make is None or self._env is None or self._access is None:
            return
        self._env.close(terminate=True)
        env = self._make()
        prepare_lanes(env, self.reward_space)
        self._collects = collect_infos(env)
        self._env, self._broken = env, None
        self._access.replace(env)

    def _joined(self, info: Any) -> Any:
        return join_infos(info, self.num_envs) if self._collects else info


class Lanes:
    """Environments with a thread or a process each, as the lanes of one world.

    Args:
        lanes: The environments, all of one kind.
        scheduler: Runs calls of several lanes side by side.
    """

    kind = "Lanes"

    def __init__(self, lanes: list[Any], scheduler: Scheduler) -> None:
        self.lanes = lanes
        self.num_envs = len(lanes)
        self.observation_space, self.action_space = lanes[0].observation_space, lanes[0].action_space
        self._scheduler = scheduler
        self.reward_space = lanes[0].reward_space
        self.times = StepTimes()
        self.notes: list[str] = []
        for lane in lanes:
            lane.times, lane.notes = self.times, self.notes

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if one of their processes has ended; None: none has."""
        return next((lane.ended for lane in self.lanes if lane.ended is not None), None)

    async def close(self, reason: RequestError | None = None) -> None:
        """Close all environments."""
        await gather(self._scheduler, [lane.close(reason) for lane in self.lanes])

    async def render(self, lanes: Sequence[int]) -> list[Any]:
        """Return what `render()` gives now for some lanes, copied."""
        drawn = await gather(self._scheduler, [self.lanes[lane].render([0]) for lane in lanes])
        return [frame for frames in drawn for frame in frames]

    def properties(self) -> PropertyTree:
        """Return what the environments add to the tree below `world`."""
        first: PropertyTree = self.lanes[0].properties()
        number = Property("world.num_envs", NUMBER, "the number of lanes", lambda: self.num_envs)
        return first.merged(PropertyTree([number]))

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read or write a property of all lanes, whose value is a list with an item a lane; list that of the first."""
        kind = request.WhichOneof("payload")
        responses: list[properties_pb2.PropertyResponse]
        if kind == "list_property" or request.read_property.key == "world.controls":
            listed: properties_pb2.PropertyResponse = await self.lanes[0].answer_property(request)
            return listed
        requests = [request] * self.num_envs
        if kind == "write_property":
            value = read_encoded(request.write_property.value)
            if not isinstance(value, list) or len(value) != self.num_envs:
                raise RequestError(
                    Code.INVALID_ARGUMENT, f"expected a list of {self.num_envs} values, one a lane, got {value!r:.80}"
                )
            requests = [properties_pb2.PropertyRequest() for _ in value]
            for part, item in zip(requests, value, strict=True):
                part.write_property.key = request.write_property.key
                part.write_property.value.CopyFrom(encoded([item]))
        responses = await gather(
            self._scheduler,
            [lane.answer_property(part) for lane, part in zip(self.lanes, requests, strict=True)],
        )
        if kind == "read_property":
            merged = [item for response in responses for item in read_encoded(response.read_property.value)]
            responses[0].read_property.value.CopyFrom(encoded(merged))
        return responses[0]

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names; none: on all."""
        wrong = [lane for lane in request.lanes if not 0 <= lane < self.num_envs]
        if wrong:
            text = f"expected lanes 0 to {self.num_envs - 1}, got {list(request.lanes)}"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        chosen = list(request.lanes) or list(range(self.num_envs))
        part = bridge_pb2.CallRequest()
        part.CopyFrom(request)
        del part.lanes[:]
        responses = await gather(self._scheduler, [self.lanes[lane].call(part) for lane in chosen])
        return bridge_pb2.CallResponse(
            results=[result for response in responses for result in response.results],
            is_method=responses[0].is_method,
        )


class LocalParallelEnv(LocalBase[Any]):
    """A PettingZoo ParallelEnv of this process; `reset` and `step` return which agents are alive as a last item."""

    def __init__(self, env: Any, executor: Executor, *, own_executor: bool = False) -> None:
        super().__init__(env, ParallelAccess(env), executor, own_executor)
        self.possible_agents: list[Any] = list(env.possible_agents)
        self._spaces = {
            agent: (published_space(env.observation_space(agent)), published_space(env.action_space(agent)))
            for agent in self.possible_agents
        }

    def observation_space(self, agent: Any) -> Any:
        """Return an agent's observation space."""
        return self._spaces[agent][0]

    def action_space(self, agent: Any) -> Any:
        """Return an agent's action space."""
        return self._spaces[agent][1]

    def _reset(self, seed: Any, options: Any) -> Any:
        observations, infos = super()._reset(seed, options)
        return observations, infos, list(self._require().agents)

    def _step(self, action: Any) -> Any:
        return *super()._step(action), list(self._require().agents)


async def adopt(
    make: Callable[[], Any], executor: Executor, *, own_executor: bool = False, parallel: bool = False
) -> LocalEnv | LocalVectorEnv | LocalParallelEnv:
    """Make an environment in the thread of an executor, and return what worlds see of it.

    Args:
        make: Returns a `gymnasium.Env`, a `VectorEnv`, or with `parallel` a PettingZoo ParallelEnv.
        executor: Runs this call and all others of the environment.
        own_executor: Whether the executor ends with the environment.
        parallel: Which kind of environment it is.

    Raises:
        RequestError: It could not be made.
    """

    def here() -> LocalEnv | LocalVectorEnv | LocalParallelEnv:
        env = make()
        if parallel:
            return LocalParallelEnv(env, executor, own_executor=own_executor)
        if isinstance(env, VectorEnv):
            return LocalVectorEnv(env, executor, own_executor=own_executor, make=make)
        return LocalEnv(env, executor, own_executor=own_executor)

    try:
        return await executor.run(in_environment, "its construction", here)
    except BaseException:
        if own_executor:
            executor.close()
        raise
