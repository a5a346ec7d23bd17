"""The interface of worlds, which agents join, and of agents, which have specs and episodes.

A `World` may be anything that is joined; a `PacedWorld` owns an environment.
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
    "OTHER_WORLD",
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
"""Who acts where the client does not say."""
OTHER_WORLD = "create another world, if the server has room for one (its limit is max_worlds)"
"""The advice for a client where a world is full. A world does not know how many more its server makes."""
# Modules that call `reset` and `step` of environments and unpack what they return.
_CALLERS = (
    "bridge.",
    "gymnasium.core",
    "gymnasium.wrappers.",
    "gymnasium.vector.sync_vector_env",
    "gymnasium.utils.",
    "pettingzoo.utils.",
)
_FORMS = {"reset": "(observation, info)", "step": "(observation, reward, terminated, truncated, info)"}
"""What an environment returns."""
_REMEDIES = {
    "reset": RESET_ADVICE,
    "its construction": "Fix the environment.",
}
"""What a client does about a failure, by where it was; elsewhere it begins a new episode."""
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
    """Who acts through it, for a recording: `agent` or `person`, with `:` and a name where it said one."""
    actions: Mapping[int, Spec]
    """Action specs by UID."""
    observations: Mapping[int, Spec]
    """Observation specs by UID."""

    def name_player(self, player: str) -> None:
        """Set who acts through it."""
        self.player = player

    def specs(self) -> pb.ActionObservationSpecs:
        """Return the specs as they travel."""
        actions = {uid: spec.to_proto() for uid, spec in self.actions.items()}
        observations = {uid: spec.to_proto() for uid, spec in self.observations.items()}
        return pb.ActionObservationSpecs(actions=actions, observations=observations)

    def hide_gymnasium(self) -> None:
        """Publish no observation that a client of dm_env would take for the environment's, or for dm_env's own.

        Public adaptors ask for every observation that there is. They would give agents `info`, bytes of any length, and
        the `discount` 1.0 where dm_env's contract has None. The state of a Step tells them all of it. Lanes keep their
        flags, which are the only sign of an end: such a world stays RUNNING.
        """
        specs = self.observations.items()
        hidden = {uid for uid, spec in specs if spec.name == "info" or (spec.name in _FLAGS and spec.shape == ())}
        self.observations = {uid: spec for uid, spec in specs if uid not in hidden}

    @abc.abstractmethod
    def reset(self, settings: Settings, running: bool) -> None:
        """Take the settings of the next sequence, and end the running one (D-14)."""

    @abc.abstractmethod
    async def begin(self) -> int:
        """Start a sequence; return its state, RUNNING."""

    @abc.abstractmethod
    async def step(self, actions: Mapping[int, Array]) -> int:
        """Apply actions, already checked against their specs; return the state that follows."""

    @property
    def plays(self) -> bool:
        """True if it takes part in the world; False: it watches, or acts for an agent that another connection has."""
        return True

    @property
    def watches(self) -> bool:
        """True if it only looks on: it takes nobody's place, and its actions and resets change nothing."""
        return False

    def rest(self) -> bool:
        """Stay in the world without a client, and hold nobody up; return False where that cannot be."""
        return False

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset that changes them; the client has read `names`."""
        del names  # most worlds' are the same for ever

    def prepare(self, uids: Sequence[int]) -> None:
        """Learn which observations the Step that follows asks for; called before its `begin` or `step`."""
        del uids  # of no interest to most worlds

    def interrupt(self) -> None:  # noqa: B027 - a world may have nothing to note
        """End the sequence because of a ResetWorld; `observe` returns its last observations once more."""

    @abc.abstractmethod
    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return these observations of the last `begin` or `step`, and compute no others (D-10)."""

    @property
    def unwrapped(self) -> Agent:
        """The agent that the world knows; another one where this one adds to it."""
        return self

    # The same in two parts, where actions count when they come, and a Step may be answered later.

    acts_on_arrival = False
    """True if `act` is called when a Step comes, also while others before it are to be answered, and `report` then."""
    received: float | None = None
    """With that, when the Step at hand came, as `act` has returned it; None: just now."""
    reports = True
    """False if the Step for which `prepare` was called is told nothing, and so not of an end of the sequence either."""
    episode_uid = 0
    """In real time, the UID of the action of `unlisted_actions` that says which episode a Step's actions are for."""
    unlisted_actions: Mapping[int, Spec] = MappingProxyType({})
    """Actions that a Step may have beside those of the specs, by UID."""

    def act(self, actions: Mapping[int, Array]) -> float:
        """Apply the actions of a Step, already checked against their specs; return when it came.

        Raises:
            RequestError: They are none of this world; nothing was applied.
        """
        raise NotImplementedError

    async def report(self) -> int:
        """Return the state of the sequence, once there is what the Step at hand is to be told."""
        raise NotImplementedError

    # The same in the parts that pay where the same few requests come again and again.

    keeps_actions = False
    """True if what `decode` returned may be applied any number of times."""

    def decode(self, actions: Mapping[int, Array]) -> Any:
        """Return what `apply` takes for the actions that `step` takes; raises as `step` for those that are none."""
        return actions

    async def apply(self, action: Any) -> int:
        """Do as `step` does with what `decode` returned."""
        return await self.step(action)

    steps_at_once = False
    """True if `apply` does nothing but step the world's environment, and `take_step` with the result."""

    def take_step(self, result: Result) -> int:
        """Take what a step of the environment returned; return the state that follows."""
        raise NotImplementedError

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return what `observe` does, in the order of the UIDs; scalars may be Python's, and uint8 arrays bytes."""
        observed = self.observe(uids)
        return [observed[uid] for uid in uids]

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the properties of the world, as this agent sees it."""

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property of the world for which code of the environment runs."""
        return self.properties().answer(request)

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the world, which goes on."""

    def hang_up(self) -> None:  # noqa: B027 - most agents never wait
        """End what the agent waits for: its client is gone. What it waited for is answered with CANCELLED."""

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the environment, or read an attribute."""
        raise RequestError(Code.UNIMPLEMENTED, f"this world has no methods to call, so not {request.name!r} either")

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Have the part of a message beside the environment answer a request; as `Environment.run_message`."""
        raise RequestError(Code.UNIMPLEMENTED, f"this world has no environment that a {message.form.name!r} reaches")

    @property
    def home(self) -> object:
        """As `Environment.home`."""
        return None

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which nobody else steps the environment: a message is answered that may place it.

        Raises:
            RequestError: FAILED_PRECONDITION: somebody's Step is under way.
        """
        return nullcontext()

    def place(self, result: Result, lanes: Sequence[int]) -> int:
        """Take what the environment sees in another situation: a sequence begins there, without a reset.

        Args:
            result: Observation and info, as a reset returns them.
            lanes: Those that are there; of a single environment lane 0.

        Returns:
            The state of its own sequence. RUNNING: it is there. INTERRUPTED: the sequences of all agents are over, and
            the next Step of each begins one there.
        """
        raise RequestError(Code.UNIMPLEMENTED, "this world cannot be put into another situation")


@dataclasses.dataclass(frozen=True)
class WorldCounts:
    """How much a world has done."""

    lanes: int = 1
    """Its environments."""
    steps: int = 0
    """Steps of its environments, counted for each lane."""
    episodes: int = 0
    """Episodes that ended, counted for each lane."""


class World(abc.ABC):
    """Something that agents join.

    Args:
        name: The world's name.
        scheduler: Runs what the world waits for.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name = name
        self.scheduler = scheduler
        self.resets = ResetBook()
        self.shown: dict[str, Callable[[], object]] = {}
        """What a page shows of it beside what `describe` says itself: functions by name, to which features add."""

    @property
    def title_in_messages(self) -> str:
        """How error messages name it: a user has never given the default world its name, which is empty."""
        return f"the world {self.name!r}" if self.name else "the default world"

    lingers: float | None = None
    """Seconds after which it goes where nobody is in; None: it waits for the server's `idle_timeout`."""
    title: str | None = None
    """Its name, as a person reads it; None: the name of the source of the server's worlds."""
    steered_by_all = False
    """True if spectators, too, call methods and set attributes of the environment: nobody plays in it."""

    report_failure: Callable[[str], None] = staticmethod(lambda message: None)
    """Logs what an environment raised where no request is refused for it; set by the server."""

    @abc.abstractmethod
    def join(self, settings: Settings) -> Agent:
        """Let an agent in.

        Raises:
            RequestError: RESOURCE_EXHAUSTED where the world is full, INVALID_ARGUMENT for settings it does not know.
        """

    def admit(self, settings: Settings, join: Callable[[Settings], Agent] | None = None, *, ours: bool = True) -> Agent:
        """Let an agent in by the settings of a JoinWorld: `player` says who it is, `join` takes the others.

        Args:
            settings: The settings.
            join: Lets it in; None: `self.join`.
            ours: True if the client is of this package: one that does not say so by the setting `gymnasium` gets the
                observations that only Gymnasium knows.

        Raises:
            RequestError: As `join`; INVALID_ARGUMENT where `player` is not `agent` or `person`, with a name or without,
                or `gymnasium` no bool.
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
        """How many agents are in."""

    @property
    def has_players(self) -> bool:
        """True if it has agents that are more than spectators, which do not keep it alive."""
        return self.agents > 0

    @property
    def played(self) -> Mapping[str, bool]:
        """True if somebody plays, for each agent that can be played, by its name."""
        return {"agent": self.has_players}

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, as `Agent.player` says it, for each agent of `played` that somebody plays."""
        return {}

    def describe(self) -> dict[str, object]:
        """Return what a page shows of it beside its name, its title, and who is played."""
        return {name: read() for name, read in self.shown.items()}

    @property
    def alive(self) -> bool:
        """True if it can still be joined; a world that ended by itself cannot."""
        return True

    def counts(self) -> WorldCounts:
        """Return how much it has done. May be called by any thread."""
        return WorldCounts()

    @abc.abstractmethod
    async def close(self) -> None:
        """End the world; agents that are still in get an error on their next Step. Again: nothing."""

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
        """Begin a new sequence for every agent (D-15): wait until each running one but the caller was interrupted.

        Args:
            settings: For the next sequence.
            caller: The agent of the connection that asks, where it is in this world.
            timeout: Seconds to wait for the others' Steps.
            waiting: Gets the order while it is waited for; `ResetOrder.cancel` ends the wait.

        Raises:
            RequestError: Bad settings, DEADLINE_EXCEEDED, or CANCELLED.
        """
        undo = self.prepare_reset(settings, caller)
        order = self.resets.interrupt(caller)
        waiting(order)
        # The same as when all were told: `withdraw` says how many were not.
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
            # Its own sequence ends by its request, and is not interrupted too.
            self.resets.end(caller)
        self.restart(None if caller is None else caller.unwrapped)

    def restart(self, caller: Agent | None) -> None:  # noqa: B027 - most worlds begin anew at the agents' next Steps
        """Begin the new sequence of a ResetWorld: every other agent was told that its own is over.

        Args:
            caller: The agent of the connection that asked, where it is in this world.
        """


def in_environment(where: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a function of an environment, in its thread, and convert exceptions to RequestError.

    The error keeps no reference to the original exception, whose frames would keep the environment alive: it must be
    destroyed in its own thread.

    Args:
        where: What the environment does, for the message.
        function: What to call.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        RequestError: The function raised something.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        answer = answer_to(where, error)
    answer.__cause__ = answer.__context__ = answer.__traceback__ = None
    raise answer


class failures_in:  # noqa: N801 - reads as `suppress` does
    """A context manager that converts exceptions of an environment to RequestError.

    Args:
        where: What the environment does, for the message.
        kind: The class of the environment, for the message.
    """

    def __init__(self, where: str, kind: str = "the environment") -> None:
        self._where, self._kind = where, kind

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A refusal of ours that passes through here has its code and words already.
        if error is not None and not isinstance(error, RequestError):
            raise answer_to(self._where, error, self._kind) from error


def environment_failure(
    where: str, error: BaseException, kind: str = "the environment", remedy: str = ""
) -> RequestError:
    """Convert an exception of an environment to INTERNAL, with its traceback as text (D-2).

    What `reset` or `step` returned in another form than Gymnasium's is described, without a traceback: the failure is
    that of whoever unpacked it.

    Args:
        where: What the environment did, for the message.
        error: What was raised.
        kind: The class of the environment, for the message.
        remedy: What to do next; empty: as for an environment that goes on.
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
    # With its traceback, where an environment steps others: whose result it was is seen there.
    form = "" if trace is None else f"reset() gives {_FORMS['reset']}, step() {_FORMS['step']}. "
    text = f"the environment raised {type(error).__name__} in {where}: {error}\n{''.join(frames)}{form}{remedy}"
    return RequestError(Code.INTERNAL, text)


def _misshapen_at(error: BaseException) -> types.TracebackType | None:
    """Return where whoever called an environment could not unpack what it returned; None: the error is another one."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, (TypeError, ValueError)) or "unpack" not in str(error):
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    # By the code that raised it, and not by its text alone: environments unpack archives and tuples of their own. An
    # AsyncVectorEnv raises again what a lane raised in its process, so nothing is known there.
    return trace if _is_caller(trace) else None


def _is_caller(trace: types.TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__")).startswith(_CALLERS)


def _is_ours(error: BaseException) -> bool:
    """True if an error passed through nothing but code that calls environments, and through no environment's own."""
    trace = error.__traceback__
    while trace is not None and _is_caller(trace):
        trace = trace.tb_next
    return trace is None


def _described(trace: types.TracebackType, error: BaseException) -> str:
    """Return what could not be unpacked, for the message.

    Whoever calls an environment in this package names what it returned `result`, and then unpacks that.
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
    """Convert the refusal of a server's first environment: StartError where the environment failed, else SettingError.

    Args:
        title: The environment, for the message.
        error: Why it could not be made, or cannot be served.
    """
    text, mark, rest = error.message.partition("\nTraceback ")
    text = text if text.startswith(title) else f"{title}: {text}"
    if error.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION):
        return SettingError(text)
    # The last line, of `environment_failure`, tells a client what to do next.
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
    # An environment without frames has not failed: `gymnasium.Env.render` raises this where a class has no other.
    if isinstance(error, NotImplementedError) and where == "render":
        return RequestError(Code.FAILED_PRECONDITION, "this environment has no frames to render")
    return environment_failure(where, error, kind)


def fill_observations(response: pb.StepResponse, observations: Mapping[int, Array]) -> None:
    """Write observations into a Step's response."""
    for uid, array in observations.items():
        fill_tensor(response.observations[uid], array)


class Substitution(Protocol):
    """An observer's actions in the place of agents', for a pacer that chooses ahead of the step."""

    def substitute(self, action: Any) -> tuple[Any, Any]:
        """Return what the environment is to be stepped by in the place of an action, and a note; changes nothing."""

    def substituted(self, note: Any) -> None:
        """Take the note of the step that is under way next: it was taken."""


class PacedWorld(World):
    """A world that owns an environment, and knows whether it is over.

    Args:
        name: The world's name.
        env: The environment, owned by the world from here on.
        scheduler: Runs what the world waits for.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        super().__init__(name, scheduler)
        self.env: Environment = env
        """The environment that is stepped; observers put themselves in its place."""
        self.substitutes: Mapping[object, str] = {}
        """Whose actions the step at hand takes in place of an agent's, by agent or lane."""
        self.substitution: Substitution | None = None
        """Which actions stand in for agents', where the pacer chooses ahead; None: none do."""
        self.draws_itself = False
        """True if it has pictures without a reset or step, as a program that draws by itself."""
        self.redraw: Callable[[], None] = lambda: None
        """Called when it has drawn itself; set by who looks."""
        self.begun_in_steps = 0
        """How often a step began the next episode of a lane, which it is no step of."""
        self.episodes = 0
        """Episodes that ended, counted for each lane."""
        self.closed = False
        """True once the world was destroyed."""

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""

    @property
    def over(self) -> bool:
        """True if the world is closed, or the process of its environment has ended."""
        return self.closed or self.env.ended is not None

    @property
    def alive(self) -> bool:
        """True if the world can be joined; False once its environment's process has ended."""
        return self.env.ended is None

    def refuse_if_over(self) -> None:
        """Raise where the world is destroyed, or its environment has ended by itself."""
        if self.env.ended is not None:
            raise self.env.ended
        if self.closed:
            raise self.destroyed()

    def destroyed(self) -> RequestError:
        """Return the error of requests to a world that was destroyed."""
        text = f"the world {self.name!r} was destroyed; leave, and create or join another"
        return RequestError(Code.FAILED_PRECONDITION, text)
