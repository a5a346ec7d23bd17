"""The interface of pacers, which decide when a world's environment is reset and stepped, and what each agent is told.

A world is an environment, its group of agents (`bridge.core.worlds.group`) and a pacer. `LockStep` steps one
environment, or all lanes, with each Step of a single agent. `TurnPacer` collects the actions of several agents; custom
pacers derive from it. A `FramePacer` follows a clock, whether or not agents act.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld, WorldCounts
from bridge.core.worlds.environment import Result
from bridge.core.worlds.group import Group
from bridge.core.worlds.settings import Settings

__all__ = ["Pacer"]


class Pacer(abc.ABC):
    """Decides when a world's environment is reset and stepped, and what its agents are told.

    A world calls `bind` once, and then forwards the requests of its agents. Each method with an agent is a request of
    that agent's client, and may raise RequestError as the answer. Coroutines may wait. All methods are called in the
    thread that runs the event loop.
    """

    group: Group
    """The agents of the world, from `bind` on."""
    steps_at_once = False
    """True if each Step of a single environment's agent steps it at once, without asking the pacer: the fast path."""
    keeps_actions = False
    """True if a Step may have no action: then the last one is repeated."""
    can_place = False
    """True if a sequence may go on in a state into which a message has put the environment."""
    by_lane = False
    """True if each lane is reset and stepped separately."""
    fps: float | None = None
    """Frames per second; None: it does not follow a clock."""
    begins_by_itself = False
    """True if episodes begin without a request."""
    lingers: float | None = None
    """See `World`: seconds after which a world without agents is destroyed."""
    steered_by_all = False
    """See `World`: spectators may call methods and set attributes."""
    allows_substitutes = True
    """True if an observer may replace an agent's actions."""
    chooses_ahead = False
    """True if it asks `PacedWorld.substitution` for replaced actions before a step begins."""

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world with an environment.

        Raises:
            SettingError: The pacer cannot step this environment.
        """
        self._world = weakref.ref(world)
        self.group = Group(world.env.facts)

    @property
    def world(self) -> PacedWorld:
        """The world, from `bind` on. The pacer has only a weak reference to it, so a closed world is freed at once."""
        world = self._world()
        assert world is not None, "a pacer must not be used after its world is gone"
        return world

    @property
    def over(self) -> bool:
        """True once the world is over or gone: jobs that run then find no world any more."""
        world = self._world()
        # Inlined `PacedWorld.over`: this is called five times in each frame.
        return world is None or world.closed or world.env.ended is not None

    # Agents

    @abc.abstractmethod
    def join(self, settings: Settings) -> Agent:
        """Return a new agent of the world; raises like `World.join`."""

    def admitted(self, agent: Agent) -> None:  # noqa: B027 - most knew all of it in `join`
        """Handle the end of an agent's join; its `player` is set by now."""

    @abc.abstractmethod
    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent from the world. May be called twice."""

    @property
    @abc.abstractmethod
    def agents(self) -> int:
        """The number of agents in the world."""

    @property
    def has_players(self) -> bool:
        """True if it has agents other than spectators."""
        return self.agents > 0

    @property
    @abc.abstractmethod
    def players(self) -> Mapping[str, str]:
        """The players, as in `Agent.player`, by the names of their agents."""

    @property
    def played(self) -> Mapping[str, bool]:
        """For each agent that can be played, by name: True if it has a player."""
        players = self.players
        return {name: name in players for name in self.group}

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent only watches."""
        return False

    def applied_by(self, lane: int) -> object:
        """Return the player whose action the current step uses; see `EnvWorld.applied_by`."""
        raise NotImplementedError

    # Requests of agents

    @abc.abstractmethod
    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Store the settings of an agent's next sequence, and end the running one."""

    @abc.abstractmethod
    async def begin(self, agent: EnvAgent) -> int:
        """Start a sequence for an agent; return its state, RUNNING."""

    @abc.abstractmethod
    async def step(self, agent: EnvAgent, action: object) -> int:
        """Apply an agent's action, and report the results to it; return the state of its sequence."""

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Apply the action of a Step when it arrives, for an agent with `acts_on_arrival`.

        Args:
            agent: The agent.
            action: Its action; None: the last one is repeated.
            actions: All actions of the Step, including `unlisted_actions`.

        Returns:
            The time of arrival.

        Raises:
            RequestError: The world is over.
        """
        raise NotImplementedError

    async def report(self, agent: EnvAgent) -> int:
        """Wait until there is an answer to an agent's Step; return the state of its sequence."""
        raise NotImplementedError

    @abc.abstractmethod
    def interrupt(self, agent: EnvAgent) -> None:
        """End an agent's sequence because of a ResetWorld; its last observations are repeated."""

    def hang_up(self, agent: EnvAgent) -> None:  # noqa: B027 - one that never waits has nothing to end
        """End the wait of an agent whose client has gone."""

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client in the world; return False if others would wait for it."""
        return False

    def held(self, agent: EnvAgent) -> AbstractContextManager[None]:
        """Return a context manager in which nobody steps the environment, for a message that may place it.

        Raises:
            RequestError: FAILED_PRECONDITION: a Step is running.
        """
        return nullcontext()  # with one agent, its session handles one request at a time

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in the environment's current state. Called only if `can_place` is True.

        Args:
            agent: The agent whose message has put the environment into this state.
            result: Observation and info, in the form of a reset's result.
            lanes: The lanes that were changed; lane 0 for a single environment.

        Returns:
            See `Agent.place`.
        """
        raise NotImplementedError

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:  # noqa: B027 - most add no observations
        """Store which of an agent's `more` observations its Steps request from now on; ignore negative numbers."""

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return an agent's `more` observations by index, at least the wanted ones."""
        return {}

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`."""
        return self.group.properties(agent.name)

    def choose_again(self) -> None:  # noqa: B027 - most choose when a step is due
        """Choose again the actions that were chosen ahead, because `PacedWorld.substitution` has changed."""

    # The whole world

    @abc.abstractmethod
    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Store the settings of a ResetWorld; return a function that withdraws them."""

    def restart(self, caller: Agent | None) -> None:  # noqa: B027 - most begin anew at the agents' next Steps
        """Begin the sequence of a ResetWorld, after each other agent was told."""

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode of one environment; None: there is none, or there are several."""
        return None

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next step resets instead of stepping; None: there are none."""
        return None

    @property
    def frames(self) -> int | None:
        """Frames of the clock so far; None: it does not follow a clock."""
        return None

    def moment(self, lane: int) -> tuple[float, float] | None:
        """Return the clock's time, and the arrival time of the action that its frame uses; None: there is no clock."""
        return None

    def counts(self) -> WorldCounts | None:
        """Return the world's counts; None: they follow from the calls of its environment."""
        return None

    def describe(self) -> Mapping[str, object]:
        """Return what a page shows of it."""
        return {}

    def properties(self) -> PropertyTree:
        """Return the pacer's properties, below `world`."""
        return PropertyTree()

    def stop(self) -> None:  # noqa: B027 - one that never waits has nothing to end
        """End all waits, because the world is closed."""
