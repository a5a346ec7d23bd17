"""The interface of environments to worlds: a description, and calls to await.

A world steps an `Environment`, wherever that runs. `bridge.core.worlds.local` calls an environment of this process in
its own thread. `bridge.core.worlds.isolated.env` calls one in a separate process, within the limits of `Isolation`. An
`EnvironmentProxy` between a world and its environment (a recording, people who watch) forwards what it does not change.
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
    """For one of several agents: what the environment did not return for it; see `StepInfo`."""

    @property
    def ended(self) -> bool:
        """True if the episode ended in this frame."""
        return self.terminated or self.truncated


@dataclasses.dataclass(frozen=True)
class Job:
    """A due reset or step of an environment or of one of its lanes."""

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
        """The actions of several agents by name; empty for a reset."""
        return self.action if isinstance(self.action, Mapping) else {}


class StepTimes:
    """The durations of calls of `reset` and `step`, in seconds."""

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
    """The spaces of one environment or one lane; with several agents those of the first agent."""
    agents: Mapping[object, Spaces] = dataclasses.field(default_factory=dict)
    """The spaces of each agent, by the environment's own ids; empty: it does not have several agents."""
    num_envs: int | None = None
    """How many lanes one call steps; None: it is a single environment, or one of several agents."""
    reward_space: Space[object] | None = None
    """The space of array rewards; None: rewards are numbers."""
    autoreset: AutoresetMode | None = None
    """When a lane that ended begins its next episode; None: it has no lanes, or does not say."""
    resets_lanes: bool = False
    """True if some lanes can be reset alone, by the option `reset_mask`, each with its own seed."""
    steps_lanes: bool = False
    """True if each lane can be stepped by itself."""
    name: str = ""
    """The name in the metadata of an environment with several agents, such as `simple_tag_v3`."""
    default_actions: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """With several agents, the action of each agent without a player, by name; empty: unknown."""
    action_names: Sequence[str] | None = None
    """With several agents, the names of each agent's actions, in order; None: unknown."""

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
        """Return the facts of one lane that is stepped separately."""
        return dataclasses.replace(self, num_envs=None, autoreset=None, resets_lanes=False, steps_lanes=False)


class Environment(Protocol):
    """An environment, as worlds use it."""

    facts: EnvFacts
    """Its description."""
    executor: Executor
    """Runs functions in the environment's own thread, if it has one; otherwise in the server's thread."""
    times: StepTimes
    """The durations of its calls."""
    notes: list[str]
    """Remarks for clients on its results; the code that sends them clears the list."""
    failures: dict[int, str]
    """Why lanes failed in the last call, by lane, if lanes fail separately; always the same object."""
    retried: list[str]
    """Errors of resets of such lanes that were tried again; the code that logs them clears the list."""

    @property
    def step_in_row(self) -> Callable[[Any], Result] | None:
        """A synchronous `step`, to be called in the executor's thread; None: only `step` is available.

        Its results stay unchanged while other environments are stepped, even if they share memory with this one.
        """

    @property
    def ended(self) -> RequestError | None:
        """The error that answers requests if the environment's process has ended; None: it runs."""

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset it; with `facts.steps_lanes` perhaps only one lane."""

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step it; with `facts.steps_lanes` perhaps only one lane."""

    def close(self, reason: RequestError | None = None) -> Call[None]:
        """Close it; later calls raise `reason`.

        Raises:
            RequestError: Its own `close` raised; it counts as closed anyway.
        """

    def render(self, lanes: Sequence[int]) -> Call[list[object]]:
        """Return copies of the results of `render()` for some lanes; [0] for a single environment."""

    def properties(self) -> PropertyTree:
        """Return its properties, below `world`."""

    def answer_property(self, request: properties_pb2.PropertyRequest) -> Call[properties_pb2.PropertyResponse]:
        """Read, write or list a property for which code of the environment runs."""

    def call(self, request: bridge_pb2.CallRequest) -> Call[bridge_pb2.CallResponse]:
        """Call a public method, or read a public attribute, on the lanes that the request names; empty: on all."""

    @property
    def home(self) -> object:
        """The process that it runs in; equal for all environments of a process."""

    def run_message(self, message: SessionMessage, request: bytes) -> Call[PartOutcome]:
        """Let the message's part beside it answer a request.

        Raises:
            RequestError: The part raised; the environment is unchanged, unless the part has changed it.
        """


class EnvironmentProxy:
    """An environment that forwards everything to another one. Subclasses override what they change.

    Args:
        env: The other one.
    """

    step_in_row: Callable[[Any], Result] | None = None
    """None, whatever the other one has: subclasses change `step`."""

    def __init__(self, env: Environment) -> None:
        self.inner = env
        """The environment that calls are forwarded to."""
        self.facts = env.facts
        self.executor = env.executor
        self.times = env.times
        self.notes = env.notes
        self.failures, self.retried = env.failures, env.retried

    @property
    def ended(self) -> RequestError | None:
        """The error that answers requests if the environment's process has ended; None: it runs."""
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
        """Return the environment's properties, below `world`."""
        return self.inner.properties()

    def answer_property(self, request: properties_pb2.PropertyRequest) -> Call[properties_pb2.PropertyResponse]:
        """Read, write or list a property for which code of the environment runs."""
        return self.inner.answer_property(request)

    def call(self, request: bridge_pb2.CallRequest) -> Call[bridge_pb2.CallResponse]:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        return self.inner.call(request)

    @property
    def home(self) -> object:
        """The process that the environment runs in."""
        return self.inner.home

    def run_message(self, message: SessionMessage, request: bytes) -> Call[PartOutcome]:
        """Let the message's part beside the environment answer a request."""
        return self.inner.run_message(message, request)


def kept(value: Any) -> Any:
    """Return a copy that the environment cannot change in later steps."""
    if type(value) in IMMUTABLE:  # the usual case: rewards, flags and most actions
        return value
    if isinstance(value, np.ndarray):
        # For an array of objects, such as the last observations of lanes, copy each object.
        return value.copy() if value.dtype != object else np.frompyfunc(kept, 1, 1)(value, np.empty_like(value))
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    # The constructor of a named tuple, such as `GraphInstance`, takes no sequence. Other subclasses may take anything.
    if type(value) in (tuple, list, set) or (isinstance(value, tuple) and hasattr(value, "_make")):
        return getattr(value, "_make", type(value))(map(kept, value))
    return value


@dataclasses.dataclass(frozen=True)
class EnvironmentProperty:
    """A text property of an environment, the same for all lanes of a world. The environment's code may provide it."""

    name: str
    """The key below `world`."""
    description: str
    """Its description, a sentence."""
    read: Callable[[Any], str]
    """Returns the text for an environment or a vector environment, in its thread. The feature is imported here, at the
    first request."""
    read_agent: Callable[[EnvFacts, str, Space[Any]], str] | None = None
    """Returns the text for one of several agents, from the environment's facts, the agent's name and its action space;
    None: the text is the same for all agents, and comes from `read`."""

    @property
    def key(self) -> str:
        """The dotted path."""
        return f"world.{self.name}"


def environment_properties() -> Sequence[EnvironmentProperty]:
    """Return the properties of all installed features."""
    found: Sequence[EnvironmentProperty] = provided("environment_properties")
    return found


CALL_TIMEOUT = 300.0
"""The default of `call_timeout`, in seconds."""


@dataclasses.dataclass(frozen=True)
class Isolation:
    """The limits of a world's process."""

    call_timeout: float | None = CALL_TIMEOUT
    """The most seconds of one call of its environment, including its construction; None: without limit."""
    max_world_bytes: int | None = None
    """The most bytes of memory that it may allocate, on systems that can limit it (Linux); None: without limit."""
    own_program: bool = False
    """True if it starts without importing the main module of this program, as `multiprocessing` would. Then it has no
    memory limit, and cannot run clients' factories."""

    @classmethod
    def of(
        cls, isolation: str | None, call_timeout: float | None, max_world_bytes: int | None, *, always: bool = False
    ) -> Isolation | None:
        """Read the keywords of a server; None: its worlds run in its own process.

        Args:
            isolation: `process` or None.
            call_timeout: See the field.
            max_world_bytes: See the field.
            always: True: worlds have their own processes, whatever `isolation` is.

        Raises:
            SettingError: A keyword is out of its range, or was given without `isolation`.
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
    # `spawn` and the forkserver import the main module: without the guard each process would start another server.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "the main module starts a server while a process of its environments imports it; guard it by "
            "if __name__ == '__main__':"
        )
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
