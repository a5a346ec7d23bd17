"""Environments in the thread that they belong to: resets, steps, frames, properties, attributes and methods.

The server and an isolated world's process use the same hosts: `bridge.core.worlds.local` calls them through an
executor, `bridge.core.worlds.isolated.child` for messages. `reset` and `step` raise whatever the environment raises.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from typing import Any, Generic, TypeVar, cast

import gymnasium
import numpy as np
from google.protobuf.message import DecodeError
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from bridge.core.encoding import values
from bridge.core.encoding.message_form import Origin
from bridge.core.encoding.names import NAMES, AttributeNames
from bridge.core.encoding.properties import ENCODED, NUMBER, TEXT, Family, Property, PropertyTree
from bridge.core.encoding.seeds import state_of
from bridge.core.encoding.space_json import space_to_json
from bridge.core.logs import SafeLog
from bridge.core.worlds import kinds
from bridge.core.worlds.base import failures_in
from bridge.core.worlds.environment import EnvFacts, Result, environment_properties
from bridge.core.worlds.kinds import GymEnv, Known, ParallelEnv
from bridge.core.worlds.messages import Callee, MessagePart, PartOutcome, SessionMessage
from bridge.errors import Code, RequestError, TensorError, UnsupportedSpaceError
from bridge.pb import bridge_pb2

__all__ = [
    "LANE_WRAPPERS",
    "AttributeList",
    "EnvHost",
    "Host",
    "ParallelHost",
    "checked_lanes",
    "checked_values",
    "look_up",
    "named_values",
    "no_episode",
    "refuse_private",
    "wrappers_by_lane",
]

LANE_WRAPPERS = "lane_wrappers"
"""The property below `world` with what `wrappers_by_lane` returns."""

_log = SafeLog(__name__)
_MOST_NAMES = 100
_MOST_ITEMS = 1000  # the items of a longer list or dict are not examined
E = TypeVar("E", bound=Known)
T = TypeVar("T")


class Host(abc.ABC, Generic[E]):
    """The base class of the hosts of all kinds of environments.

    Args:
        env: The environment, owned by this object from here on.
        facts: The environment's description.
        make: Makes another environment like it.
    """

    can_place = False
    """True if a message may put the environment, or one of the lanes, into another situation of a running episode."""
    can_place_all = False
    """True if a message may put all lanes into another situation together."""

    def __init__(self, env: E, facts: EnvFacts, make: Callable[[], Known]) -> None:
        self.env = env
        self.facts = facts
        self.make = make
        """Makes another environment like it."""
        self.result: Result | None = None
        """What `reset` or `step` returned last, set by the caller; None: no call yet, or the last call failed."""
        self._parts: dict[str, MessagePart] = {}
        self._message: SessionMessage | None = None
        """The message that is answered now, or was answered last."""
        self.fresh = True
        """True until the environment is reset, or a client calls a method or sets an attribute."""
        self._callees: dict[int, Callee] = {}
        """What is called in place of the environment, by lane."""
        self._placed: dict[int, tuple[Any, Any]] = {}
        """Observation and info, by lane, of the environments that the current message put into another situation."""
        self._origins: dict[int, Origin | None] = {}
        """When the environment was in that situation before, by lane."""
        self.lanes: Sequence[EnvHost] = ()
        """The hosts of lanes that can be stepped one by one; empty: one environment, or lanes without hosts."""
        self.notes: list[str] = []
        """Remarks for clients on what the environment returned."""
        self.failures: dict[int, str] = {}
        """Why lanes failed in the last call, by lane, if lanes fail alone; always the same dict."""
        self.names: AttributeList | None = None
        """The names of the environment's attributes; None: clients get no names, for example of lanes."""
        self.retried: list[str] = []
        """The errors of resets that were tried again, for the log; the logging code empties the list."""

    def reset(self, seed: object, options: Any) -> Result:
        """Reset the environment. As not every `reset` takes both arguments, only those that are given are passed."""
        given: dict[str, Any] = {} if seed is None else {"seed": seed}
        if options is not None:
            # A copy: an environment may remove what it has read, and other lanes, or the next attempt, get these too.
            given["options"] = dict(options)
        self.fresh = False
        result = cast("Result", self._callees.get(0, self.env).reset(**given))
        if self.names is not None:
            self.names.renew(kinds.attribute_layers(self.env))
        return result

    def step(self, action: Any) -> Result:
        """Step the environment."""
        result: Result = self.env.step(action)
        return result

    def close(self) -> None:
        """Close the parts of messages, then the environment."""
        parts, self._parts = self._parts, {}
        try:
            for part in parts.values():
                part.close()
        finally:
            self.env.close()

    # Messages: a host is the `Stage` of their parts

    @property
    def envs(self) -> Sequence[Any]:
        """The environments that are stepped one by one; empty: the lanes are in other processes."""
        return kinds.local_parts(self.env)

    @property
    def whole(self) -> Any:
        """The object that is stepped."""
        return self.env

    def intercept(self, lane: int, callee: Callee | None) -> None:
        """Call an object in place of an environment; None: call the environment itself again."""
        if callee is None:
            self._callees.pop(lane, None)
        else:
            self._callees[lane] = callee
        self._set_callee(lane, self.envs[lane] if callee is None else callee)

    def replace(self, lane: int, env: Any) -> None:
        """Step another environment from now on, and close the one that was stepped until now."""
        before = self.envs[lane]
        self._callees.pop(lane, None)
        self._set_env(lane, env)
        self._set_callee(lane, env)
        try:
            before.close()
        except Exception:  # the replaced environment is not stepped any more
            _log.exception("an environment that another one took the place of: its close() raised")

    def _set_callee(self, lane: int, callee: Any) -> None:
        raise RequestError(Code.UNIMPLEMENTED, f"{self.facts.kind} is not stepped through anything else")

    def _set_env(self, lane: int, env: Any) -> None:
        raise RequestError(Code.UNIMPLEMENTED, f"{self.facts.kind} is not replaced")

    def newest(self, lane: int | None) -> tuple[Any, Any]:
        """Return the last observation and info of an environment; raises RequestError if it runs no episode."""
        result = self.result
        if result is None or (len(result) > 2 and bool(result[2] or result[3])):
            raise no_episode(None)
        return result[0], result[-1]

    def check_place(self, lane: int | None = 0) -> None:
        """Raise RequestError if the current message may not put the environment into another situation."""
        message = self._message
        assert message is not None, "called by the part of a message"
        if not message.form.places:
            text = f"the form of {message.form.name!r} does not say places=True"
            raise RequestError(Code.UNIMPLEMENTED, text)
        if not (self.can_place_all if lane is None else self.can_place):
            raise RequestError(Code.UNIMPLEMENTED, f"{self.facts.kind} cannot be put into another situation")

    @property
    def moment(self) -> str:
        """A name for what the environments have done so far; empty: nothing keeps a record of it."""
        return "" if self._message is None else self._message.moment

    def place(self, lane: int | None, observation: Any, info: Any, origin: Origin | None = None) -> None:
        """Note that an environment, or all lanes, were put into another situation of a running episode."""
        self.check_place(lane)
        for each in range(self.facts.num_envs or 1) if lane is None else [lane]:
            own = origin if origin is None or lane is not None else dataclasses.replace(origin, lane=each)
            self._placed[each], self._origins[each] = (observation, info), own

    def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Have the part of a message answer a request. Converts what the part raises to RequestError."""
        name = message.form.name
        self._placed.clear()
        self._origins.clear()
        self._message = message
        with _failures_of(name):
            part = self._parts.get(name)
            if part is None:
                assert message.part is not None, "its handler answers alone"
                part = self._parts[name] = message.part(self)
            answer = part.answer(request)
            if not isinstance(answer, (bytes, bytearray)):
                raise TypeError(f"expected bytes as the answer, got {answer!r:.80} of type {type(answer).__name__}")
            if not self._placed:
                return PartOutcome(bytes(answer))
            lanes = tuple(sorted(self._placed))
            self.result = self._take_placed()
        if self.names is not None:
            self.names.renew(kinds.attribute_layers(self.env))
        return PartOutcome(bytes(answer), self.result, lanes, origins=tuple(self._origins[lane] for lane in lanes))

    def _take_placed(self) -> Result:
        """Return, in the form of a reset's result, what the environments in another situation observe."""
        return self._placed[0]

    # Properties

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        env, facts, spec = self.env, self.facts, kinds.spec_of(self.env)
        reward_space = "" if facts.reward_space is None else space_to_json(facts.reward_space)
        render_mode = kinds.read_attribute(env, "render_mode", None) or ""
        metadata = _plain_dict(kinds.metadata_of(env))
        if facts.autoreset is not None:
            metadata["autoreset_mode"] = facts.autoreset.value
        leaves = [
            _fixed("env_id", TEXT, "the environment's id; empty where it has none", spec.id if spec else ""),
            _fixed("num_envs", NUMBER, "the number of lanes; 0 for a single environment", facts.num_envs or 0),
            _fixed("reward_space", TEXT, "the space of array rewards, as JSON; empty: numbers", reward_space),
            _fixed("metadata", ENCODED, "the environment's metadata", metadata),
            _fixed("render_mode", TEXT, "the render mode; empty where there is none", render_mode),
            _fixed("spec", ENCODED, "what the environment's registration says", _describe_spec(spec)),
            _live("frame", ENCODED, "what render() gives now, a value for each lane", self.frame),
        ]
        access = self._get_attr, self._set_attr, self._names, self._look_for
        attributes = Family("world.attributes", "an attribute, a value for each lane", *access, in_environment=True)
        if not facts.agents:  # several agents have spaces of their own, which worlds add
            leaves += self._of_gymnasium()
        if facts.num_envs is None:  # vector environments have no attributes of their lanes
            names = self.names = AttributeList(kinds.attribute_layers(env))
            text = "the names of public attributes and methods, those of methods with (), separated by spaces"
            # Read without the environment, so that a join does not wait for a long step.
            leaves.append(Property(NAMES, TEXT, text, lambda: names.text))
        if facts.agents:
            about = "the space of what state() returns, as JSON; empty: none"
            leaves.append(_fixed("state_space", TEXT, about, _state_space_of(env)))
            leaves += self._told_by_features(of_agents=True)
        return PropertyTree(leaves, [attributes])

    def _of_gymnasium(self) -> list[Property]:
        """Return the properties that only environments with one agent have."""
        env: Any = self.env
        # The environment's own spaces: the facts have a standard space in place of one of a custom class.
        one = "single_" if isinstance(env, VectorEnv) else ""
        names = "observation_space", "action_space"
        spaces = {name: space_to_json(getattr(env, f"{one}{name}")) for name in names}
        # The wrappers of lanes in other processes are not known.
        wrappers = wrappers_by_lane(
            [_wrappers_of(part) for part in kinds.local_parts(env)] or [[]] * (self.facts.num_envs or 1)
        )
        return [
            *(_fixed(name, TEXT, "one environment's exact space, as JSON", space) for name, space in spaces.items()),
            *self._told_by_features(),
            _live("random", ENCODED, "seed and state of the random generator, a dict for each lane", self._random),
            _fixed("wrappers", ENCODED, "the classes of the wrappers around one environment", wrappers[0][0]),
            _fixed(LANE_WRAPPERS, ENCODED, "lists of wrappers' classes, and which of them each lane has", wrappers),
        ]

    def _told_by_features(self, *, of_agents: bool = False) -> list[Property]:
        """Return the features' properties of the environment; with several agents, those that are not per agent."""
        return [
            _live(each.name, TEXT, each.description, partial(self._read, each.read))
            for each in environment_properties()
            if not of_agents or each.read_agent is None
        ]

    def _read(self, read: Callable[[Any], object]) -> object:
        # `self.env` at the time of the call: the environment may have been replaced.
        return read(self.env)

    def _random(self) -> list[dict[str, object]]:
        env: Any = self.env
        with failures_in("np_random"):
            found = [kinds.each_lane(part, self.facts.num_envs or 1) for part in (env.np_random, env.np_random_seed)]
        try:
            return [state_of(generator, seed) for generator, seed in zip(*found, strict=True)]
        except TensorError as error:
            raise RequestError(Code.FAILED_PRECONDITION, f"the random state cannot be sent: {error}") from error

    def draw(self, lanes: Sequence[int]) -> list[object]:
        """Return copies of what `render()` returns now for some lanes; draws no other lanes where possible."""
        environments = kinds.local_parts(self.env)
        with failures_in("render"):
            frames = {lane: environments[lane].render() for lane in lanes} if environments else self.frame()
        return [None if frames[lane] is None else np.array(frames[lane]) for lane in lanes]

    def frame(self) -> list[object]:
        """Return what `render()` returns now, a list with one entry per lane."""
        with failures_in("render"):
            return [self.env.render()]

    # Attributes and methods

    def _names(self) -> list[str]:
        """Return the names of public attributes whose values can be sent, at most 100; runs no code of the environment.

        Those of the outermost wrapper come first. Of several lanes only the first is inspected, and no lane of another
        process.
        """
        found: dict[str, object] = {}
        with failures_in("listing its attributes"):
            for name, value, _ in named_values(kinds.attribute_layers(self.env)):
                # The outermost layer wins, as in an attribute look-up.
                found.setdefault(name, value)
            return [name for name, value in found.items() if _listed(value)][:_MOST_NAMES]

    def _look_for(self, name: str) -> None:
        """Raise NOT_FOUND if the environment has no attribute or method of this name."""
        refuse_private(name)
        with failures_in(f"looking for {name}"):
            layers = kinds.attribute_layers(self.env)
            # Lanes in other processes cannot be inspected: there the call itself fails.
            if layers and not any(kinds.has_attribute(layer, name) for layer in layers):
                raise RequestError(Code.NOT_FOUND, f"the environment has no method or attribute {name!r}")

    def _get_attr(self, name: str) -> list[object]:
        return [values.from_value(result) for result in self.call(bridge_pb2.CallRequest(name=name)).results]

    def _set_attr(self, name: str, value: object) -> None:
        refuse_private(name)
        with failures_in(f"setting {name}"):
            try:
                each = checked_values(value, self.facts.num_envs or 1)
                self.fresh = False
                for lane, callee in self._callees.items():
                    callee.changed(name, each[lane])
                self._set(name, each)
            except AttributeError as error:
                if not _raised_by_setattr(error):
                    raise
                text = f"the attribute {name!r} cannot be set: {error}"
                raise RequestError(Code.NOT_FOUND, text) from error

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        refuse_private(request.name)
        try:
            args = [values.from_value(item) for item in request.args.items]
            named = zip(request.kwargs.keys, request.kwargs.values, strict=True)
            kwargs = {key: values.from_value(item) for key, item in named}
        except (TensorError, ValueError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad arguments for {request.name}: {error}") from error
        count = self.facts.num_envs or 1
        lanes = checked_lanes(request.lanes, count)
        if len(set(lanes)) < count and not kinds.local_parts(self.env):
            text = f"the lanes of {self.facts.kind} are called all together; name all {count} of them"
            raise RequestError(Code.UNIMPLEMENTED, text)
        with failures_in(f"call of {request.name}"):
            if request.look:
                results = self._find(request.name, lanes)
                if results and callable(results[0]):
                    return bridge_pb2.CallResponse(is_method=True)
            else:
                self.fresh = False
                for lane in self._callees.keys() & set(lanes):
                    self._callees[lane].called(request)
                results = self._call(request.name, args, kwargs, lanes)
        try:
            return bridge_pb2.CallResponse(results=[values.to_value(result) for result in results])
        except TensorError as error:
            text = f"the result of {request.name} cannot be sent: {error}"
            raise RequestError(Code.INVALID_ARGUMENT, text) from error

    def _call(self, name: str, args: list[object], kwargs: dict[str, object], lanes: list[int]) -> list[object]:
        return [value(*args, **kwargs) if callable(value) else value for value in self._find(name, lanes)]

    def _find(self, name: str, lanes: list[int]) -> list[object]:
        """Return an attribute or a method of some lanes, which must be in this process."""
        parts = kinds.local_parts(self.env)
        if not parts:
            raise RequestError(Code.UNIMPLEMENTED, f"the lanes of {self.facts.kind} are elsewhere")
        return [look_up(partial(kinds.attribute_of, parts[lane], name), name) for lane in lanes]

    @abc.abstractmethod
    def _set(self, name: str, value: list[object]) -> None:
        """Set an attribute, given a value for each lane."""


class EnvHost(Host[GymEnv]):
    """One environment."""

    can_place = True

    def __init__(self, env: GymEnv, facts: EnvFacts, make: Callable[[], Known]) -> None:
        super().__init__(env, facts, make)
        self.step = env.step  # type: ignore[method-assign]  # one call less in each step

    def _set_callee(self, lane: int, callee: Any) -> None:
        self.step = callee.step  # type: ignore[method-assign]

    def _set_env(self, lane: int, env: Any) -> None:
        self.env = env

    def _set(self, name: str, value: list[object]) -> None:
        kinds.set_attribute(self.env, name, value[0])


class ParallelHost(Host[ParallelEnv]):
    """A PettingZoo ParallelEnv; `reset` and `step` return which agents are alive as a last item."""

    can_place = True

    def __init__(self, env: ParallelEnv, facts: EnvFacts, make: Callable[[], Known]) -> None:
        super().__init__(env, facts, make)
        self._callee: Any = env
        """What is stepped."""

    def reset(self, seed: object, options: object) -> Result:
        """Reset the environment."""
        observations, infos = super().reset(seed, options)
        # A copy, because environments may change the list in their next step.
        return observations, infos, list(self.env.agents)

    def step(self, action: Any) -> Result:
        """Step the environment."""
        return *self._callee.step(action), list(self.env.agents)

    def newest(self, lane: int | None) -> tuple[Any, Any]:
        """Return the last observations and infos by agent; raises RequestError where no agent is alive."""
        result = self.result
        if result is None or not result[-1]:
            raise no_episode(None)
        observations, *_, infos, alive = result
        # As a reset returns them: without the agents that have ended.
        seen, told = ({agent: part[agent] for agent in alive if agent in part} for part in (observations, infos))
        return seen, told

    def _take_placed(self) -> Result:
        return *self._placed[0], list(self.env.agents)

    def _set_callee(self, lane: int, callee: Any) -> None:
        self._callee = callee

    def _set_env(self, lane: int, env: Any) -> None:
        self.env = env

    def _set(self, name: str, value: list[object]) -> None:
        kinds.set_attribute(self.env, name, value[0])


def no_episode(lane: int | None) -> RequestError:
    """Return the error for a request that needs a running episode."""
    where = "no episode runs" if lane is None else f"no episode runs in lane {lane}"
    return RequestError(Code.FAILED_PRECONDITION, f"{where}: the last one has ended, or none has begun; reset first")


@contextlib.contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Convert what the part of a message raises to RequestError: it is no failure of the environment or an episode."""
    try:
        yield
    except RequestError:
        raise
    except DecodeError as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"the message {name!r} cannot be read: {error}") from error
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception(error))
        raise RequestError(
            Code.INTERNAL, f"the message {name!r} raised {type(error).__name__}: {error}\n{text}"
        ) from error


def checked_lanes(lanes: Sequence[int], count: int) -> list[int]:
    """Return the lanes that a request names, or all `count` lanes if it names none. Raises RequestError."""
    if any(not 0 <= lane < count for lane in lanes):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected lanes 0 to {count - 1}, got {list(lanes)}")
    return list(lanes) or list(range(count))


def checked_values(value: object, count: int) -> list[object]:
    """Return the values of a request, one for each of `count` lanes. Raises RequestError."""
    if not isinstance(value, list) or len(value) != count:
        raise RequestError(Code.INVALID_ARGUMENT, f"expected a list of {count} values, one a lane, got {value!r:.80}")
    return value


def refuse_private(name: str) -> None:
    """Raise PERMISSION_DENIED for a name that is not public."""
    if not name.isidentifier() or name.startswith("_"):
        raise RequestError(Code.PERMISSION_DENIED, f"expected the name of a public method or attribute, got {name!r}")


def _wrappers_of(env: object) -> list[str]:
    """Return the classes of the wrappers around one environment, and their bases, as `module:name`."""
    names: dict[str, None] = {}
    while isinstance(env, gymnasium.Wrapper):
        names.update((f"{kind.__module__}:{kind.__qualname__}", None) for kind in type(env).__mro__)
        env = env.env
    return list(names)


def wrappers_by_lane(lanes: Sequence[list[str]]) -> tuple[list[list[str]], list[int]]:
    """Return the different lists among those of the lanes, and each lane's index in them.

    Lanes nearly always have the same wrappers: then the names of a thousand lanes need no more bytes than those of one.
    """
    different: list[list[str]] = []
    for found in lanes:
        if found not in different:
            different.append(found)
    return different, [different.index(found) for found in lanes]


def _fixed(name: str, kind: str, description: str, value: object) -> Property:
    """Return a property with a constant value, read when the environment has been made."""
    return Property(f"world.{name}", kind, description, lambda: value)


def _live(name: str, kind: str, description: str, read: Callable[[], object]) -> Property:
    """Return a property whose value the environment computes."""
    return Property(f"world.{name}", kind, description, read, in_environment=True)


def look_up(look: Callable[[], T], name: str) -> T:
    """Return the result of an attribute look-up. Raises NOT_FOUND if the environment has no attribute of that name."""
    try:
        return look()
    except AttributeError as error:
        raise RequestError(Code.NOT_FOUND, f"the environment has no method or attribute {name!r}: {error}") from error


def _raised_by_setattr(error: AttributeError) -> bool:
    """True if Python refused to set an attribute, such as one without a setter; False: the environment's code did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    # The functions of this package and of Gymnasium that call `setattr`; an environment may use the same names.
    package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("bridge", "gymnasium") and trace.tb_frame.f_code.co_name in (
        "set_attr",
        "set_attribute",
        "set_wrapper_attr",
    )


def _plain_dict(data: Mapping[Any, object]) -> dict[str, object]:
    """Return the entries of a dict that the values codec can encode."""
    return {key: value for key, value in data.items() if isinstance(key, str) and _travels(value)}


def _state_space_of(env: Any) -> str:
    """Return the space of an environment's global state as JSON; "": there is none, or it cannot be sent."""
    try:
        space = kinds.read_attribute(env, "state_space", None)
        return space_to_json(space) if isinstance(space, gymnasium.Space) else ""
    except (NotImplementedError, UnsupportedSpaceError):  # the environment can be played without it
        return ""


def _describe_spec(spec: EnvSpec | None) -> dict[str, object] | None:
    """Return the fields of an EnvSpec that are valid for the client too."""
    if spec is None:
        return None
    names = "id", "reward_threshold", "nondeterministic", "max_episode_steps", "order_enforce"
    return _plain_dict({**{name: getattr(spec, name) for name in names}, "kwargs": _plain_dict(spec.kwargs)})


# Attributes


def _listed(value: object) -> bool:
    """True if an attribute with this value is listed: the value can be sent, and is not too large to examine.

    None is not listed: any object may replace it later, such as the window of an environment once it has drawn.
    """
    is_large = isinstance(value, (list, tuple, dict)) and len(value) > _MOST_ITEMS
    return value is not None and not is_large and _travels(value)


def _travels(value: object) -> bool:
    """True if the values codec can encode a value, without copying large arrays."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = np.empty(0, value.dtype)
    try:
        values.to_value(value)
    except TensorError:
        return False
    return True


_METHODS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    classmethod,
    staticmethod,
    partialmethod,
)
# The attributes of every Gymnasium environment and wrapper, and `env`: a loop that looks for the innermost environment
# by `hasattr(env, "env")` must end at the remote environment.
_OF_ALL = frozenset((*dir(gymnasium.Env), *dir(gymnasium.Wrapper), "env"))


def named_values(layers: Sequence[object]) -> Iterator[tuple[str, object, bool]]:
    """Yield each public name of some layers, the outermost first, with its value and whether a class defines it.

    The first occurrence of a name hides the later ones. A value of a class may be a descriptor: no property is run.
    """
    for layer in layers:
        for owner in (layer, *type(layer).__mro__):
            # A copy of the items: another thread may add some.
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(name, str) and not name.startswith("_"):
                    yield name, value, owner is not layer


class AttributeList:
    """The names of attributes and methods that clients get.

    Args:
        layers: The wrappers, the outermost first, and the environment. This object keeps no reference to them.
    """

    def __init__(self, layers: Sequence[object]) -> None:
        self._seen: list[frozenset[str]] = []
        self.text = AttributeNames()
        """The names in the form that is sent."""
        self.renew(layers)

    def renew(self, layers: Sequence[object]) -> bool:
        """Renew the names; return True if a layer has other attributes. Takes some microseconds if none has."""
        # Classes do not change, and most environments have all their attributes from their construction on.
        dicts = [getattr(layer, "__dict__", {}) for layer in layers]
        if len(dicts) == len(self._seen) and all(map(_same, dicts, self._seen)):
            return False
        self._seen = [frozenset(each) for each in dicts]
        names: dict[str, bool] = {}
        for name, value, of_class in named_values(layers):
            if name not in _OF_ALL and name.isidentifier():
                # Any object may replace a function in an instance: only a function of a class is surely a method.
                names.setdefault(name, of_class and isinstance(value, _METHODS))
        self.text = AttributeNames.of(names)
        return True


def _same(attributes: Any, names: frozenset[str]) -> bool:
    # The lengths first: they nearly always differ if the names do.
    return len(attributes) == len(names) and attributes.keys() == names
