"""The interfaces of worlds, which agents join, and of agents, which have specs and episodes.

A `World` is anything that can be joined; a `PacedWorld` owns an environment.
"""

from __future__ import annotations

import abc
import dataclasses
import re
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import gymnasium
import numpy as np

from bridge.core.encoding.names import GYMNASIUM
from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array, Spec, fill_tensor
from bridge.core.logs import ADVICE, RESET_ADVICE
from bridge.core.worlds.environment import Environment
from bridge.core.worlds.resets import ResetBook, ResetOrder
from bridge.core.worlds.scheduling import Scheduler
from bridge.core.worlds.settings import Settings, read_bool, read_text, refuse_unknown
from bridge.errors import Code, RequestError, SettingError, StartError, UnsupportedSpaceError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.worlds.environment import Result
    from bridge.core.worlds.messages import PartOutcome, SessionMessage

__all__ = [
    "DEFAULT_PLAYER",
    "Agent",
    "PacedWorld",
    "Substitution",
    "World",
    "WorldCounts",
    "answer_to",
    "environment_failure",
    "failures_in",
    "in_environment",
    "start_error",
]

T = TypeVar("T")
DEFAULT_PLAYER = "agent"
"""The player's name if the client does not give one."""
_OTHER_WORLD = "create another world, if the server has room for one (its limit is max_worlds)"
"""A world does not know how many more its server can make."""
# Modules that call `reset` and `step` of environments, and unpack the results.
_CALLERS = (
    "bridge.",
    "gymnasium.core",
    "gymnasium.wrappers.",
    "gymnasium.vector.sync_vector_env",
    "gymnasium.utils.",
    "pettingzoo.utils.",
)
_FORMS = {"reset": "(observation, info)", "step": "(observation, reward, terminated, truncated, info)"}
"""The expected results of an environment."""
_REMEDIES = {
    "reset": RESET_ADVICE,
    "its construction": "Fix the environment.",
}
"""The remedy for a failure, by its place; for other places: begin a new episode."""
_FLAGS = ("discount", "terminated", "truncated")
_PLAYER = re.compile(r"(agent|person)(:[^\x00-\x1f\x7f]{1,64})?")
_EXPECTED_PLAYER = "agent or person, or one of them with a name of at most 64 characters as in person:Ann"


class Agent(abc.ABC):
    """One connection's part in a world.

    A session calls `begin` for the first Step of a sequence and `step` for the others, one call at a time. If a call
    raises RequestError, that is the answer to the request, and nothing has changed. Coroutines may wait for the
    environment's thread or process, for other agents, or for a clock.
    """

    player: str = DEFAULT_PLAYER
    """The player, for recordings: `agent` or `person`, followed by `:` and a name if the client gave one."""
    actions: Mapping[int, Spec]
    """Action specs by UID."""
    observations: Mapping[int, Spec]
    """Observation specs by UID."""

    def name_player(self, player: str) -> None:
        """Set the player."""
        self.player = player

    def specs(self) -> pb.ActionObservationSpecs:
        """Return the specs as protobuf messages."""
        actions = {uid: spec.to_proto() for uid, spec in self.actions.items()}
        observations = {uid: spec.to_proto() for uid, spec in self.observations.items()}
        return pb.ActionObservationSpecs(actions=actions, observations=observations)

    def hide_gymnasium(self) -> None:
        """Hide observations that a client of dm_env would take for the environment's, or for dm_env's own.

        Public adaptors request every observation. They would give agents `info`, bytes of any length, and a `discount`
        of 1.0 where dm_env expects None. The state of a Step already contains this information. Lanes keep their flags,
        which are the only sign of an end, because a world of lanes stays RUNNING.
        """
        specs = self.observations.items()
        hidden = {uid for uid, spec in specs if spec.name == "info" or (spec.name in _FLAGS and spec.shape == ())}
        self.observations = {uid: spec for uid, spec in specs if uid not in hidden}

    @abc.abstractmethod
    def reset(self, settings: Settings, running: bool) -> None:
        """Store the settings of the next sequence, and end the running one (D-14)."""

    @abc.abstractmethod
    async def begin(self) -> int:
        """Start a sequence; return its state, RUNNING."""

    @abc.abstractmethod
    async def step(self, actions: Mapping[int, Array]) -> int:
        """Apply actions that were checked against their specs; return the resulting state."""

    @property
    def plays(self) -> bool:
        """True if it plays; False: it watches, or carries the actions of another connection's agent."""
        return True

    @property
    def watches(self) -> bool:
        """True if it only watches: it takes no place, and its actions and resets have no effect."""
        return False

    def rest(self) -> bool:
        """Stay in the world without a client, without delaying others; return False if that is impossible."""
        return False

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset that changes them; the client has read `names`."""
        del names  # in most worlds they never change

    def prepare(self, uids: Sequence[int]) -> None:
        """Store which observations the following Step requests. Called before its `begin` or `step`."""
        del uids  # most worlds do not need them

    def interrupt(self) -> None:  # noqa: B027 - a world may have nothing to note
        """End the sequence because of a ResetWorld. `observe` then repeats its last observations."""

    @abc.abstractmethod
    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return these observations of the last `begin` or `step`, and compute no others (D-10)."""

    @property
    def unwrapped(self) -> Agent:
        """The world's own agent, without agents that wrap it."""
        return self

    # `step` in two parts, for worlds where actions take effect on arrival, and a Step may be answered later.

    acts_on_arrival = False
    """True if `act` is called when a Step arrives, even if earlier Steps are unanswered, and `report` in its turn."""
    received: float | None = None
    """With `acts_on_arrival`, the time of arrival of the current Step, as `act` returned it; None: now."""
    reports = True
    """False if the Step for which `prepare` was called gets no report, not even of the end of the sequence."""
    episode_uid = 0
    """In real time, the UID of the unlisted action with the number of the episode that a Step's actions are for."""
    unlisted_actions: Mapping[int, Spec] = MappingProxyType({})
    """Actions that a Step may have in addition to those of the specs, by UID."""

    def act(self, actions: Mapping[int, Array]) -> float:
        """Apply the actions of a Step, which were checked against their specs; return the time of its arrival.

        Raises:
            RequestError: They are not valid in this world; nothing was applied.
        """
        raise NotImplementedError

    async def report(self) -> int:
        """Wait until there is an answer to the current Step; return the state of the sequence."""
        raise NotImplementedError

    # `step` in parts that can be cached or skipped when requests repeat.

    keeps_actions = False
    """True if a result of `decode` may be applied several times."""

    def decode(self, actions: Mapping[int, Array]) -> Any:
        """Return the argument of `apply` for the actions of a Step; raises like `step` for invalid actions."""
        return actions

    async def apply(self, action: Any) -> int:
        """Do what `step` does, with a result of `decode`."""
        return await self.step(action)

    steps_at_once = False
    """True if `apply` only steps the world's environment, and calls `take_step` with the result."""

    def take_step(self, result: Result) -> int:
        """Store the result of a step of the environment; return the resulting state."""
        raise NotImplementedError

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return the values of `observe` in the order of the UIDs; scalars may be Python's, and uint8 arrays bytes."""
        observed = self.observe(uids)
        return [observed[uid] for uid in uids]

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the properties of the world, as this agent sees it."""

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property of the world, for which the environment's code may run."""
        return self.properties().answer(request)

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the world, which goes on."""

    def hang_up(self) -> None:  # noqa: B027 - most agents never wait
        """End the agent's wait with CANCELLED, because its client has gone."""

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the environment, or read an attribute."""
        raise RequestError(Code.UNIMPLEMENTED, f"this world has no methods to call, so not {request.name!r} either")

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Let the message's part beside the environment answer a request; see `Environment.run_message`."""
        raise RequestError(Code.UNIMPLEMENTED, f"this world has no environment that a {message.form.name!r} reaches")

    @property
    def home(self) -> object:
        """See `Environment.home`."""
        return None

    def held(self) -> AbstractContextManager[None]:
        """Return a context manager in which nobody else steps the environment, for a message that may place it.

        Raises:
            RequestError: FAILED_PRECONDITION: a Step is running.
        """
        return nullcontext()

    def place(self, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in a state into which a message has put the environment, without a reset.

        Args:
            result: Observation and info, in the form of a reset's result.
            lanes: The lanes that were changed; lane 0 for a single environment.

        Returns:
            The state of the agent's sequence. RUNNING: it is in the new state. INTERRUPTED: the sequences of all agents
            are over, and the next Step of each agent begins one in the new state.
        """
        raise RequestError(Code.UNIMPLEMENTED, "this world cannot be put into another situation")


@dataclasses.dataclass(frozen=True)
class WorldCounts:
    """The counts of a world's work."""

    lanes: int = 1
    """The number of its environments."""
    steps: int = 0
    """Steps of its environments, counted for each lane."""
    episodes: int = 0
    """Ended episodes, counted for each lane."""


class World(abc.ABC):
    """Something that agents join.

    Args:
        name: The world's name.
        scheduler: Runs the world's coroutines and timers.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name = name
        self.scheduler = scheduler
        self.resets = ResetBook()
        self.shown: dict[str, Callable[[], object]] = {}
        """Additional entries of `describe`, as functions by name; features add to them."""

    @property
    def title_in_messages(self) -> str:
        """The world's name for error messages. The default world's name is empty, so it gets a description."""
        return f"the world {self.name!r}" if self.name else "the default world"

    lingers: float | None = None
    """Seconds after which it is destroyed while it has no agents; None: the server's `idle_timeout`."""
    title: str | None = None
    """Its name for people; None: the name of the source of the server's worlds."""
    steered_by_all = False
    """True if spectators may call methods and set attributes of the environment, because nobody plays in it."""

    report_failure: Callable[[str], None] = staticmethod(lambda message: None)
    """Logs an error of an environment for which no request is refused; set by the server."""

    @abc.abstractmethod
    def join(self, settings: Settings) -> Agent:
        """Let an agent in.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: the world is full; INVALID_ARGUMENT: unknown settings.
        """

    def admit(self, settings: Settings, join: Callable[[Settings], Agent] | None = None, *, ours: bool = True) -> Agent:
        """Let an agent in by the settings of a JoinWorld: `player` names the player, `join` gets the other settings.

        Args:
            settings: The settings.
            join: Lets it in; None: `self.join`.
            ours: The default of the setting `gymnasium`: True for a client of this package, which gets the observations
                that only Gymnasium knows.

        Raises:
            RequestError: See `join`; INVALID_ARGUMENT: `player` is not `agent` or `person` with an optional name, or
                `gymnasium` is not a bool.
        """
        whole = read_bool(settings, GYMNASIUM, "JoinWorld", ours)
        own = ("player", GYMNASIUM)
        agent = (join or self.join)({name: tensor for name, tensor in settings.items() if name not in own})
        if not whole:
            agent.hide_gymnasium()
        if "player" in settings:
            agent.unwrapped.name_player(read_text(settings, "player", "JoinWorld", _PLAYER, _EXPECTED_PLAYER))
        return agent

    @property
    @abc.abstractmethod
    def agents(self) -> int:
        """The number of agents in the world."""

    @property
    def has_players(self) -> bool:
        """True if it has agents other than spectators, which do not keep it alive."""
        return self.agents > 0

    @property
    def played(self) -> Mapping[str, bool]:
        """For each agent that can be played, by name: True if it has a player."""
        return {"agent": self.has_players}

    @property
    def players(self) -> Mapping[str, str]:
        """The player, as in `Agent.player`, of each agent of `played` that has one."""
        return {}

    def describe(self) -> dict[str, object]:
        """Return what a page shows of it, beside its name, its title and its players."""
        return {name: read() for name, read in self.shown.items()}

    @property
    def alive(self) -> bool:
        """True if it can be joined; False if it has ended by itself."""
        return True

    def counts(self) -> WorldCounts:
        """Return its counts. May be called from any thread."""
        return WorldCounts()

    @abc.abstractmethod
    async def close(self) -> None:
        """End the world. Its agents get an error for their next Steps. May be called twice."""

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Store the settings of the sequence that a ResetWorld begins; return a function that withdraws them.

        Raises:
            RequestError: INVALID_ARGUMENT for settings that the world does not take.
        """
        refuse_unknown(settings, (), "ResetWorld")
        return lambda: None

    async def reset(
        self,
        settings: Settings,
        caller: Agent | None,
        timeout: float,
        waiting: Callable[[ResetOrder], None] = lambda order: None,
    ) -> None:
        """Begin a new sequence for every agent (D-15), after every running agent except the caller was interrupted.

        Args:
            settings: The settings of the next sequence.
            caller: The agent of the requesting connection, if it is in this world.
            timeout: Seconds to wait for the Steps of the other agents.
            waiting: Called with the order during the wait; `ResetOrder.cancel` ends the wait.

        Raises:
            RequestError: Bad settings, DEADLINE_EXCEEDED, or CANCELLED.
        """
        undo = self.prepare_reset(settings, caller)
        order = self.resets.interrupt(caller)
        waiting(order)
        # End the wait as if all agents had been told; `withdraw` returns how many were not.
        timer = self.scheduler.call_later(timeout, lambda: order.finished.set_result(None))
        try:
            await order.finished
        finally:
            timer.cancel()
        untold, withdrawn = self.resets.withdraw(order)
        if withdrawn:
            undo()
        if untold:
            then = "nothing was reset" if withdrawn else "they are interrupted at their next Step"
            raise RequestError(
                Code.CANCELLED if order.cancelled else Code.DEADLINE_EXCEEDED,
                f"ResetWorld of {self.name!r}: {untold} other agents did not Step within "
                f"reset_world_timeout={timeout:g} s, so {then}; let each agent Step once, or leave",
            )
        if self.resets.closed:
            raise RequestError(Code.NOT_FOUND, f"the world {self.name!r} was destroyed while ResetWorld waited")
        if caller is not None:
            # The caller's sequence ends by its request, and needs no interruption.
            self.resets.end(caller)
        self.restart(None if caller is None else caller.unwrapped)

    def restart(self, caller: Agent | None) -> None:  # noqa: B027 - most worlds begin anew at the agents' next Steps
        """Begin the new sequence of a ResetWorld, after every other agent was told that its sequence is over.

        Args:
            caller: The agent of the requesting connection, if it is in this world.
        """


def in_environment(where: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a function of an environment in its thread, and convert exceptions to RequestError.

    The error keeps no reference to the original exception, whose frames would keep the environment alive: it must be
    destroyed in its own thread.

    Args:
        where: The name of the operation, for the message.
        function: The function to call.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        RequestError: The function raised an exception.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        answer = answer_to(where, error)
    answer.__cause__ = answer.__context__ = answer.__traceback__ = None
    raise answer


class failures_in:  # noqa: N801 - used like `contextlib.suppress`
    """A context manager that converts exceptions of an environment to RequestError.

    Args:
        where: The name of the operation, for the message.
        kind: The class of the environment, for the message.
    """

    def __init__(self, where: str, kind: str = "the environment") -> None:
        self._where, self._kind = where, kind

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Our own RequestErrors pass unchanged.
        if error is not None and not isinstance(error, RequestError):
            raise answer_to(self._where, error, self._kind) from error


def environment_failure(
    where: str, error: BaseException, kind: str = "the environment", remedy: str = ""
) -> RequestError:
    """Convert an exception of an environment to INTERNAL, with its traceback as text (D-2).

    A malformed result of `reset` or `step` is described without a traceback, because the exception comes from the
    caller that unpacked it.

    Args:
        where: The name of the operation, for the message.
        error: The exception.
        kind: The class of the environment, for the message.
        remedy: What to do next; empty: the default remedy for `where`.
    """
    remedy = remedy or _REMEDIES.get(where, ADVICE)
    trace = _misshapen_at(error)
    if trace is not None and where in _FORMS and _is_ours(error):
        returned = _described(trace, error)
        text = f"{where}() of {kind} returned {returned}, expected {_FORMS[where]}"
        return RequestError(Code.INTERNAL, f"{text}\n{remedy}")
    if isinstance(error, gymnasium.error.DependencyNotInstalled):  # its text says what to install
        return RequestError(Code.INTERNAL, f"a package that {kind} needs is not installed where it runs: {error}")
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    # An environment may step others: the traceback shows whose result was malformed.
    form = "" if trace is None else f"reset() gives {_FORMS['reset']}, step() {_FORMS['step']}. "
    text = f"the environment raised {type(error).__name__} in {where}: {error}\n{''.join(frames)}{form}{remedy}"
    return RequestError(Code.INTERNAL, text)


def _misshapen_at(error: BaseException) -> types.TracebackType | None:
    """Return the traceback entry where a caller could not unpack an environment's result; None: another error."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, (TypeError, ValueError)) or "unpack" not in str(error):
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    # Check the code that raised it, not only its text: environments unpack their own archives and tuples. An
    # AsyncVectorEnv raises a lane's exception again, so this cannot find the place.
    return trace if _is_caller(trace) else None


def _is_caller(trace: types.TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__")).startswith(_CALLERS)


def _is_ours(error: BaseException) -> bool:
    """True if an error passed only through code that calls environments, and not through an environment's code."""
    trace = error.__traceback__
    while trace is not None and _is_caller(trace):
        trace = trace.tb_next
    return trace is None


def _described(trace: types.TracebackType, error: BaseException) -> str:
    """Describe the value that could not be unpacked, for the message.

    All callers of environments in this package name the value `result` before they unpack it.
    """
    names = trace.tb_frame.f_locals
    if "result" not in names:  # in code of Gymnasium
        counted = re.search(r"got (\d+)", str(error))
        return f"{counted[1]} values" if counted else f"what cannot be unpacked ({error})"
    result = names["result"]
    if isinstance(result, np.ndarray):
        return f"an ndarray of shape {result.shape}"
    if isinstance(result, (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in result[:8])
        return f"a {type(result).__name__} of {len(result)} values ({kinds}{', …' if len(result) > 8 else ''})"
    return "None" if result is None else f"one value of type {type(result).__name__}"


def start_error(title: str, error: RequestError) -> SettingError | StartError:
    """Convert the error of a server's first environment: StartError if the environment failed, else SettingError.

    Args:
        title: The environment, for the message.
        error: Why it could not be made or served.
    """
    text, mark, rest = error.message.partition("\nTraceback ")
    text = text if text.startswith(title) else f"{title}: {text}"
    if error.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION):
        return SettingError(text)
    # Drop the last line of `environment_failure`, which is advice for a client.
    return StartError(text, (mark + rest).strip().rpartition("\n")[0])


def answer_to(where: str, error: BaseException, kind: str = "the environment") -> RequestError:
    """Convert an exception of an environment: FAILED_PRECONDITION for wrong use, else INTERNAL.

    Its arguments are those of `environment_failure`.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, (SettingError, UnsupportedSpaceError)):
        return RequestError(Code.FAILED_PRECONDITION, f"this environment cannot be served: {error}")
    # Gymnasium's OrderEnforcing raises it in a render or a step before the first reset.
    if isinstance(error, gymnasium.error.ResetNeeded):
        return RequestError(Code.FAILED_PRECONDITION, f"no {where} before the first Step: {error}")
    # `gymnasium.Env.render` raises this for a class without its own `render`: that is not a failure.
    if isinstance(error, NotImplementedError) and where == "render":
        return RequestError(Code.FAILED_PRECONDITION, "this environment has no frames to render")
    return environment_failure(where, error, kind)


def fill_observations(response: pb.StepResponse, observations: Mapping[int, Array]) -> None:
    """Write observations into a Step's response."""
    for uid, array in observations.items():
        fill_tensor(response.observations[uid], array)


class Substitution(Protocol):
    """An observer's replacement of agents' actions, for a pacer that chooses actions ahead of the step."""

    def substitute(self, action: Any) -> tuple[Any, Any]:
        """Return the action to use instead of `action`, and a note. Has no side effects."""

    def substituted(self, note: Any) -> None:
        """Record that the step with this note is the next one to run."""


class PacedWorld(World):
    """A world that owns an environment, and knows whether it is over.

    Args:
        name: The world's name.
        env: The environment, owned by the world from here on.
        scheduler: Runs the world's coroutines and timers.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        super().__init__(name, scheduler)
        self.env: Environment = env
        """The environment that is stepped; observers wrap it."""
        self.substitutes: Mapping[object, str] = {}
        """The persons whose actions replace agents' actions in the current step, by agent or lane."""
        self.substitution: Substitution | None = None
        """The replacement of agents' actions, for a pacer that chooses ahead; None: no replacement."""
        self.draws_itself = False
        """True if its pictures change without a reset or step, such as those of a game."""
        self.if_full = _OTHER_WORLD
        """What a client may do instead if the world is full."""
        self.redraw: Callable[[], None] = lambda: None
        """Called when it has drawn a picture by itself; set by whoever shows pictures."""
        self.begun_in_steps = 0
        """How often a step only began the next episode of a lane, so that it does not count as a step."""
        self.episodes = 0
        """Episodes that ended, counted for each lane."""
        self.closed = False
        """True once the world was destroyed."""

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the properties below `world`."""

    @property
    def over(self) -> bool:
        """True if the world is closed, or the process of its environment has ended."""
        return self.closed or self.env.ended is not None

    @property
    def alive(self) -> bool:
        """True if the world can be joined; False once its environment's process has ended."""
        return self.env.ended is None

    def refuse_if_over(self) -> None:
        """Raise if the world was destroyed, or its environment has ended by itself."""
        if self.env.ended is not None:
            raise self.env.ended
        if self.closed:
            raise self.destroyed()

    def destroyed(self) -> RequestError:
        """Return the error of requests to a world that was destroyed."""
        text = f"the world {self.name!r} was destroyed; leave, and create or join another"
        return RequestError(Code.FAILED_PRECONDITION, text)
