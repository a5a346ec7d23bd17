"""Access to an environment besides reset and step: properties, attributes, methods, frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from bridge.encoding import values
from bridge.encoding.properties import ENCODED, NUMBER, TEXT, Family, Property, PropertyTree
from bridge.encoding.random_state import state_of
from bridge.encoding.space_json import space_to_json
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2
from bridge.worlds.attributes import find_attribute, list_attributes
from bridge.worlds.base import failures_in
from bridge.worlds.rewards import reward_space_of
from bridge.worlds.watching.controls import controls_of

__all__ = ["EnvAccess", "ParallelAccess"]


class EnvAccess:
    """The properties, attributes and methods of a Gymnasium environment, or of a vector of them.

    Its methods are called in the thread that the environment belongs to.

    Args:
        env: The environment.
    """

    def __init__(self, env: Any) -> None:
        self._env: Any = env
        self._lanes: int | None = env.num_envs if isinstance(env, VectorEnv) else None

    def replace(self, env: Any) -> None:
        """Give access to another environment, made as the first one was; its property tree stays valid."""
        self._env = env

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        env = self._env
        spec = env.spec
        spaces = (
            (env.single_observation_space, env.single_action_space)
            if self._lanes
            else (env.observation_space, env.action_space)
        )
        return PropertyTree(
            [
                _fixed("env_id", TEXT, "the environment's id; empty where it has none", spec.id if spec else ""),
                _fixed("num_envs", NUMBER, "the number of lanes; 0 for a single environment", self._lanes or 0),
                _fixed("observation_space", TEXT, "one environment's exact space, as JSON", space_to_json(spaces[0])),
                _fixed("action_space", TEXT, "one environment's exact space, as JSON", space_to_json(spaces[1])),
                _fixed("reward_space", TEXT, "the space of array rewards, as JSON; empty: numbers", _reward_space(env)),
                _fixed("metadata", ENCODED, "the environment's metadata", plain_dict(env.metadata)),
                _fixed("render_mode", TEXT, "the render mode; empty where there is none", env.render_mode or ""),
                _fixed("spec", ENCODED, "what the environment's registration says", _describe_spec(spec)),
                _live("frame", "what render() gives now, a value for each lane", self.frame),
                Property(
                    "world.controls", TEXT, "what keys do for a person, as JSON", self._controls, in_environment=True
                ),
                _live("random", "seed and state of the random generator, a dict for each lane", self._random),
                _fixed("wrappers", ENCODED, "the classes of the wrappers around one environment", self._wrappers()),
            ],
            [self._attributes("an attribute, a value for each lane")],
        )

    def draw(self, lanes: Sequence[int]) -> list[Any]:
        """Return what `render()` gives now for some lanes, copied; no other lanes are drawn where that can be."""
        vector = self._env.unwrapped if self._lanes else None
        if isinstance(vector, SyncVectorEnv):
            with failures_in("render"):
                frames = [vector.envs[lane].render() for lane in lanes]
        else:
            found = self.frame()
            frames = [found[lane] for lane in lanes]
        return [frame if frame is None else np.array(frame) for frame in frames]

    def frame(self) -> Any:
        """Return what `render()` gives now, a list with an entry a lane."""
        with failures_in("render"):
            frame = self._env.render()
        if not self._lanes:
            return [frame]
        return [None] * self._lanes if frame is None else list(frame)

    def _controls(self) -> str:
        return controls_of(self._env)

    def _random(self) -> list[dict[str, Any]]:
        with failures_in("np_random"):
            generators, seeds = self._env.np_random, self._env.np_random_seed
        if not isinstance(generators, tuple):  # one environment, or lanes that share a generator
            generators, seeds = (generators,) * (self._lanes or 1), (seeds,) * (self._lanes or 1)
        try:
            return [state_of(generator, seed) for generator, seed in zip(generators, seeds, strict=True)]
        except TensorError as error:
            raise RequestError(Code.FAILED_PRECONDITION, f"the random state cannot be sent: {error}") from error

    def _wrappers(self) -> list[str]:
        env = self._env
        if self._lanes:
            vector = env.unwrapped
            if not isinstance(vector, SyncVectorEnv):
                return []
            env = vector.envs[0]
        names: dict[str, None] = {}
        while isinstance(env, gymnasium.Wrapper):
            names.update((f"{kind.__module__}:{kind.__qualname__}", None) for kind in type(env).__mro__)
            env = env.env
        return list(names)

    def _attributes(self, description: str) -> Family:
        def names() -> list[str]:
            with failures_in("listing its attributes"):
                return list_attributes(self._env)

        def find(name: str) -> None:
            refuse_private(name)
            with failures_in(f"looking for {name}"):
                find_attribute(self._env, name)

        return Family("world.attributes", description, self._get_attr, self._set_attr, names, find, in_environment=True)

    def _get_attr(self, name: str) -> Any:
        response = self.call(bridge_pb2.CallRequest(name=name))
        return [values.from_value(result) for result in response.results]

    def _set_attr(self, name: str, value: Any) -> None:
        refuse_private(name)
        count = self._lanes or 1
        if not isinstance(value, list) or len(value) != count:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected a list of {count} values, one a lane, got {value!r:.80}"
            )
        with failures_in(f"setting {name}"):
            self._set(name, value)

    def _set(self, name: str, value: list[Any]) -> None:
        if self._lanes:
            self._env.set_attr(name, value)
        else:
            self._env.set_wrapper_attr(name, value[0])

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        refuse_private(request.name)
        try:
            args = [values.from_value(item) for item in request.args.items]
            kwargs = {
                key: values.from_value(item)
                for key, item in zip(request.kwargs.keys, request.kwargs.values, strict=True)
            }
        except (TensorError, ValueError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad arguments for {request.name}: {error}") from error
        lanes = self._check_lanes(request.lanes)
        with failures_in(f"call of {request.name}"):
            if request.look:
                results = self._find(request.name, lanes)
                if results and callable(results[0]):
                    return bridge_pb2.CallResponse(is_method=True)
            else:
                results = self._call(request.name, args, kwargs, lanes)
        try:
            return bridge_pb2.CallResponse(results=[values.to_value(result) for result in results])
        except TensorError as error:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"the result of {request.name} cannot be sent: {error}"
            ) from error

    def _check_lanes(self, lanes: Sequence[int]) -> list[int]:
        """Return the lanes to call; all of them where none is named."""
        count = self._lanes or 1
        wrong = [lane for lane in lanes if not 0 <= lane < count]
        if wrong:
            raise RequestError(Code.INVALID_ARGUMENT, f"expected lanes 0 to {count - 1}, got {list(lanes)}")
        if set(lanes) >= set(range(count)) or not lanes:
            return list(lanes) or list(range(count))
        if not isinstance(self._env.unwrapped, SyncVectorEnv):
            raise RequestError(
                Code.UNIMPLEMENTED,
                f"the lanes of {type(self._env.unwrapped).__name__} are called all together; name all {count} of them",
            )
        return list(lanes)

    def _call(self, name: str, args: list[Any], kwargs: dict[str, Any], lanes: list[int]) -> list[Any]:
        if self._lanes and set(lanes) >= set(range(self._lanes)):
            first = getattr(self._env, "envs", ())
            if first:
                _look_up(lambda: first[0].get_wrapper_attr(name), name)
            results = list(self._env.call(name, *args, **kwargs))
            return [results[lane] for lane in lanes]
        return [value(*args, **kwargs) if callable(value) else value for value in self._find(name, lanes)]

    def _find(self, name: str, lanes: list[int]) -> list[Any]:
        """Return an attribute, or a method, of the environment or of some lanes, which must be here."""
        if self._lanes and not isinstance(self._env.unwrapped, SyncVectorEnv):
            raise RequestError(Code.UNIMPLEMENTED, f"the lanes of {type(self._env.unwrapped).__name__} are elsewhere")
        environments = [self._env.unwrapped.envs[lane] for lane in lanes] if self._lanes else [self._env]
        return [_look_up(partial(env.get_wrapper_attr, name), name) for env in environments]


class ParallelAccess(EnvAccess):
    """The access to a PettingZoo ParallelEnv; each agent has spaces of its own, which its world adds."""

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        metadata = plain_dict(getattr(self._env, "metadata", {}))
        render_mode = getattr(self._env, "render_mode", None) or ""
        return PropertyTree(
            [
                _fixed("env_id", TEXT, "the environment's id; empty where it has none", ""),
                _fixed("num_envs", NUMBER, "the number of lanes; 0 for a single environment", 0),
                _fixed("reward_space", TEXT, "the space of array rewards, as JSON; empty: numbers", ""),
                _fixed("metadata", ENCODED, "the environment's metadata", metadata),
                _fixed("render_mode", TEXT, "the render mode; empty where there is none", render_mode),
                _fixed("spec", ENCODED, "what the environment's registration says", None),
                _live("frame", "what render() gives now, in a list", self.frame),
            ],
            [self._attributes("an attribute, in a list of one")],
        )

    def _set(self, name: str, value: list[Any]) -> None:
        setattr(self._env.unwrapped, name, value[0])

    def _call(self, name: str, args: list[Any], kwargs: dict[str, Any], lanes: list[int]) -> list[Any]:
        (value,) = self._find(name, lanes)
        return [value(*args, **kwargs) if callable(value) else value]

    def _find(self, name: str, lanes: list[int]) -> list[Any]:
        return [_look_up(lambda: getattr(self._env, name), name)]


def _reward_space(env: Any) -> str:
    space = reward_space_of(env)
    return "" if space is None else space_to_json(space)


def _fixed(name: str, kind: str, description: str, value: Any) -> Property:
    """A property that is read once, when the environment has been made."""
    return Property(f"world.{name}", kind, description, lambda: value)


def _live(name: str, description: str, read: Callable[[], Any]) -> Property:
    """A property whose value is computed by the environment."""
    return Property(f"world.{name}", ENCODED, description, read, in_environment=True)


def _look_up(look: Callable[[], Any], name: str) -> Any:
    try:
        return look()
    except AttributeError as error:
        raise RequestError(Code.NOT_FOUND, f"the environment has no method or attribute {name!r}: {error}") from error


def refuse_private(name: str) -> None:
    """Raise PERMISSION_DENIED for a name that is not public."""
    if not name.isidentifier() or name.startswith("_"):
        raise RequestError(Code.PERMISSION_DENIED, f"expected the name of a public method or attribute, got {name!r}")


def plain_dict(data: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Return the entries of a dict that the values codec can encode; of None, as metadata may be, none."""
    if data is None:
        return {}
    return {key: value for key, value in data.items() if isinstance(key, str) and _plain(value)}


def _plain(value: Any) -> bool:
    try:
        values.to_value(value)
    except TensorError:
        return False
    return True


def _describe_spec(spec: Any) -> dict[str, Any] | None:
    """Return the fields of an EnvSpec that are valid for the client too."""
    if spec is None:
        return None
    facts = {
        "id": spec.id,
        "reward_threshold": spec.reward_threshold,
        "nondeterministic": spec.nondeterministic,
        "max_episode_steps": spec.max_episode_steps,
        "order_enforce": spec.order_enforce,
        "kwargs": {key: value for key, value in spec.kwargs.items() if _plain(value)},
    }
    return {key: value for key, value in facts.items() if _plain(value)}
