"""The clock of several agents: a PettingZoo environment that does not wait for them (U-1, D-22).

`JointLoop` decides what happens when; this file gives it the environment, and lets agents in: clients of a server, and
players of this process. A program that hosts such a world without a network between uses it like this:

    source = ParallelSource(make_env, realtime=RealtimeOptions(fps=30))
    world = await source.make_world("match 1", {}, runtime)
    clock = world.pacer
    unsubscribe = clock.subscribe(on_frame)     # called with a `Frame`: for each reset, frame and failure
    player = clock.enter("cat_0")               # takes the agent, until `player.leave()`
    clock.begin_episode(seed=7)                 # lets the clock run, and begins an episode
    player.act(action)                          # goes on until the next one
    clock.end_episode()                         # cuts the episode off, where it has not ended
    await world.close()

`runtime` is a `bridge.core.worlds.scheduling.Runtime`, which gives it a thread, timers, and with `clock=None` the time:
whoever hosts it calls `runtime.scheduler.run()` whenever something is ready or `runtime.scheduler.next_due()` has come,
and starts coroutines by `runtime.scheduler.start`. All methods, and `on_frame`, are called in the thread that does so.
With `RealtimeOptions(autoreset=False)` every episode waits for `begin_episode`; otherwise each begins by itself once
all agents' have ended. A `gymnasium.Env` is a world of one agent, `agent0`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bridge.core.encoding.properties import ENCODED, Property, PropertyTree
from bridge.core.logs import SafeLog
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import OTHER_WORLD, PacedWorld, in_environment
from bridge.core.worlds.environment import Job, Transition
from bridge.core.worlds.group import default_action, is_allowed
from bridge.core.worlds.realtime.clock_part import ClockPart
from bridge.core.worlds.realtime.frame_pacer import FramePacer, Outcome
from bridge.core.worlds.realtime.joint_loop import JointLoop
from bridge.core.worlds.realtime.loop_lane import LoopAgent, Phase
from bridge.core.worlds.settings import ResetRequest, Settings, read_scalar, wrong
from bridge.errors import Code, RequestError

__all__ = ["Frame", "JointClock", "PolicyPlayer"]

_log = SafeLog(__name__)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Steps and resets of the environment, for the subscribers of a world."""

    episode: int
    """The number of the environment's episode, from 1."""
    number: int
    """Frames of the episode so far; 0: its reset returned."""
    at: float
    """When, in seconds of the world's time."""
    transitions: Mapping[str, Transition]
    """The news of each agent that was in the episode before this frame, by name, the last of its own with its end; of
    a reset, each agent's first observation."""
    alive: Sequence[str]
    """The agents that act in the next frame; empty: the episode is over."""
    error: str | None = None
    """The environment raised, which ends the episode; with its traceback. None: it did not."""


class PolicyPlayer:
    """An agent that a program of this process plays."""

    def __init__(self, clock: JointClock, name: str, loop_agent: LoopAgent) -> None:
        self.name = name
        self._clock = clock
        self._loop_agent = loop_agent

    def act(self, action: object, at: float | None = None) -> bool:
        """Leave an action for the next frames.

        Args:
            action: An element of the agent's action space, which is not checked.
            at: When it came, seconds of the world's time; None: now.

        Returns:
            Whether it counts: the agent is alive in a running episode.
        """
        loop = self._clock.loop
        came = self._clock.now() if at is None else at
        # A program may go on acting after `leave`, when somebody else plays the agent.
        return self._loop_agent in loop.loop_agents and loop.act(self._loop_agent, 0, action, came)

    def leave(self) -> None:
        """Leave the agent to whoever enters next; a default action stands in. Again: nothing."""
        self._clock.dismiss(self._loop_agent)


class JointClock(FramePacer):
    """Steps an environment of several agents by a clock.

    Each agent is played by one client at most, or by nobody: then a default action stands in. Any number of others look
    on. Clients come and go at any time.

    Args:
        options: How it runs.
    """

    SETTINGS = ("agent", "role", "wait")
    LOOP: type[JointLoop] = JointLoop
    by_lane = False
    loop: JointLoop

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world; raises SettingError as `FramePacer.bind`."""
        super().bind(world)
        spaces = {name: pair[1] for name, pair in self.group.spaces.items()}
        self.stand_ins = {} if self.options.stand_ins is None else self.options.stand_ins.find(spaces)
        """Who plays agents while no client does, by the agent's name."""
        self._listeners: list[Callable[[Frame], None]] = []
        self._together: object = None

    def _make_loop(self, world: PacedWorld) -> JointLoop:
        options = self.options
        return self.LOOP(list(self.group), options.fps, may_repeat=self._may_repeat, **options.timing())

    def _may_repeat(self, name: str, observation: object, action: object) -> bool:
        return is_allowed(action, observation, self.group.spaces[name][1])

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, by the name of the agent."""
        return {name: loop_agent.name for name in self.group if (loop_agent := self.loop.player_of(name))}

    def applied_by(self, lane: int) -> object:
        """Return who the action of each agent is of that the environment is stepped by now."""
        return {name: part.applied_by or self._stand_in(name) for name, part in self.loop.parts.items()}

    def _stand_in(self, name: str) -> str:
        """Return who acts for an agent of which there is no action, for a recording."""
        return (
            f"agent:{self.stand_ins[name].name}" if name in self.stand_ins and not self.is_played(name) else "default"
        )

    def is_played(self, name: str) -> bool:
        """True if a client plays an agent in the episode that runs, so that its policy does not."""
        return self.loop.player_of(name) is not None

    def moment(self, lane: int) -> tuple[float, float]:
        """Return the world's seconds, and when the newest action came that its frame applies."""
        parts = self.loop.parts.values()
        came = [part.acted_at for part in parts if part.applied_by]
        running = self.loop.environment.phase is Phase.RUNNING
        # Agents that have ended keep the time of their last frame.
        now = max(part.applied_at for part in parts) if running else self.now()
        return now, max(came, default=math.nan)

    @property
    def others_play(self) -> bool:
        """True if an agent that waits for an episode waits for others to end theirs."""
        return self.loop.environment.phase is Phase.RUNNING

    # Clients

    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add the agent that the setting `agent` names, or the first that is free; return its name and place.

        A spectator sees what the agent sees; of those there may be any number.
        """
        wanted = self.group.read(settings)
        self.world.refuse_if_over()
        name = self._free(wanted) if player else wanted or next(iter(self.group))
        return name, self.loop.join_as(name, player)

    def _free(self, wanted: str | None) -> str:
        remedy = f"join it with the setting role=spectator, or {OTHER_WORLD}"
        return self.group.choose(wanted, self.taken(), self.world.title_in_messages, remedy)

    def taken(self) -> list[str]:
        """Return the names of the agents that somebody plays."""
        return [name for name in self.group if self.loop.player_of(name) is not None]

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Take an agent's Reset. Of Resets with one number in `together`, the first one's seed and options count."""
        super().reset(agent, self._told_once(settings), running)

    async def begin(self, agent: EnvAgent) -> int:
        """Wait until an episode runs that the agent has a part in, and enter it."""
        self.world.resets.end(agent)  # while it waits, no ResetWorld waits for it
        state = await super().begin(agent)
        self.world.resets.start(agent)
        return state

    def _refuse_absence(self, agent: EnvAgent) -> None:
        environment, part = self.loop.environment, self.loop.parts[agent.name]
        told: ClockPart = agent.part
        # Told once for each episode: who Steps again has chosen to wait for the next one, which may be long in coming.
        if environment.phase is not Phase.RUNNING or environment.episode in (part.episode, told.absent_from):
            return
        told.absent_from = environment.episode
        who = agent.name
        text = f"the environment began an episode without the agent {who!r}; Step again for the next one, or leave"
        raise RequestError(Code.FAILED_PRECONDITION, text)

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`: also its spaces, and who else plays."""
        taken = Property("world.players", ENCODED, "the names of the agents that somebody plays", self.taken)
        return super().properties_of(agent).merged(PropertyTree([taken]))

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Take an agent's Reset: it leaves the running episode, which ends once no other player is in it."""
        self.world.refuse_if_over()
        self.loop.ask(loop_agent, asked.seeds[0], asked.options, asked.restart)
        self._changed()
        self.start()

    def _told_once(self, settings: Settings) -> Settings:
        """Return the settings of a Reset without `together`, and without seed and options where its number is known."""
        if "together" not in settings:
            return settings
        number = read_scalar(settings, "together", "Reset")
        if not isinstance(number, np.integer):
            raise wrong("together", "an integer", number)
        # `make_parallel_remote` resets each agent over a stream of its own, so nobody knows which Reset arrives first.
        # The seed of a later one would begin another episode.
        left_out = {"together", "seed", "options"} if number == self._together else {"together"}
        self._together = number
        return {name: tensor for name, tensor in settings.items() if name not in left_out}

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Take an agent out of the loop; a default action stands in."""
        self.loop.leave(loop_agent)
        # Else those who wait for the next episode would wait for the end of one that only default actions play.
        if self.loop.end_deserted():
            self._changed()
            self.start()

    # Players of this process

    def enter(self, name: str | None = None, by: str = "agent") -> PolicyPlayer:
        """Take an agent, the first that is free where none is named; `by` is who plays it, for a recording.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, somebody plays it; INVALID_ARGUMENT, there is no such agent.
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
        """Begin an episode now, and let the clock run if it does not yet; a running episode is cut off."""
        self.world.refuse_if_over()
        self.loop.ask_reset(0, seed, options)
        self._changed()
        self.start()

    def end_episode(self) -> None:
        """Cut off a running episode; with `RealtimeOptions(autoreset=False)` the clock then stands until the next."""
        self.loop.end()
        self._changed()

    def subscribe(self, listener: Callable[[Frame], None]) -> Callable[[], None]:
        """Call a function after each reset, frame and failure of the environment; return what ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def _publish(self, job: Job, now: float, told: Mapping[str, Transition], error: str | None = None) -> None:
        lane = self.loop.environment
        running = error is None and lane.phase is Phase.RUNNING
        frame = Frame(job.episode, lane.length, now, told, tuple(self.loop.alive) if running else (), error)
        # A copy: a listener may unsubscribe when it is called.
        for listener in tuple(self._listeners):
            try:
                listener(frame)
            except (Exception, KeyboardInterrupt, SystemExit) as problem:  # whatever it is, the world goes on
                _log.error("a listener of the world %r raised", self.world.name, exc_info=problem)

    # The environment

    def _seen(self, name: str) -> object:
        """Return what an agent saw last, for a frame without an observation of it."""
        part = self.loop.parts[name]
        if part.phase is not Phase.RUNNING:
            # `Group.carry_out` makes a failure of the environment of it.
            raise KeyError(f"there is no observation of the agent {name!r}, which is alive")
        return part.observation

    async def _default_action(self, name: str) -> object:
        """Return the action of an agent that has none: a policy's, or a default one."""
        own, agent, space = self.options.default_action, self.group.ids[name], self.group.spaces[name][1]
        observation = self.loop.parts[name].observation
        if name in self.stand_ins and not self.is_played(name):
            where = f"the policy of {name!r}"
            return await self.world.env.executor.run(in_environment, where, self.stand_ins[name].act, observation)
        # Ours, so it needs no thread: what a user gives runs where the environment does.
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
            # The frame may have ended the episode of the last player that held it.
            self.loop.end_deserted()
        if told is not None:
            self._publish(job, now, told, error or None)

    def _stopped(self, job: Job, now: float) -> None:
        if self.world.env.ended is not None:
            self._publish(job, now, {}, self.world.env.ended.message)
