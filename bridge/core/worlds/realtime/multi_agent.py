"""The clock of a PettingZoo environment, which does not wait for its agents (U-1, D-22).

`JointLoop` decides what happens when. `JointClock` connects it to the environment and to agents: clients of a server,
and players in this process. A program can host such a world without a network:

    source = ParallelSource(make_env, realtime=RealtimeOptions(fps=30))
    world = await source.make_world("match 1", {}, runtime)
    clock = world.pacer
    unsubscribe = clock.subscribe(on_frame)     # called with a `Frame`: for each reset, frame and failure
    player = clock.enter("cat_0")               # plays the agent, until `player.leave()`
    clock.begin_episode(seed=7)                 # starts the clock and an episode
    player.act(action)                          # repeated until the next action
    clock.end_episode()                         # ends the episode, if it still runs
    await world.close()

`runtime` is a `bridge.core.worlds.scheduling.Runtime`. It provides a thread, timers and, with `clock=None`, the time.
The host calls `runtime.scheduler.run()` whenever something is ready or the time `runtime.scheduler.next_due()` has
come, and starts coroutines with `runtime.scheduler.start`. All methods, and `on_frame`, are called in that thread. With
`RealtimeOptions(autoreset=False)` every episode waits for `begin_episode`; otherwise an episode begins once all agents
have ended the previous one. A `gymnasium.Env` is a world with one agent, `agent0`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bridge.core.encoding.properties import ENCODED, Property, PropertyTree
from bridge.core.logs import SafeLog
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import PacedWorld, in_environment
from bridge.core.worlds.environment import Job, Transition
from bridge.core.worlds.group import default_action, is_allowed
from bridge.core.worlds.realtime.clock_state import ClockState
from bridge.core.worlds.realtime.frame_pacer import FramePacer, Outcome
from bridge.core.worlds.realtime.joint_loop import JointLoop
from bridge.core.worlds.realtime.loop_lane import LoopAgent, Phase
from bridge.core.worlds.settings import ResetRequest, Settings, read_scalar, wrong
from bridge.errors import Code, RequestError

__all__ = ["Frame", "JointClock", "PolicyPlayer"]

_log = SafeLog(__name__)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A reset, a frame or a failure of the environment, for subscribers of a world."""

    episode: int
    """The number of the environment's episode, from 1."""
    number: int
    """Frames of the episode so far; 0: this is its reset."""
    at: float
    """The time, in seconds of the world's clock."""
    transitions: Mapping[str, Transition]
    """The transition of each agent that was in the episode before this frame, by name. For a reset: each agent's first
    observation."""
    alive: Sequence[str]
    """The agents that act in the next frame; empty: the episode is over."""
    error: str | None = None
    """The exception of the environment with its traceback, which ends the episode; None: it did not raise."""


class PolicyPlayer:
    """A player in this process."""

    def __init__(self, clock: JointClock, name: str, loop_agent: LoopAgent) -> None:
        self.name = name
        self._clock = clock
        self._loop_agent = loop_agent

    def act(self, action: object, at: float | None = None) -> bool:
        """Record an action for the next frames.

        Args:
            action: An element of the agent's action space, which is not checked.
            at: The time of the action, in seconds of the world's clock; None: now.

        Returns:
            True if the action counts: the agent is alive in a running episode.
        """
        loop = self._clock.loop
        came = self._clock.now() if at is None else at
        # A program may call this after `leave`, when another player has the agent.
        return self._loop_agent in loop.loop_agents and loop.act(self._loop_agent, 0, action, came)

    def leave(self) -> None:
        """Stop playing the agent; its frames use the default action. May be called twice."""
        self._clock.dismiss(self._loop_agent)


class JointClock(FramePacer):
    """Steps an environment with several agents by a clock.

    Each agent has at most one player; without a player it uses the default action. Any number of spectators may watch.
    Clients may join and leave at any time.

    Args:
        options: The options of real time.
    """

    SETTINGS = ("agent", "role", "wait")
    LOOP: type[JointLoop] = JointLoop
    by_lane = False
    loop: JointLoop

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world; raises SettingError like `FramePacer.bind`."""
        super().bind(world)
        spaces = {name: pair[1] for name, pair in self.group.spaces.items()}
        self.stand_ins = {} if self.options.stand_ins is None else self.options.stand_ins.find(spaces)
        """The policies of agents without a player, by the agent's name."""
        self._listeners: list[Callable[[Frame], None]] = []
        self._together: object = None

    def _make_loop(self, world: PacedWorld) -> JointLoop:
        options = self.options
        return self.LOOP(list(self.group), options.fps, may_repeat=self._may_repeat, **options.timing())

    def _may_repeat(self, name: str, observation: object, action: object) -> bool:
        return is_allowed(action, observation, self.group.spaces[name][1])

    @property
    def players(self) -> Mapping[str, str]:
        """The players, by the name of the agent."""
        return {name: loop_agent.name for name in self.group if (loop_agent := self.loop.player_of(name))}

    def applied_by(self, lane: int) -> object:
        """Return, for each agent, the player or policy whose action the current frame uses."""
        return {
            name: agent_lane.applied_by or self._stand_in(name) for name, agent_lane in self.loop.agent_lanes.items()
        }

    def _stand_in(self, name: str) -> str:
        """Return the name of the policy that acts for an agent without an action, or `default`; for recordings."""
        return (
            f"agent:{self.stand_ins[name].name}" if name in self.stand_ins and not self.is_played(name) else "default"
        )

    def is_played(self, name: str) -> bool:
        """True if an agent has a player, so that its policy does not act."""
        return self.loop.player_of(name) is not None

    def moment(self, lane: int) -> tuple[float, float]:
        """Return the clock's time, and the arrival time of the newest action that the frame uses."""
        agent_lanes = self.loop.agent_lanes.values()
        came = [agent_lane.acted_at for agent_lane in agent_lanes if agent_lane.applied_by]
        running = self.loop.environment.phase is Phase.RUNNING
        # Agents that have ended keep the time of their last frame.
        now = max(agent_lane.applied_at for agent_lane in agent_lanes) if running else self.now()
        return now, max(came, default=math.nan)

    @property
    def others_play(self) -> bool:
        """True if an agent without an episode has to wait until other agents end theirs."""
        return self.loop.environment.phase is Phase.RUNNING

    # Clients

    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add the agent that the setting `agent` names, or the first free one; return its name and its `LoopAgent`.

        A spectator sees what the agent sees. The number of spectators is not limited.
        """
        wanted = self.group.read(settings)
        self.world.refuse_if_over()
        name = self._free(wanted) if player else wanted or next(iter(self.group))
        return name, self.loop.join_as(name, player)

    def _free(self, wanted: str | None) -> str:
        remedy = f"join it with the setting role=spectator, or {self.world.if_full}"
        return self.group.choose(wanted, self.taken(), self.world.title_in_messages, remedy)

    def taken(self) -> list[str]:
        """Return the names of the agents that have a player."""
        return [name for name in self.group if self.loop.player_of(name) is not None]

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Handle an agent's Reset. Among Resets with equal `together`, the first one's seed and options count."""
        super().reset(agent, self._told_once(settings), running)

    async def begin(self, agent: EnvAgent) -> int:
        """Wait until the agent is alive in a running episode, and enter it."""
        self.world.resets.end(agent)  # a ResetWorld does not wait for an agent that waits here
        state = await super().begin(agent)
        self.world.resets.start(agent)
        return state

    def _refuse_absence(self, agent: EnvAgent) -> None:
        environment, agent_lane = self.loop.environment, self.loop.agent_lanes[agent.name]
        state: ClockState = agent.pacer_state
        # Raise once for each episode: an agent that Steps again has chosen to wait for the next one, however long.
        if environment.phase is not Phase.RUNNING or environment.episode in (agent_lane.episode, state.absent_from):
            return
        state.absent_from = environment.episode
        who = agent.name
        text = f"the environment began an episode without the agent {who!r}; Step again for the next one, or leave"
        raise RequestError(Code.FAILED_PRECONDITION, text)

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`: also its spaces and the names of played agents."""
        taken = Property("world.players", ENCODED, "the names of the agents that have a player", self.taken)
        return super().properties_of(agent).merged(PropertyTree([taken]))

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Handle an agent's Reset: it leaves the running episode, which ends once no other player is in it."""
        self.world.refuse_if_over()
        self.loop.ask(loop_agent, asked.seeds[0], asked.options, asked.restart)
        self._changed()
        self.start()

    def _told_once(self, settings: Settings) -> Settings:
        """Return a Reset's settings without `together`; also without seed and options if this number came before."""
        if "together" not in settings:
            return settings
        number = read_scalar(settings, "together", "Reset")
        if not isinstance(number, np.integer):
            raise wrong("together", "an integer", number)
        # `make_parallel_remote` resets each agent over a separate stream, so the order of arrival is unknown. The seed
        # of a later Reset would begin another episode.
        left_out = {"together", "seed", "options"} if number == self._together else {"together"}
        self._together = number
        return {name: tensor for name, tensor in settings.items() if name not in left_out}

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Remove an agent from the loop; its frames use the default action."""
        self.loop.leave(loop_agent)
        # Otherwise agents that wait for the next episode would wait while the running one has only default actions.
        if self.loop.end_deserted():
            self._changed()
            self.start()

    # Players in this process

    def enter(self, name: str | None = None, by: str = "agent") -> PolicyPlayer:
        """Play an agent.

        Args:
            name: The name of the agent; None: the first free one.
            by: The name of the player, for recordings.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: the agent has a player; INVALID_ARGUMENT: there is no such agent.
        """
        if name is not None and name not in self.group.ids:
            known = ", ".join(self.group)
            raise RequestError(Code.INVALID_ARGUMENT, f"expected one of the agents {known}, got {name!r:.80}")
        self.world.refuse_if_over()
        chosen = self._free(name)
        loop_agent = self.loop.join_as(chosen, True, follows=True)
        loop_agent.name = by
        return PolicyPlayer(self, chosen, loop_agent)

    def begin_episode(self, seed: int | None = None, options: object = None) -> None:
        """Begin an episode now, and start the clock if it does not run. A running episode is cut off."""
        self.world.refuse_if_over()
        self.loop.ask_reset(0, seed, options)
        self._changed()
        self.start()

    def end_episode(self) -> None:
        """End a running episode. With `RealtimeOptions(autoreset=False)` the clock then stops until the next one."""
        self.loop.end()
        self._changed()

    def subscribe(self, listener: Callable[[Frame], None]) -> Callable[[], None]:
        """Call a function after each reset, frame and failure; return a function that unsubscribes it."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def _publish(self, job: Job, now: float, told: Mapping[str, Transition], error: str | None = None) -> None:
        lane = self.loop.environment
        running = error is None and lane.phase is Phase.RUNNING
        frame = Frame(job.episode, lane.length, now, told, tuple(self.loop.alive) if running else (), error)
        # Iterate over a copy, because a listener may unsubscribe itself.
        for listener in tuple(self._listeners):
            try:
                listener(frame)
            except (Exception, KeyboardInterrupt, SystemExit) as problem:  # the world must go on
                _log.error("a listener of the world %r raised", self.world.name, exc_info=problem)

    # The environment

    def _seen(self, name: str) -> object:
        """Return an agent's last observation, for a frame without one."""
        agent_lane = self.loop.agent_lanes[name]
        if agent_lane.phase is not Phase.RUNNING:
            # `Group.carry_out` reports this as a failure of the environment.
            raise KeyError(f"there is no observation of the agent {name!r}, which is alive")
        return agent_lane.observation

    async def _default_action(self, name: str) -> object:
        """Return the action of an agent without an action: its policy's, or the default action."""
        own, agent, space = self.options.default_action, self.group.ids[name], self.group.spaces[name][1]
        observation = self.loop.agent_lanes[name].observation
        if name in self.stand_ins and not self.is_played(name):
            where = f"the policy of {name!r}"
            return await self.world.env.executor.run(in_environment, where, self.stand_ins[name].act, observation)
        # Our own function needs no thread switch. A user's function runs in the environment's thread.
        if own is None:
            return default_action(agent, observation, space)
        return await self.world.env.executor.run(in_environment, "step", own, agent, observation, space)

    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        told: Mapping[str, Transition] | None
        if outcome is None:
            told = {} if self.loop.failed(job, now, error) else None
        elif job.kind == "reset":
            told = outcome[0] if self.loop.joint_began(job, now, outcome[0]) else None
        else:
            told = self.loop.joint_stepped(job, now, spent, *outcome)
            # The frame may have ended the episode of the last player in it.
            self.loop.end_deserted()
        if told is not None:
            self._publish(job, now, told, error or None)

    def _stopped(self, job: Job, now: float) -> None:
        if self.world.env.ended is not None:
            self._publish(job, now, {}, self.world.env.ended.message)
