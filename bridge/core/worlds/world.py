"""The world of an environment. Its group says who takes part, its pacer when the environment is stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from bridge.core.encoding.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.base import Agent, PacedWorld, World, WorldCounts
from bridge.core.worlds.environment import Environment
from bridge.core.worlds.group import Group
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.scheduling import Scheduler
from bridge.core.worlds.settings import Settings

__all__ = ["EnvWorld", "WorldKind", "env_world", "paced_by"]

WorldKind: TypeAlias = Callable[[str, Environment, Scheduler], World]
"""Makes a world from its name, its environment, which the world owns from then on, and its scheduler."""


class EnvWorld(PacedWorld):
    """A world with an environment, which its pacer resets and steps.

    Args:
        name: The world's name.
        env: The environment, owned by the world from here on.
        scheduler: Runs what the world waits for.
        pacer: Decides when the environment is stepped; serves this world alone.

    Raises:
        SettingError: The pacer cannot step this kind of environment.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler, pacer: Pacer) -> None:
        super().__init__(name, env, scheduler)
        self.pacer = pacer
        """Decides when the environment is stepped."""
        self.lingers, self.steered_by_all = pacer.lingers, pacer.steered_by_all
        pacer.bind(self)

    @property
    def group(self) -> Group:
        """Who takes part."""
        return self.pacer.group

    # Who is in

    def join(self, settings: Settings) -> Agent:
        """Return a new agent of the world."""
        return self.pacer.join(settings)

    def admit(self, settings: Settings, join: Callable[[Settings], Agent] | None = None, *, ours: bool = True) -> Agent:
        """Return the agent of the settings of a JoinWorld, as the pacer knows it; raises as `World.admit`."""
        agent = super().admit(settings, join, ours=ours)
        self.pacer.admitted(agent.unwrapped)
        return agent

    @property
    def agents(self) -> int:
        """The number of agents in the world."""
        return self.pacer.agents

    @property
    def has_players(self) -> bool:
        """True if at least one agent plays, that is, does more than watch."""
        return self.pacer.has_players

    @property
    def played(self) -> Mapping[str, bool]:
        """True if somebody plays, for each agent that can be played, by its name."""
        return self.pacer.played

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, by the name of the agent."""
        return self.pacer.players

    def applied_by(self, lane: int) -> object:
        """Return who chose the action of the current step.

        Args:
            lane: The lane, where lanes are stepped one by one.

        Returns:
            A text such as `agent`, `agent:PPO`, `person:Ann` or `default`; of several agents a dict by name.
        """
        return self.pacer.applied_by(lane)

    # What it does

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode of one environment; None: none runs, or there are several."""
        return self.pacer.newest

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next call of `step` resets, shape `(lanes,)`; None: there are none."""
        return self.pacer.ended_lanes

    @property
    def fps(self) -> float | None:
        """Frames per second of the world's clock; None: it has no clock."""
        return self.pacer.fps

    @property
    def clock_frames(self) -> int | None:
        """The number of frames of the world's clock so far; None: it has no clock."""
        return self.pacer.frames

    @property
    def allows_substitutes(self) -> bool:
        """True if an observer may replace an agent's action."""
        return self.pacer.allows_substitutes

    def counts(self) -> WorldCounts:
        """Return the numbers of lanes, steps and episodes; a step that failed counts too."""
        counts = self.pacer.counts()
        if counts is not None:
            return counts
        lanes = self.env.facts.num_envs or 1
        steps = self.env.times.step.count * lanes - self.begun_in_steps
        return WorldCounts(lanes, steps, self.episodes)

    def describe(self) -> dict[str, object]:
        """Return what a page shows: the lanes, whether the first reset was made, and entries of pacer and features."""
        begun = bool(self.env.times.reset.count)
        return {
            "lanes": self.env.facts.num_envs,
            "begun": begun,
            **super().describe(),
            **self.pacer.describe(),
        }

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        name = Property("world.name", TEXT, "the world's name", lambda: self.name)
        # `count`, `p50`, `p90`, `p99` and `max` of each.
        text = "seconds in the environment's step and reset, a dict for each"
        timing = Property("world.timing", ENCODED, text, lambda: self.env.times.summary())
        own = PropertyTree([name]).merged(self.env.properties()).merged(PropertyTree([timing]))
        return own.merged(self.pacer.properties())

    # Resets and the end

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Store the settings of the sequence that a ResetWorld begins; return a function that withdraws them."""
        return self.pacer.prepare_reset(settings, caller)

    def restart(self, caller: Agent | None) -> None:
        """Begin the new sequence of a ResetWorld, after every other agent was told that its sequence has ended."""
        self.pacer.restart(caller)

    async def close(self) -> None:
        """Close the environment; one that is in a call is closed when the call returns."""
        if not self.closed:
            # Set first: the waiting calls that `stop` ends read it.
            self.closed = True
            self.pacer.stop()
            await self.env.close(self.destroyed())


def env_world(world: World) -> EnvWorld | None:
    """Return the world as an EnvWorld; None: it has no environment, such as a lobby of another server."""
    return world if isinstance(world, EnvWorld) else None


def paced_by(make_pacer: Callable[[], Pacer]) -> WorldKind:
    """Return a function that makes worlds, each with a pacer of its own."""
    return lambda name, env, scheduler: EnvWorld(name, env, scheduler, make_pacer())
