"""A clock as a pacer: it runs frames whether or not agents act (U-1).

A loop decides what happens when. A driver polls it when something is due. `FramePacer` connects both to the environment
and to the agents, whose Steps carry actions for the next frames and return the past frames. `ClockPacer` is for one
environment or for lanes, `JointClock` for several agents.
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
from bridge.core.worlds.realtime.clock_state import RESETTING, TIMES, WAITS, ClockState
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
"""The transition of each agent in a reset or a frame, by name, and the names of the agents that are still alive."""
_FRAME_DEADLINE = 10.0
"""Seconds, beyond the time of two frames, for which a Step waits for a frame."""
_MOST_HELD = 2.0
"""The longest time in seconds that a Step is held: after a longer silence, clients take the server for lost."""


class FramePacer(Pacer):
    """Steps an environment by a clock, whether or not agents act.

    The clock starts with the first Step of the first agent. It runs as long as the world exists, even without agents,
    except with `rest_when_empty`: then it stops until the next agent's first Step.

    Args:
        options: The options of real time.

    Raises:
        SettingError: Raised by `bind`: the environment or the options do not fit.
    """

    SETTINGS: tuple[str, ...]
    """The settings of a JoinWorld."""
    keeps_actions = True

    def __init__(self, options: RealtimeOptions) -> None:
        self.options = options
        """The options of real time."""
        self.fps = options.fps
        self.begins_by_itself = options.autoreset

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world."""
        super().bind(world)
        self.loop: FrameLoop = self._make_loop(world)
        """Decides when frames are due, and which actions they use."""
        self._scheduler = world.scheduler
        self._driver = FrameDriver(self, self.loop, world.scheduler, self.options.clock)
        self._waiters = Waiters(world.scheduler, lambda: self.world.refuse_if_over())
        self.inside: dict[Agent, EnvAgent] = {}
        """The agents in the world, including spectators, without the second streams of agents."""
        self.acting = ActingStreams(self)
        """The second streams of agents."""
        self._ordered: ResetRequest | None = None
        facts = world.env.facts
        self._actions = None if facts.num_envs is None else batch_space(facts.action_space, facts.num_envs)

    @abc.abstractmethod
    def _make_loop(self, world: PacedWorld) -> FrameLoop:
        """Return the loop, which decides when frames are due; raises SettingError."""

    def now(self) -> float:
        """Return the clock's time, seconds."""
        return self._driver.now()

    @property
    def frames(self) -> int:
        """Frames of the clock."""
        return self.loop.frames

    # Agents

    def join(self, settings: Settings) -> Agent:
        """Add an agent; the settings are `role` (player, spectator) and `wait` (now, next_frame, new_frame)."""
        if "seat" in settings:
            return self.acting.join(settings)
        refuse_unknown(settings, self.SETTINGS, "JoinWorld")
        role, wait = read_choice(settings, "role", ROLES), read_choice(settings, "wait", WAITS)
        name, loop_agent = self._let_in(settings, role == "player")
        facts, spaces = self.world.env.facts, self.group.spaces[name]
        state = ClockState(loop_agent, wait, facts, spaces)
        agent = EnvAgent(self, name, spaces, state, state.specs)
        agent.episode_uid = max(agent.actions, default=0) + 1
        self._set_wait(agent, wait)
        self.inside[agent] = agent
        return agent

    def _set_wait(self, agent: EnvAgent, wait: str) -> None:
        """Make an agent's Steps wait for an event of `WAITS` from now on."""
        agent.pacer_state.wait, agent.received = wait, None
        # With `new_frame` a client has several Steps in flight, so an action that waited for its turn would be late.
        # With `next_frame` each action gets its own frame, in order.
        agent.acts_on_arrival = wait == "new_frame"
        number = Spec.number("episode", () if agent.lanes is None else (agent.lanes,), np.int64)
        agent.unlisted_actions = {agent.episode_uid: number} if agent.acts_on_arrival else {}

    @abc.abstractmethod
    def _let_in(self, settings: Settings, player: bool) -> tuple[str, LoopAgent]:
        """Add an agent to the loop; return its name and its `LoopAgent`."""

    def admitted(self, agent: Agent) -> None:
        """Store the name of the agent's player, for recordings and pages."""
        if (own := self.inside.get(agent)) is not None:
            own.pacer_state.loop_agent.name = own.player

    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent from the world, which goes on (D-16)."""
        self.inside.pop(agent, None)
        self.acting.leave(agent)
        self.dismiss(agent.pacer_state.loop_agent)

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Remove an agent from the loop; the world goes on (D-16)."""
        self.loop.leave(loop_agent)

    @property
    def agents(self) -> int:
        """How many agents are in the world, including spectators."""
        return len(self.loop.loop_agents)

    @property
    def has_players(self) -> bool:
        """True if somebody plays."""
        return any(loop_agent.player for loop_agent in self.loop.loop_agents)

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent's actions and resets change nothing."""
        return not agent.pacer_state.loop_agent.player

    def counts(self) -> WorldCounts:
        """Return the world's counts; frames count as steps."""
        lanes = self.loop.lanes
        ended = sum(lane.begun - (lane.phase is Phase.RUNNING) for lane in lanes)
        return WorldCounts(len(lanes), sum(lane.frames for lane in lanes), ended)

    def rate(self) -> float:
        """Return the frame rate that clients and pages see, in frames per second."""
        return self.options.fps

    def describe(self) -> Mapping[str, object]:
        """Return what a page shows of the clock."""
        return {"fps": self.rate()}

    def properties(self) -> PropertyTree:
        """Return the clock's properties, below `world`."""
        fps = Property("world.fps", ENCODED, "frames a second", self.rate)
        statistics = Property("world.realtime", ENCODED, "the clock's counts and percentiles", self.loop.statistics)
        return PropertyTree([fps, statistics])

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`: its role, and what its Steps wait for."""
        state: ClockState = agent.pacer_state
        role = "spectator" if agent.watches else "player"
        waits = f"what a Step waits for: {', '.join(WAITS)}"
        seat = "the JoinWorld setting seat of a stream for its actions, of older clients"

        def set_wait(wait: object) -> None:
            if wait not in WAITS:
                raise wrong("world.wait", f"one of {', '.join(WAITS)}", wait)
            self._set_wait(agent, str(wait))

        own = [
            Property("world.role", TEXT, "player or spectator", lambda: role),
            Property("world.wait", TEXT, waits, lambda: state.wait, set_wait),
            Property("world.seat", TEXT, seat, lambda: self.acting.key_of(agent)),
        ]
        return PropertyTree(own).merged(super().properties_of(agent))

    # Requests of agents

    def hang_up(self, agent: EnvAgent) -> None:
        """End the wait of an agent whose client has gone."""
        self._waiters.hang_up(agent)

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:
        """Read from a Step's requested observations how to answer it.

        A Step that requests `resetting` is answered while some lanes reset; other Steps wait for all lanes. A Step that
        requests only `timing` carries an action, and leaves the buffers for a later Step.
        """
        agent.pacer_state.partial = RESETTING in wanted
        agent.reports = list(wanted) != [TIMES]

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Reset the lanes, and return at once (U-2, U-9). A spectator's Reset does not affect the lanes."""
        self.ask_reset(agent.pacer_state.loop_agent, self.read_reset(settings))
        agent.pacer_state.ended = False

    def read_reset(self, settings: Settings) -> ResetRequest:
        """Read the settings of a Reset or ResetWorld; raises RequestError."""
        lanes = self.world.env.facts.num_envs
        known = ("seed", "options", "restart", "reset_mask")
        return read_reset(settings, known if lanes else known[:3], lanes)

    @abc.abstractmethod
    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset: leave its episodes, and begin new ones if it is a player."""

    async def begin(self, agent: EnvAgent) -> int:
        """Wait until an episode runs, and enter it. With `new_frame`, raise if no Reset came after the last end."""
        state, received = agent.pacer_state, self._received(agent)
        # Steps that were in flight when the episode ended must not enter the next one. Lanes begin by themselves.
        if state.ended and state.wait == "new_frame" and agent.lanes is None:
            text = "the episode has ended; with wait=new_frame send Reset before the first Step of the next one"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        self.start()
        await self._driver.settled()
        await self._wait_for_lanes(agent)
        self._collect(agent, self._take(agent, repeats=True), received)
        agent.tell_names()
        return pb.RUNNING

    def _received(self, agent: EnvAgent) -> float:
        """Return when the current Step arrived, in seconds of the clock."""
        return self.now() if agent.received is None else agent.received

    def _take(self, agent: EnvAgent, *, repeats: bool = False, enters: bool = True) -> list[Told[Seen] | None]:
        """Return what to report to the agent about each lane; without `enters`, only about lanes where it is in."""
        loop, own = self.loop, agent.pacer_state.loop_agent
        lanes = enumerate(own.buffers)
        return [loop.take(own, i, repeats=repeats) if enters or buffer.reading else None for i, buffer in lanes]

    async def _wait_for_lanes(self, agent: EnvAgent) -> None:
        """Wait until all lanes of the agent have something to report, or one lane if it accepts partial answers."""
        loop, own = self.loop, agent.pacer_state.loop_agent
        buffers = own.buffers

        def ready() -> bool:
            there = [bool(buffer.reading) or loop.may_enter(own, buffer) for buffer in buffers]
            # For a single environment a failed reset is the Step's error. For lanes `_collect` puts it into the infos.
            if agent.lanes is None and buffers[0].error is not None and not there[0]:
                error, buffers[0].error = buffers[0].error, None
                raise RequestError(Code.INTERNAL, error)
            self._refuse_absence(agent)
            return any(there) if agent.pacer_state.partial else all(there)

        def reason() -> str | None:
            if self.others_play:
                return None
            errors = "; ".join(buffer.error for buffer in buffers if buffer.error)
            return f"no episode began within reset_timeout={self.options.reset_timeout:g} s; {errors}"

        await self.wait_until(agent, ready, self.options.reset_timeout, reason)

    def _refuse_absence(self, agent: EnvAgent) -> None:
        """Raise, once, if the running episode began without this agent."""

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Record the action for the next frames, and report what happened since the last Step."""
        # Do this before any wait, so that the frame that this Step waits for uses the action.
        self.act_on_arrival(agent, action, {})
        return await self.report(agent)

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Record an action for the episode whose number comes with it, or for the one that was reported last."""
        received, buffers = self.now(), agent.pacer_state.buffers
        # U-5: lanes begin their next episodes by themselves, so the episode reported last may not be the one that the
        # agent had seen when it chose its action.
        named = actions.get(agent.episode_uid)
        reading = [buffer.reading for buffer in buffers]
        self.act(agent, action, received, reading if named is None else np.atleast_1d(named).tolist())
        return received

    async def report(self, agent: EnvAgent) -> int:
        """Report what happened since the last Step, once the event that the current Step waits for has happened."""
        state, received = agent.pacer_state, self._received(agent)
        # `Throttle` sends its action at once and asks for the observation at the end of the frame. Leave what happens
        # in between for that second Step.
        if not agent.reports:
            state.timing[..., :2] = received, self.now()
            return pb.RUNNING
        buffer = state.buffers[0]
        # The last Step was refused (see below), so this one is the first of the next episode.
        if agent.lanes is None and not buffer.reading:
            return await self.begin(agent)
        if state.wait == "next_frame":
            await self._wait_for_frame(agent)
        elif state.wait == "new_frame":
            await self._wait_for_news(agent)
        # Without `resetting` a client cannot see that a lane has no observation, so its Step waits.
        if agent.lanes is not None and not state.partial:
            await self._wait_for_lanes(agent)
        # The environment failed. The Step is refused, which ends the agent's episode; its next Step begins another one.
        if agent.lanes is None and (end := buffer.closing) is not None and end.observed.error is not None:
            state.ended = True
            buffer.abandon()
            raise RequestError(Code.INTERNAL, end.observed.error)
        self._collect(agent, self._take(agent), received)
        if agent.lanes is not None:
            return pb.RUNNING
        state.ended = bool(agent.terminated or agent.truncated)
        return pb.TERMINATED if agent.terminated else pb.INTERRUPTED if agent.truncated else pb.RUNNING

    def act(self, agent: EnvAgent, action: object, received: float, episodes: Sequence[int]) -> None:
        """Record an action for the next frames.

        Args:
            agent: The agent.
            action: The action; None: the last action goes on.
            received: When it arrived, in seconds of the clock.
            episodes: For each lane the number of the episode that the action is for; 0: none.

        Raises:
            RequestError: The world is over.
        """
        self.world.refuse_if_over()
        own = agent.pacer_state.loop_agent
        if action is None or not own.player:
            return
        for index, of_lane in enumerate([action] if self._actions is None else iterate(self._actions, action)):
            if episodes[index]:  # otherwise the agent is in no episode of the lane, and the action is ignored (U-5)
                self.loop.act(own, index, of_lane, received, episodes[index])

    def interrupt(self, agent: EnvAgent) -> None:
        """Report the last observations of the episodes that a ResetWorld ends."""
        # The first agent to be interrupted carries out the reset; for the others this does nothing.
        self.carry_out_reset()
        # The Step that ends the sequence must not enter an episode that has begun since.
        self._collect(agent, self._take(agent, enters=False), self.now())
        agent.truncated[...] = True
        agent.pacer_state.ended = True
        # The episode may go on for others, or the next one may have begun: this agent is in neither of them.
        self._abandon(agent)
        self.start()

    def _abandon(self, agent: EnvAgent) -> None:
        """Remove an agent from its episodes."""
        for buffer in agent.pacer_state.buffers:
            buffer.abandon()

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent whose client has left, with the default action; return False for a spectator."""
        if agent.watches:  # a spectator has no place that another client could take over
            return False
        for buffer in agent.pacer_state.buffers:
            self.loop.drop_action(buffer.lane)
        return True

    async def _wait_for_frame(self, agent: EnvAgent) -> None:
        """Wait until each of the agent's lanes has had a frame that may use its action, or its episode has ended."""
        pending = self.loop.is_pending if agent.pacer_state.loop_agent.player else None
        waits = [FrameWait(buffer, pending) for buffer in agent.pacer_state.buffers]

        def over() -> bool:
            ended = [each.is_over() for each in waits]  # a list, because each must be asked after every frame
            return all(ended)

        deadline = _FRAME_DEADLINE + 2.0 / self.rate()
        await self.wait_until(agent, over, deadline, lambda: f"no frame passed within {deadline:g} s")

    async def _wait_for_news(self, agent: EnvAgent) -> None:
        """Wait at most 2 s for an unreported frame or end of an episode."""
        loop, own = self.loop, agent.pacer_state.loop_agent

        def told() -> bool:
            buffers = own.buffers
            lanes = [buffer.lane for buffer in buffers]
            # Lanes are stepped one after the other. Wait for the complete frame: otherwise each lane would need its own
            # answer, and use up a Step in flight. A complete earlier frame is reported at once.
            if any(lane.busy and lane.phase is Phase.RUNNING for lane in lanes):  # the frame is not complete
                return any(buffer.unseen > 1 for buffer in buffers)
            return any(
                buffer.closing is not None or (buffer.unseen > 0 if buffer.reading else loop.may_enter(own, buffer))
                for buffer in buffers
            )

        try:
            await self.wait_until(agent, told, _MOST_HELD, lambda: "nothing is new")
        except RequestError as error:
            # No news is not an error: the answer repeats the newest observation, with 0 frames.
            if error.code is not Code.DEADLINE_EXCEEDED:
                raise

    def _collect(self, agent: EnvAgent, taken: list[Told[Seen] | None], received: float) -> None:
        agent.pacer_state.collect(agent, taken, self.loop, received, self.now())

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return frames, ended episodes, timing, and which lanes reset."""
        state: ClockState = agent.pacer_state
        return state.observe(agent, wanted)

    # Resets of the whole world

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Store the settings of a ResetWorld, which the first interrupted agent carries out."""
        # Do not reset yet: if no agent can be told in time, the ResetWorld is withdrawn, and must have reset nothing
        # (D-2).
        asked = self.read_reset(settings)
        self.world.refuse_if_over()
        before, self._ordered = self._ordered, asked
        return lambda: setattr(self, "_ordered", before if self._ordered is asked else self._ordered)

    def restart(self, caller: Agent | None) -> None:
        """Begin a new episode in every lane."""
        # If no other agent had to be interrupted, nobody has carried out the reset yet.
        self.carry_out_reset()
        if caller is not None and (agent := self.inside.get(caller)) is not None:
            self._abandon(agent)
        self.start()

    def carry_out_reset(self) -> None:
        """End the running episodes as a ResetWorld ordered. Does nothing the second time."""
        if self._ordered is None:
            return
        asked, self._ordered = self._ordered, None
        for index in np.flatnonzero(asked.mask).tolist():
            self.loop.ask_reset(index, asked.seeds[index], asked.options)
        self._changed()

    # Waiting

    @property
    def others_play(self) -> bool:
        """True if an agent without an episode has to wait until other agents end theirs."""
        return False

    async def wait_until(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str | None]
    ) -> None:
        """Wait until `ready()`; raise DEADLINE_EXCEEDED after `seconds` of real time.

        Args:
            agent: The waiting agent.
            ready: Returns True once the wait is over.
            seconds: The deadline.
            reason: Called at the deadline; returns the text of the error, or None to wait for as long again.

        Raises:
            RequestError: `ready` raised it, the world is over, or the agent's client has gone.
        """
        await self._waiters.wait(agent, ready, seconds, reason)

    def _changed(self) -> None:
        """Answer the agents whose wait is over, and set the timer of the next frame."""
        self._waiters.look()
        self._driver.set_timer()

    def start(self) -> None:
        """Start the clock. With a virtual clock, run what is due now. May be called again."""
        self._driver.start()

    def turned(self, when: float) -> bool:
        """Do other work that is due when a virtual clock was advanced; return True if frames may be due again."""
        return False

    # The environment

    async def run_job(self, job: Job, at: float | None) -> None:
        """Run a job and report its outcome to the loop; `at` is the job's time, None: now."""
        error, outcome = "", None
        began = time.perf_counter()
        try:
            outcome = await self._call_environment(job)
        # Includes errors for a malformed result of a reset or a step, and errors of observers.
        except (Exception, KeyboardInterrupt, SystemExit) as problem:
            error = answer_to(job.kind, problem).message
        spent = time.perf_counter() - began
        # A frame's result has the time of the frame, so that tests with a virtual clock do not depend on speed.
        now = self.now() if at is None else at
        if self.over:
            # The end of the world interrupted the call. That is not a failure of the environment: do not count or
            # retry it.
            self.loop.lanes[job.lane].busy = False
            self._stopped(job, now)
        else:
            self._note(job, now, spent, outcome, error)
        self._changed()

    async def _call_environment(self, job: Job) -> Outcome:
        """Reset or step an environment for a job; return a copy of the result.

        Raises:
            Exception: The environment raised, or its result is malformed.
        """
        # Rewards must be numbers, because they are added up over the frames between two Steps.
        return await self.group.carry_out(
            self.world.env, job, self._seen, self._default_action, keep=kept, read_reward=as_number
        )

    @abc.abstractmethod
    def _seen(self, name: str) -> object:
        """Return an agent's last observation, for a frame without one."""

    @abc.abstractmethod
    async def _default_action(self, name: str) -> object:
        """Return the action of an agent without an action."""

    @abc.abstractmethod
    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Report to the loop the outcome of a job that took `spent` seconds; None: the environment raised `error`."""

    def _stopped(self, job: Job, now: float) -> None:
        """Handle the end of the world during a job."""

    # The end

    def stop(self) -> None:
        """Stop the clock, and fail the waits of agents."""
        self._waiters.look()
        self._driver.stop()
