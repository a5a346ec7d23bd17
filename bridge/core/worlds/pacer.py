"""The interface of pacers: what decides when a world's environment is reset and stepped, and what each agent is told.

A world is an environment, its group (who takes part: `bridge.core.worlds.group`) and a pacer. `LockStep` steps one
environment, or all lanes, by each Step of one agent; `TurnPacer` collects what several agents hand in, and is what a
pacer of one's own derives from; a `FramePacer` follows a clock, whether or not agents act.
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

    A world calls `bind` once, and from then on hands on what its agents are asked for: each method that has an agent
    is a request of that agent's client, and may raise RequestError, which is the answer. Coroutines may wait. All of
    it is called by the thread that runs the event loop.
    """

    group: Group
    """Who takes part, from `bind` on."""
    steps_at_once = False
    """True if each Step of a single environment's agent steps it, and nothing is to be asked: the short way."""
    keeps_actions = False
    """True if a Step may come without an action: the last one goes on."""
    can_place = False
    """True if a sequence may go on in another situation, into which a message has put the environment."""
    by_lane = False
    """True if each lane is reset and stepped by itself."""
    fps: float | None = None
    """Frames a second; None: it follows no clock."""
    begins_by_itself = False
    """True if episodes begin although nobody asks for them."""
    lingers: float | None = None
    """As of `World`: seconds after which a world goes where nobody is in."""
    steered_by_all = False
    """As of `World`: spectators, too, call methods and set attributes."""
    allows_substitutes = True
    """True if an observer may put other actions in the place of an agent's."""
    chooses_ahead = False
    """True if it asks `PacedWorld.substitution` which actions stand in for an agent's, before a step is under way."""

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world, whose environment is there.

        Raises:
            SettingError: The environment is none that it can step.
        """
        self._world = weakref.ref(world)
        self.group = Group(world.env.facts)

    @property
    def world(self) -> PacedWorld:
        """The world, from `bind` on. It owns its pacer, which does not keep it: a closed world is freed at once."""
        world = self._world()
        assert world is not None, "a pacer is used no more once its world is gone"
        return world

    @property
    def over(self) -> bool:
        """True once the world is over, or gone: what is under way by then finds no world any more."""
        world = self._world()
        # As `PacedWorld.over`, which would be one more call five times in each frame.
        return world is None or world.closed or world.env.ended is not None

    # Who is in

    @abc.abstractmethod
    def join(self, settings: Settings) -> Agent:
        """Return a new agent of the world; raises as `World.join`."""

    def admitted(self, agent: Agent) -> None:  # noqa: B027 - most knew all of it in `join`
        """Note that an agent is in, and that its `player` says by now who acts through it."""

    @abc.abstractmethod
    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent from the world. Again: nothing."""

    @property
    @abc.abstractmethod
    def agents(self) -> int:
        """How many agents are in."""

    @property
    def has_players(self) -> bool:
        """True if agents are in that do not only watch."""
        return self.agents > 0

    @property
    @abc.abstractmethod
    def players(self) -> Mapping[str, str]:
        """Who plays, as `Agent.player` says it, by the names of the agents that somebody plays."""

    @property
    def played(self) -> Mapping[str, bool]:
        """True if somebody plays, for each agent that can be played, by its name."""
        players = self.players
        return {name: name in players for name in self.group}

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent only looks on."""
        return False

    def applied_by(self, lane: int) -> object:
        """Return who the action is of that the environment is stepped by now, as `EnvWorld.applied_by`."""
        raise NotImplementedError

    # Requests of agents

    @abc.abstractmethod
    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Take the settings of an agent's next sequence, and end the running one."""

    @abc.abstractmethod
    async def begin(self, agent: EnvAgent) -> int:
        """Start a sequence for an agent; return its state, RUNNING."""

    @abc.abstractmethod
    async def step(self, agent: EnvAgent, action: object) -> int:
        """Take an agent's action, and have it told what happened; return the state of its sequence."""

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Apply the action of a Step when it comes, of an agent whose `acts_on_arrival` is True.

        Args:
            agent: The agent.
            action: Its action; None: the last one goes on.
            actions: All that the Step has, also the agent's `unlisted_actions`.

        Returns:
            When it came.

        Raises:
            RequestError: The world is over.
        """
        raise NotImplementedError

    async def report(self, agent: EnvAgent) -> int:
        """Wait for what an agent's Step is to be told; return the state of its sequence."""
        raise NotImplementedError

    @abc.abstractmethod
    def interrupt(self, agent: EnvAgent) -> None:
        """End an agent's sequence because of a ResetWorld; it is told its last observations once more."""

    def hang_up(self, agent: EnvAgent) -> None:  # noqa: B027 - one that never waits has nothing to end
        """End what an agent waits for: its client is gone."""

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client in the world; return False where others would wait for it."""
        return False

    def held(self, agent: EnvAgent) -> AbstractContextManager[None]:
        """Return a context in which nobody steps the environment: a message of an agent is answered that may place it.

        Raises:
            RequestError: FAILED_PRECONDITION: a Step is under way.
        """
        return nullcontext()  # where there is one agent, its session answers one request at a time

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Have a sequence begin in the situation that the environment is in; only where `can_place` is True.

        Args:
            agent: The agent whose message has put it there.
            result: Observation and info, as a reset returns them.
            lanes: Those that are there; of a single environment lane 0.

        Returns:
            As `Agent.place`.
        """
        raise NotImplementedError

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:  # noqa: B027 - most add no observations
        """Note which of an agent's `more` observations its Steps ask for from now on; others are negative numbers."""

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return an agent's `more` observations by their places there, at least those that are wanted."""
        return {}

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`."""
        return self.group.properties(agent.name)

    def choose_again(self) -> None:  # noqa: B027 - most choose when a step is due
        """Choose anew what was chosen ahead: `PacedWorld.substitution` has something else now."""

    # Of the whole world

    @abc.abstractmethod
    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld; return a function that withdraws them."""

    def restart(self, caller: Agent | None) -> None:  # noqa: B027 - most begin anew at the agents' next Steps
        """Begin the sequence of a ResetWorld, of which each other agent was told."""

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode of one environment; None: none runs, or there are several."""
        return None

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next step resets in place of stepping it; None: there are none."""
        return None

    @property
    def frames(self) -> int | None:
        """Frames of the clock until now; None: it follows no clock."""
        return None

    def moment(self, lane: int) -> tuple[float, float] | None:
        """Return seconds of the clock, and when the action came that its frame applies; None: it follows none."""
        return None

    def counts(self) -> WorldCounts | None:
        """Return how much the world has done; None: it is known by the calls of its environment."""
        return None

    def describe(self) -> Mapping[str, object]:
        """Return what a page shows of it."""
        return {}

    def properties(self) -> PropertyTree:
        """Return what it adds to the tree below `world`, for whoever asks."""
        return PropertyTree()

    def stop(self) -> None:  # noqa: B027 - one that never waits has nothing to end
        """End what waits: the world is closed from here on."""
