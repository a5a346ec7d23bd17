"""The interface of environments to worlds: a description, and calls that are awaited.

A world steps an `Environment` and need not know where it lives: `bridge.core.worlds.local` calls one of this process in
the thread that it belongs to, `bridge.core.worlds.isolated.env` one in a process of its own, which `Isolation` bounds.
Whoever stands between a world and its environment (a recording, people who watch) is an `EnvironmentProxy`, which hands
on what it does not change.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from bridge.core.encoding.properties import PropertyTree
from bridge.core.extras import provided
from bridge.core.samples import Samples
from bridge.core.worlds.scheduling import Executor
from bridge.errors import RequestError, SettingError
from bridge.pb import bridge_pb2, properties_pb2

if TYPE_CHECKING:
    from bridge.core.worlds.messages import PartOutcome, SessionMessage

__all__ = [
    "CALL_TIMEOUT",
    "IMMUTABLE",
    "Call",
    "EnvFacts",
    "Environment",
    "EnvironmentProperty",
    "EnvironmentProxy",
    "Isolation",
    "Job",
    "Result",
    "Spaces",
    "StepTimes",
    "Transition",
    "environment_properties",
    "kept",
    "start_method",
]

T = TypeVar("T")
Call: TypeAlias = Coroutine[Any, None, T]
"""A call of an environment, to be awaited."""
Result: TypeAlias = tuple[Any, ...]
"""The result of `reset` or `step` of the user's environment, followed by the living agents if it has several."""
IMMUTABLE = frozenset(
    (int, float, bool, str, bytes, type(None), np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_)
)
"""Types of values that need no copy."""
Spaces: TypeAlias = tuple[Space[object], Space[object]]
"""Observation space and action space."""


@dataclasses.dataclass(frozen=True)
class Transition:
    """The result of a frame for one environment, or for one agent of several."""

    observation: object
    """An element of the observation space."""
    reward: Any = 0.0
    """The reward of this frame, a number of any type, in real time a float; 0.0 in the first frame of an episode."""
    terminated: bool = False
    """True if the episode terminated in this frame."""
    truncated: bool = False
    """True if the episode was truncated in this frame."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The info, a dict."""
    missing: Sequence[str] = ()
    """Of one of several agents: what the environment did not return for it, as `StepInfo` says."""

    @property
    def ended(self) -> bool:
        """True if the episode ended in this frame."""
        return self.terminated or self.truncated


@dataclasses.dataclass(frozen=True)
class Job:
    """A reset or a step that is due, of an environment or of a lane of it."""

    lane: int
    episode: int
    """The episode that it is for."""
    kind: str
    """`reset` or `step`."""
    action: object = None
    seed: int | None = None
    options: object = None

    @property
    def actions(self) -> Mapping[str, object]:
        """The actions of several agents by name; of a reset there are none."""
        return self.action if isinstance(self.action, Mapping) else {}


class StepTimes:
    """The seconds that the calls of `reset` and of `step` took."""

    def __init__(self) -> None:
        self.reset = Samples()
        self.step = Samples()

    def summary(self) -> dict[str, dict[str, float]]:
        """Return `count`, `p50`, `p90`, `p99` and `max` of each, in seconds."""
        return {"step": self.step.summary(), "reset": self.reset.summary()}


@dataclasses.dataclass(frozen=True)
class EnvFacts:
    """The facts about an environment that a world needs without calling it. They can be pickled."""

    kind: str
    """The class of the environment, for messages."""
    spaces: Spaces
    """Of one environment, that is of one lane; of several agents those of the first."""
    agents: Mapping[object, Spaces] = dataclasses.field(default_factory=dict)
    """The spaces of each agent, by the environment's own ids; empty: it is no environment of several agents."""
    num_envs: int | None = None
    """How many lanes one call steps; None: it is a single environment, or one of several agents."""
    reward_space: Space[object] | None = None
    """Of array rewards; None: rewards are numbers."""
    autoreset: AutoresetMode | None = None
    """When a lane that ended begins anew; None: it has no lanes, or does not say."""
    resets_lanes: bool = False
    """True if some lanes can be reset alone, by the option `reset_mask`, each with a seed of its own."""
    steps_lanes: bool = False
    """True if each lane can be stepped by itself."""
    name: str = ""
    """How the metadata of an environment of several agents call it, such as `simple_tag_v3`."""
    default_actions: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Of several agents what each does that nobody plays, by name; empty: it is not known."""
    action_names: Sequence[str] | None = None
    """What the actions of each of several agents are called, in their order; None: it is not known."""

    @property
    def observation_space(self) -> Space[object]:
        """One environment's observation space."""
        return self.spaces[0]

    @property
    def action_space(self) -> Space[object]:
        """One environment's action space."""
        return self.spaces[1]

    def named_spaces(self) -> Iterator[tuple[str, Space[object]]]:
        """Yield all spaces, each with a name for error messages."""
        for agent, pair in self.agents.items() if self.agents else [("", self.spaces)]:
            for part, space in zip(("observation", "action"), pair, strict=True):
                yield f"{agent}'s {part}" if self.agents else part, space

    @property
    def of_lane(self) -> EnvFacts:
        """Return the facts of one lane that is stepped by itself."""
        return dataclasses.replace(self, num_envs=None, autoreset=None, resets_lanes=False, steps_lanes=False)


class Environment(Protocol):
    """An environment, as every world uses it."""

    facts: EnvFacts
    """Its description."""
    executor: Executor
    """Runs functions in the thread that calls the environment, if it has one of its own; else in the server's."""
    times: StepTimes
    """How long its calls took."""
    notes: list[str]
    """Remarks for clients on what it returned; whoever tells them takes them."""
    failures: dict[int, str]
    """Why lanes failed in the last call, by lane, where each fails alone; always the same object."""
    retried: list[str]
    """What resets of such lanes raised that were tried again; whoever logs them takes them."""

    @property
    def step_in_row(self) -> Callable[[Any], Result] | None:
        """Does as `step`, at once, where the executor would call it; None: `step` is to be awaited.

        What it returns stays as it is while other environments are stepped, which may share memory with this one.
        """

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if the environment's process has ended; None: it has not."""

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset it, or where `facts.steps_lanes` one lane by itself."""

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step it, or where `facts.steps_lanes` one lane by itself."""

    def close(self, reason: RequestError | None = None) -> Call[None]:
        """Close it and give it up; later calls raise `reason`.

        Raises:
            RequestError: What its own `close` raised; it is given up all the same.
        """

    def render(self, lanes: Sequence[int]) -> Call[list[object]]:
        """Return what `render()` gives now for some lanes, copied; [0] for a single environment."""

    def properties(self) -> PropertyTree:
        """Return what it adds to the tree below `world`."""

    def answer_property(self, request: properties_pb2.PropertyRequest) -> Call[properties_pb2.PropertyResponse]:
        """Read, write or list a property for which code of the environment runs."""

    def call(self, request: bridge_pb2.CallRequest) -> Call[bridge_pb2.CallResponse]:
        """Call a public method, or read a public attribute, on the lanes that the request names; none: on all."""

    @property
    def home(self) -> object:
        """Where it lives: equal for all environments that share a process."""

    def run_message(self, message: SessionMessage, request: bytes) -> Call[PartOutcome]:
        """Have the part of a message beside it answer a request.

        Raises:
            RequestError: What the part raised; the environment is as it was, as far as the part has left it so.
        """


class EnvironmentProxy:
    """An environment that stands before another one and does as that does. Subclasses change what they are for.

    Args:
        env: The other one.
    """

    step_in_row: Callable[[Any], Result] | None = None
    """None, whatever the other one has: subclasses change `step`."""

    def __init__(self, env: Environment) -> None:
        self.inner = env
        """The environment that does what is asked."""
        self.facts = env.facts
        self.executor = env.executor
        self.times = env.times
        self.notes = env.notes
        self.failures, self.retried = env.failures, env.retried

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if the environment's process has ended; None: it has not."""
        return self.inner.ended

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset the environment, or one lane by itself."""
        return self.inner.reset(seed=seed, options=options, lane=lane)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step the environment, or one lane by itself."""
        return self.inner.step(action, lane)

    def close(self, reason: RequestError | None = None) -> Call[None]:
        """Close the environment."""
        return self.inner.close(reason)

    def render(self, lanes: Sequence[int]) -> Call[list[object]]:
        """Return what `render()` gives now for some lanes."""
        return self.inner.render(lanes)

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self.inner.properties()

    def answer_property(self, request: properties_pb2.PropertyRequest) -> Call[properties_pb2.PropertyResponse]:
        """Read, write or list a property for which code of the environment runs."""
        return self.inner.answer_property(request)

    def call(self, request: bridge_pb2.CallRequest) -> Call[bridge_pb2.CallResponse]:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        return self.inner.call(request)

    @property
    def home(self) -> object:
        """Where the environment lives."""
        return self.inner.home

    def run_message(self, message: SessionMessage, request: bytes) -> Call[PartOutcome]:
        """Have the part of a message beside the environment answer a request."""
        return self.inner.run_message(message, request)


def kept(value: Any) -> Any:
    """A copy that the environment cannot change when it steps on."""
    if type(value) in IMMUTABLE:  # as rewards, flags and most actions are
        return value
    if isinstance(value, np.ndarray):
        # Of an array of objects, such as the last observations of lanes, each.
        return value.copy() if value.dtype != object else np.frompyfunc(kept, 1, 1)(value, np.empty_like(value))
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    # A named tuple, such as a `GraphInstance`, is not made of one sequence. Other subclasses may take anything.
    if type(value) in (tuple, list, set) or (isinstance(value, tuple) and hasattr(value, "_make")):
        return getattr(value, "_make", type(value))(map(kept, value))
    return value


@dataclasses.dataclass(frozen=True)
class EnvironmentProperty:
    """A text about an environment that its code may be asked for, one for all lanes of a world."""

    name: str
    """The key below `world`."""
    description: str
    """In a sentence."""
    read: Callable[[Any], str]
    """Returns the text of an environment, or of a vector of them, in the thread that it belongs to. A feature is
    imported here, once somebody asks."""
    read_agent: Callable[[EnvFacts, str, Space[Any]], str] | None = None
    """Returns the text for one of several agents, from the environment's facts, the agent's name and its action space;
    None: it is the same for all of them, and `read` is asked."""

    @property
    def key(self) -> str:
        """The dotted path."""
        return f"world.{self.name}"


def environment_properties() -> Sequence[EnvironmentProperty]:
    """Return those of all features that are installed."""
    found: Sequence[EnvironmentProperty] = provided("environment_properties")
    return found


CALL_TIMEOUT = 300.0
"""Seconds that one call of an environment may take unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class Isolation:
    """The limits of a world's process."""

    call_timeout: float | None = CALL_TIMEOUT
    """Seconds that one call of its environment may take, its construction too; None: for ever."""
    max_world_bytes: int | None = None
    """Bytes of memory that it may allocate (where the system can limit that: Linux); None: no limit of ours."""
    own_program: bool = False
    """True if it begins without the main module of this program, which `multiprocessing` would import. It has no limit
    of memory, and no client's factory then."""

    @classmethod
    def of(
        cls, isolation: str | None, call_timeout: float | None, max_world_bytes: int | None, *, always: bool = False
    ) -> Isolation | None:
        """Read the keywords of a server; None: its worlds live in its own process.

        Args:
            isolation: `process` or None.
            call_timeout: As above.
            max_world_bytes: As above.
            always: Worlds have processes of their own whatever `isolation` says.

        Raises:
            SettingError: A keyword is out of its range, or stands without `isolation`.
        """
        if isolation not in (None, "process"):
            raise SettingError(f"expected isolation to be 'process' or None, got {isolation!r}")
        if isolation is not None or always:
            return cls(call_timeout, max_world_bytes)
        if call_timeout != CALL_TIMEOUT or max_world_bytes is not None:
            text = "call_timeout and max_world_bytes are for worlds in processes: give isolation='process' too"
            raise SettingError(text)
        return None


def start_method() -> str:
    """Return the start method of world processes: never fork, because this process has threads."""
    # `spawn` and the forkserver import the main module: without the guard each process would start a server, and the
    # processes of that, without end.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "the main module starts a server while a process of its environments imports it; guard it by "
            "if __name__ == '__main__':"
        )
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
