"""A clock as a pacer: it runs frames whether or not agents act, and agents wait for their results (U-1).

A loop decides what happens when, and a driver asks it when something is due; `FramePacer` gives them the environment
and tells agents. Their Steps hand in actions for the next frames and report the past ones. `ClockPacer` is that of one
environment or of lanes, `JointClock` that of several agents.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.encoding.frame_buffer import Told
from bridge.core.encoding.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld, WorldCounts, answer_to
from bridge.core.worlds.environment import Job, Transition, kept
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.realtime.acting_stream import ActingStreams
from bridge.core.worlds.realtime.clock_part import RESETTING, TIMES, WAITS, ClockPart
from bridge.core.worlds.realtime.frame_driver import FrameDriver
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.realtime.loop_lane import LoopAgent, Phase, Seen
from bridge.core.worlds.realtime.waiting import FrameWait, Waiters
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.settings import ROLES, ResetRequest, Settings, read_choice, read_reset, refuse_unknown, wrong
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["FramePacer", "Outcome"]

Outcome: TypeAlias = tuple[dict[str, Transition], list[str]]
"""The transition of each agent in a reset or a frame, by name, and the names of those that go on."""
_FRAME_DEADLINE = 10.0
"""Seconds beyond a frame's own time that a Step waits for one."""
_MOST_HELD = 2.0
"""Seconds that a Step waits for news at most: clients take a server for lost that does not answer for longer."""


class FramePacer(Pacer):
    """Steps an environment by a clock, whether or not agents act.

    The clock starts with the first Step of the first agent. It goes on as long as the world exists, also without
    agents, unless it is to rest then: until the next one's first Step.

    Args:
        options: How it runs.

    Raises:
        SettingError: `bind` raises it: the environment, or options, do not fit.
    """

    SETTINGS: tuple[str, ...]
    """The settings of a JoinWorld."""
    keeps_actions = True

    def __init__(self, options: RealtimeOptions) -> None:
        self.options = options
        """How it runs."""
        self.fps = options.fps
        self.begins_by_itself = options.autoreset

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world."""
        super().bind(world)
        self.loop: FrameLoop = self._make_loop(world)
        """Decides which frames are due, and what actions they have."""
        self._scheduler = world.scheduler
        self._driver = FrameDriver(self, self.loop, world.scheduler, self.options.clock)
        self._waiters = Waiters(world.scheduler, lambda: self.world.refuse_if_over())
        self.inside: dict[Agent, EnvAgent] = {}
        """The agents that are in, also those that only watch, each once: the second stream of an agent is none."""
        self.acting = ActingStreams(self)
        """Lets in the second streams of agents."""
        self._ordered: ResetRequest | None = None
        facts = world.env.facts
        self._actions = None if facts.num_envs is None else batch_space(facts.action_space, facts.num_envs)

    @abc.abstractmethod
    def _make_loop(self, world: PacedWorld) -> FrameLoop:
        """Return what decides which frames are due; raises SettingError."""

    def now(self) -> float:
        """Return the clock's time, seconds."""
        return self._driver.now()

    @property
    def frames(self) -> int:
        """Frames of the clock."""
        return self.loop.frames

    # Agents

    def join(self, settings: Settings) -> Agent:
        """Join an agent; the settings are `role` (player, spectator) and `wait` (now, next_frame, new_frame)."""
        if "seat" in settings:
            return self.acting.join(settings)
        refuse_unknown(settings, self.SETTINGS, "JoinWorld")
        role, wait = read_choice(settings, "role", ROLES), read_choice(settings, "wait", WAITS)
        name, loop_agent = self._let_in(settings, role == "player")
        facts, spaces = self.world.env.facts, self.group.spaces[name]
        part = ClockPart(loop_agent, wait, facts, spaces)
        agent = EnvAgent(self, name, spaces, part, part.specs)
        agent.episode_uid = max(agent.actions, default=0) + 1
        self._set_wait(agent, wait)
        self.inside[agent] = agent
        return agent

    def _set_wait(self, agent: EnvAgent, wait: str) -> None:
        """Have an agent's Steps wait for an event of `WAITS` from now on."""
        agent.part.wait, agent.received = wait, None
        # With `new_frame` a client has more Steps under way than there are frames yet, so an action that waited for
        # its turn would come late. With `next_frame` each action is to have a frame of its own, in its turn.
        agent.acts_on_arrival = wait == "new_frame"
        number = Spec.number("episode", () if agent.lanes is None else (agent.lanes,), np.int64)
        agent.unlisted_actions = {agent.episode_uid: number} if agent.acts_on_arrival else {}

    @abc.abstractmethod
    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add an agent to the loop, by other settings than `role` and `wait` too; return its name and place."""

    def admitted(self, agent: Agent) -> None:
        """Note who acts through an agent, for what recordings and pages are told."""
        if (own := self.inside.get(agent)) is not None:
            own.part.loop_agent.name = own.player

    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent from the world, which goes on (D-16)."""
        self.inside.pop(agent, None)
        self.acting.leave(agent)
        self.dismiss(agent.part.loop_agent)

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Take an agent out of the loop; the world goes on (D-16)."""
        self.loop.leave(loop_agent)

    @property
    def agents(self) -> int:
        """How many agents are in, spectators too."""
        return len(self.loop.loop_agents)

    @property
    def has_players(self) -> bool:
        """True if somebody plays."""
        return any(loop_agent.player for loop_agent in self.loop.loop_agents)

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent's actions and resets change nothing."""
        return not agent.part.loop_agent.player

    def counts(self) -> WorldCounts:
        """Return how much it has done; frames count as steps."""
        lanes = self.loop.lanes
        ended = sum(lane.begun - (lane.phase is Phase.RUNNING) for lane in lanes)
        return WorldCounts(len(lanes), sum(lane.frames for lane in lanes), ended)

    def rate(self) -> float:
        """Return the frames a second that clients and pages are told."""
        return self.options.fps

    def describe(self) -> Mapping[str, object]:
        """Return what a page shows of it."""
        return {"fps": self.rate()}

    def properties(self) -> PropertyTree:
        """Return what the clock adds to the tree below `world`."""
        fps = Property("world.fps", ENCODED, "frames a second", self.rate)
        statistics = Property("world.realtime", ENCODED, "the clock's counts and percentiles", self.loop.statistics)
        return PropertyTree([fps, statistics])

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`: its role, and what its Steps wait for."""
        part: ClockPart = agent.part
        role = "spectator" if agent.watches else "player"
        waits = f"what a Step waits for: {', '.join(WAITS)}"
        seat = "the JoinWorld setting seat of a stream for its actions, of older clients"

        def set_wait(wait: object) -> None:
            if wait not in WAITS:
                raise wrong("world.wait", f"one of {', '.join(WAITS)}", wait)
            self._set_wait(agent, str(wait))

        own = [
            Property("world.role", TEXT, "player or spectator", lambda: role),
            Property("world.wait", TEXT, waits, lambda: part.wait, set_wait),
            Property("world.seat", TEXT, seat, lambda: self.acting.key_of(agent)),
        ]
        return PropertyTree(own).merged(super().properties_of(agent))

    # Requests of agents

    def hang_up(self, agent: EnvAgent) -> None:
        """End its wait."""
        self._waiters.hang_up(agent)

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:
        """A Step that requests `resetting` is answered while lanes reset; others are answered when all lanes are ready.

        A Step that requests only `timing` hands in its action and leaves the buffers for a later Step.
        """
        agent.part.partial = RESETTING in wanted
        agent.reports = list(wanted) != [TIMES]

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Reset the lanes, and return at once (U-2, U-9). A spectator's Reset does not affect the lanes."""
        self.ask_reset(agent.part.loop_agent, self.read_reset(settings))
        agent.part.ended = False

    def read_reset(self, settings: Settings) -> ResetRequest:
        """Read the settings of a Reset or ResetWorld; raises RequestError."""
        lanes = self.world.env.facts.num_envs
        known = ("seed", "options", "restart", "reset_mask")
        return read_reset(settings, known if lanes else known[:3], lanes)

    @abc.abstractmethod
    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset: give up its episodes, and where it is a player see to new ones."""

    async def begin(self, agent: EnvAgent) -> int:
        """Wait until an episode runs, and enter it; with `new_frame` after a Reset alone, not by Steps sent ahead."""
        part, received = agent.part, self._received(agent)
        # Steps that were in flight when the episode ended would enter the next one before the client has asked for it.
        if part.ended and part.wait == "new_frame" and agent.lanes is None:  # lanes begin by themselves
            text = "the episode has ended; with wait=new_frame send Reset before the first Step of the next one"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        self.start()
        await self._driver.settled()
        await self._wait_for_lanes(agent)
        self._collect(agent, self._take(agent, repeats=True), received)
        agent.tell_names()
        return pb.RUNNING

    def _received(self, agent: EnvAgent) -> float:
        """Return when the Step at hand came, seconds of the clock."""
        return self.now() if agent.received is None else agent.received

    def _take(self, agent: EnvAgent, *, repeats: bool = False, enters: bool = True) -> list[Told[Seen] | None]:
        """Give out what the agent is to be told of each lane; unless it `enters`, of those alone that it is in."""
        loop, own = self.loop, agent.part.loop_agent
        lanes = enumerate(own.buffers)
        return [loop.take(own, i, repeats=repeats) if enters or buffer.reading else None for i, buffer in lanes]

    async def _wait_for_lanes(self, agent: EnvAgent) -> None:
        """Return once the agent's lanes have something to tell: all of them, or one where it takes the rest later."""
        loop, own = self.loop, agent.part.loop_agent
        buffers = own.buffers

        def ready() -> bool:
            there = [bool(buffer.reading) or loop.may_enter(own, buffer) for buffer in buffers]
            # A failed reset is the answer of a single environment's Step; of lanes, `_collect` puts it into the infos.
            if agent.lanes is None and buffers[0].error is not None and not there[0]:
                error, buffers[0].error = buffers[0].error, None
                raise RequestError(Code.INTERNAL, error)
            self._refuse_absence(agent)
            return any(there) if agent.part.partial else all(there)

        def reason() -> str | None:
            if self.others_play:
                return None
            errors = "; ".join(buffer.error for buffer in buffers if buffer.error)
            return f"no episode began within reset_timeout={self.options.reset_timeout:g} s; {errors}"

        await self.wait_until(agent, ready, self.options.reset_timeout, reason)

    def _refuse_absence(self, agent: EnvAgent) -> None:
        """Raise where the running episode began without an agent, and it was not told so."""

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Leave the action for the next frames, and tell what happened since the last Step."""
        # Before any wait: the frame that this Step waits for is to use its action.
        self.act_on_arrival(agent, action, {})
        return await self.report(agent)

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Leave an action for the next frames of the episode that it names, else of that which its agent was told."""
        received, buffers = self.now(), agent.part.buffers
        # U-5: lanes begin their next episodes by themselves, so the one that an agent was told last by now may not be
        # the one that it had seen when it chose its action.
        named = actions.get(agent.episode_uid)
        reading = [buffer.reading for buffer in buffers]
        self.act(agent, action, received, reading if named is None else np.atleast_1d(named).tolist())
        return received

    async def report(self, agent: EnvAgent) -> int:
        """Tell what happened since the last Step, once it is what the Step at hand waits for."""
        part, received = agent.part, self._received(agent)
        # `Throttle` sends its action at once and asks for the observation at the frame's end: what passes between is
        # for that Step to tell.
        if not agent.reports:
            part.timing[..., :2] = received, self.now()
            return pb.RUNNING
        buffer = part.buffers[0]
        # The last Step was refused, as below: this one is the first of the next episode.
        if agent.lanes is None and not buffer.reading:
            return await self.begin(agent)
        if part.wait == "next_frame":
            await self._wait_for_frame(agent)
        elif part.wait == "new_frame":
            await self._wait_for_news(agent)
        # A client that does not ask for `resetting` cannot be told that a lane has no observation, so it waits for one.
        if agent.lanes is not None and not part.partial:
            await self._wait_for_lanes(agent)
        # The Step is refused, and a refused Step tells nothing else: the agent is out of the episode, so the next one
        # begins.
        if agent.lanes is None and (end := buffer.closing) is not None and end.observed.error is not None:
            part.ended = True
            buffer.abandon()
            raise RequestError(Code.INTERNAL, end.observed.error)
        self._collect(agent, self._take(agent), received)
        if agent.lanes is not None:
            return pb.RUNNING
        part.ended = bool(agent.terminated or agent.truncated)
        return pb.TERMINATED if agent.terminated else pb.INTERRUPTED if agent.truncated else pb.RUNNING

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Leave an action for the next frames.

        Args:
            agent: Whose.
            action: The action; None: the last one goes on.
            received: When it came, seconds of the clock.
            episodes: Of each lane the number of the episode that it is for; 0: for none.

        Raises:
            RequestError: The world is over.
        """
        self.world.refuse_if_over()
        own = agent.part.loop_agent
        if action is None or not own.player:
            return
        for index, of_lane in enumerate([action] if self._actions is None else iterate(self._actions, action)):
            if episodes[index]:  # else the lane is in no episode: its action is for nothing (U-5)
                self.loop.act(own, index, of_lane, received, episodes[index])

    def interrupt(self, agent: EnvAgent) -> None:
        """Report the last observations of the episodes that a ResetWorld ends."""
        # By the first agent that is told; for the others this does nothing.
        self.carry_out_reset()
        # The Step that ends the sequence must not enter an episode that began meanwhile.
        self._collect(agent, self._take(agent, enters=False), self.now())
        agent.truncated[...] = True
        agent.part.ended = True
        # The episode may go on for others, or another one has begun: this agent is in neither.
        self._abandon(agent)
        self.start()

    def _abandon(self, agent: EnvAgent) -> None:
        """Take an agent out of the episodes that it is in."""
        for buffer in agent.part.buffers:
            buffer.abandon()

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client, for which a default action stands in; False: it only watches."""
        if agent.watches:  # it takes nobody's place, so nobody can take it from it
            return False
        for buffer in agent.part.buffers:
            self.loop.drop_action(buffer.lane)
        return True

    async def _wait_for_frame(self, agent: EnvAgent) -> None:
        """Return once each lane that the agent is in has had a frame that may use its action, or its episode ended."""
        # A program with a loop of its own takes actions at the end of a frame: that frame is told.
        acts = agent.part.loop_agent.player and not self.chooses_ahead
        waits = [FrameWait(buffer, acts) for buffer in agent.part.buffers]

        def over() -> bool:
            ended = [each.is_over() for each in waits]  # each is asked after every frame
            return all(ended)

        deadline = _FRAME_DEADLINE + 2.0 / self.options.fps
        await self.wait_until(agent, over, deadline, lambda: f"no frame passed within {deadline:g} s")

    async def _wait_for_news(self, agent: EnvAgent) -> None:
        """Return once a frame has passed that the agent was not told of, or an episode ended; at most after 2 s."""
        loop, own = self.loop, agent.part.loop_agent

        def told() -> bool:
            buffers = own.buffers
            lanes = [buffer.lane for buffer in buffers]
            # Lanes are stepped one after the other: to answer for the first would take an answer, and a Step in flight,
            # for each lane. Where a whole frame waits already, it is told.
            if any(lane.busy and lane.phase is Phase.RUNNING for lane in lanes):  # the frame is not complete
                return any(buffer.unseen > 1 for buffer in buffers)
            return any(
                buffer.closing is not None or (buffer.unseen > 0 if buffer.reading else loop.may_enter(own, buffer))
                for buffer in buffers
            )

        try:
            await self.wait_until(agent, told, _MOST_HELD, lambda: "nothing is new")
        except RequestError as error:
            # Nothing new is no error: the answer repeats the newest observation, with 0 frames.
            if error.code is not Code.DEADLINE_EXCEEDED:
                raise

    def _collect(self, agent: EnvAgent, taken: list[Told[Seen] | None], received: float) -> None:
        agent.part.collect(agent, taken, self.loop, received, self.now())

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return frames, ended episodes, times, and which lanes reset."""
        part: ClockPart = agent.part
        return part.observe(agent, wanted)

    # Of the whole world

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld; the first agent that is told carries it out."""
        # Not carried out yet: a ResetWorld of which no agent hears in time is withdrawn, and then has reset nothing
        # (D-2).
        asked = self.read_reset(settings)
        self.world.refuse_if_over()
        before, self._ordered = self._ordered, asked
        return lambda: setattr(self, "_ordered", before if self._ordered is asked else self._ordered)

    def restart(self, caller: Agent | None) -> None:
        """Begin a new episode in every lane."""
        # No other agent had to be told, or the last ones have left: then nobody has carried it out.
        self.carry_out_reset()
        if caller is not None and (agent := self.inside.get(caller)) is not None:
            self._abandon(agent)
        self.start()

    def carry_out_reset(self) -> None:
        """Cut off what runs, as a ResetWorld ordered; again: nothing."""
        if self._ordered is None:
            return
        asked, self._ordered = self._ordered, None
        for index in np.flatnonzero(asked.mask).tolist():
            self.loop.ask_reset(index, asked.seeds[index], asked.options)
        self._changed()

    # Waiting

    @property
    def others_play(self) -> bool:
        """True if an agent that waits for an episode waits for others to end theirs."""
        return False

    async def wait_until(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()`; raise DEADLINE_EXCEEDED after so many seconds of the machine's clock.

        Args:
            agent: Who waits.
            ready: Returns True once it need not wait any longer.
            seconds: The deadline.
            reason: Asked at the deadline: why it takes so long; None: for a good reason, so wait as long again.

        Raises:
            RequestError: As `ready` does, or the world is over, or the agent's client has gone.
        """
        await self._waiters.wait(agent, ready, seconds, reason)

    def _changed(self) -> None:
        """Answer the agents for whom enough has happened, and set the timer of the next frame."""
        self._waiters.look()
        self._driver.set_timer()

    def start(self) -> None:
        """Start the clock, and with a clock that is turned by hand do at once what waits. Again: nothing."""
        self._driver.start()

    def turned(self, when: float) -> bool:
        """Do what else is due by then, when a virtual clock was turned; return whether frames may be due again."""
        return False

    # The environment

    async def run_job(self, job: Job, at: float | None) -> None:
        """Run a job and tell the loop; `at` is the time that it takes place, None: now."""
        error, outcome = "", None
        began = time.perf_counter()
        try:
            outcome = await self._call_environment(job)
        # Also of what is no result of a reset or a step, or of an observer.
        except (Exception, KeyboardInterrupt, SystemExit) as problem:
            error = answer_to(job.kind, problem).message
        spent = time.perf_counter() - began
        # A frame's result has the frame's own time, so that tests with a virtual clock do not depend on how fast it
        # ran.
        now = self.now() if at is None else at
        if self.over:
            # A call that was cut off by the end of the world is no failure of the environment: nothing is counted or
            # tried again.
            self.loop.lanes[job.lane].busy = False
            self._stopped(job, now)
        else:
            self._note(job, now, spent, outcome, error)
        self._changed()

    async def _call_environment(self, job: Job) -> Outcome:
        """Reset or step an environment, as a job says; return what came of it, copied.

        Raises:
            Exception: The environment raised, or what it returned cannot be read.
        """
        # Rewards are numbers: they are added up over the frames between two Steps.
        return await self.group.carry_out(
            self.world.env, job, self._seen, self._default_action, keep=kept, read_reward=as_number
        )

    @abc.abstractmethod
    def _seen(self, name: str) -> object:
        """Return what an agent saw last, for a frame without an observation of it."""

    @abc.abstractmethod
    async def _default_action(self, name: str) -> object:
        """Return the action of an agent that has none."""

    @abc.abstractmethod
    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Tell the loop what came of a job that took `spent` seconds; None: the environment raised `error`."""

    def _stopped(self, job: Job, now: float) -> None:
        """Note that the world came to its end while the job was under way."""

    # The end

    def stop(self) -> None:
        """Stop the clock; agents that wait hear that the world is gone."""
        self._waiters.look()
        self._driver.stop()
