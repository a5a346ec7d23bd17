"""The common part of all real-time worlds: a clock that runs frames, and agents that wait for their results.

A loop decides what happens when; `ClockedWorld` gives it timers, and tells agents that wait.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from bridge.core.clock import Clock
from bridge.core.encoding.properties import ENCODED, Property, PropertyTree
from bridge.core.logs import SafeLog
from bridge.core.worlds.base import Agent, WorldCounts, answer_to
from bridge.core.worlds.environment import Environment, Job
from bridge.core.worlds.realtime.agent import WAITS, RealtimeAgent
from bridge.core.worlds.realtime.loop import LoopAgent, Phase, RealtimeLoop
from bridge.core.worlds.realtime.seat import Seats
from bridge.core.worlds.scheduling import PendingResult, Scheduler, Timer
from bridge.core.worlds.settings import ResetRequest, Settings, read_choice, read_reset, refuse_unknown
from bridge.core.worlds.single import EnvWorld
from bridge.errors import Code, RequestError, SettingError

__all__ = ["ROLES", "ClockedWorld", "RealTime", "RealtimeOptions"]

_log = SafeLog(__name__)
ROLES = ("player", "spectator")
"""The roles of an agent; the first is the default."""
Outcome = TypeVar("Outcome")
"""The result of a reset or of a frame."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealTime:
    """How a real-time world runs: `realtime=` of `serve_gym` and `serve_parallel`, beside `fps=`.

    Examples:
        >>> from bridge import RealTime, serve_gym
        >>> with serve_gym("CartPole-v1", fps=30, default_action=0, realtime=RealTime(max_action_age=0.5)) as server:
        ...     pass

    Args:
        max_action_age: Seconds after which the default action replaces the agent's last action; None: the last action
            stays in force.
        catch_up: Seconds by which the server may be late and still run each frame that was missed; where it is later,
            they are dropped.
        reset_timeout: Seconds that the first Step of an agent waits for an episode to begin.
        rest_when_empty: Stand still while nobody is in the world, neither a player nor a spectator; None: where the
            server has a page (`web=True`) and the world is no match.
        clock: What the frames follow, such as `bridge.testing.VirtualClock()` in tests; None: the machine's clock.
    """

    max_action_age: float | None = None
    catch_up: float = 0.25
    reset_timeout: float = 60.0
    rest_when_empty: bool | None = None
    clock: Clock | None = None


@dataclasses.dataclass(frozen=True)
class RealtimeOptions(RealTime):
    """All that says how a real-time world runs."""

    fps: float
    """Frames a second."""
    default_action: object = None
    """Applied where there is no action of the player; None: the neutral one, zeros where the space has them. In a world
    of several agents a function of an agent's id, last observation and action space; None: the first allowed action, or
    the neutral one."""
    agents: object = None
    """In a world of several agents: who plays those that no client does, before `default_action` is asked. A policy
    (observation to action), `"random"`, or a mapping of these by agent; None: nobody."""
    autoreset: bool = True
    """True if each episode begins by itself; False: the first and every later one waits for a reset."""

    @classmethod
    def of(
        cls,
        fps: float,
        default_action: object,
        realtime: RealTime | None,
        agents: object = None,
        *,
        rests: bool = False,
    ) -> RealtimeOptions:
        """Read the keywords of `serve_gym` and `serve_parallel`; `rests` is the default of `rest_when_empty`.

        Raises:
            SettingError: A number is out of its range, or `realtime` is something else.
        """
        if realtime is not None and not isinstance(realtime, RealTime):
            raise SettingError(f"expected realtime to be bridge.RealTime(…), got a {type(realtime).__name__}")
        options = cls(fps=fps, default_action=default_action, agents=agents, **vars(realtime or RealTime()))
        if options.rest_when_empty is None:
            options = dataclasses.replace(options, rest_when_empty=rests)
        return options

    def __post_init__(self) -> None:
        RealtimeLoop(1, self.fps, None, **self.timing())  # it raises SettingError where a number is out of its range
        if not isinstance(self.reset_timeout, (int, float)) or not self.reset_timeout > 0:
            raise SettingError(f"expected reset_timeout to be a positive number of seconds, got {self.reset_timeout!r}")

    def timing(self) -> dict[str, Any]:
        """Return the keywords of a `RealtimeLoop`."""
        return {name: getattr(self, name) for name in ("max_action_age", "catch_up", "autoreset", "rest_when_empty")}


class ClockedWorld(EnvWorld, abc.ABC, Generic[Outcome]):
    """A world that a clock drives.

    Its clock starts with the first Step of the first agent. It goes on as long as the world exists, also without
    agents, unless it is to rest then: until the next one's first Step.

    Args:
        name: The world's name.
        env: The environment that is stepped; owned by the world from here on.
        scheduler: Runs the frames.
        options: How it runs.
        loop: Says what is due.
    """

    SETTINGS: tuple[str, ...] = ("role", "wait")
    """The settings of a JoinWorld."""

    def __init__(
        self, name: str, env: Environment, scheduler: Scheduler, options: RealtimeOptions, loop: RealtimeLoop
    ) -> None:
        super().__init__(name, env, scheduler)
        self.options = options
        self.loop = loop
        self.acting = Seats()
        """Lets in the second streams of agents."""
        self._clock = scheduler if options.clock is None else options.clock
        # A clock that can be subscribed to moves only when it is turned (`VirtualClock`): timers of the machine would
        # never fit it, so it calls us instead.
        self._subscribe: Callable[..., Callable[[], None]] | None = getattr(options.clock, "subscribe", None)
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._stepping = 0
        """How many environments are in a frame's step."""
        self._turning: PendingResult[None] | None = None
        """Done once the frames are run for which a virtual clock was turned."""
        self._waiters: dict[Agent, tuple[Callable[[], bool], PendingResult[None]]] = {}
        """For each agent that waits: a function that is True once it need not, and the result that ends its wait."""
        self._ordered: ResetRequest | None = None

    @property
    def _over(self) -> bool:
        """True if the clock stands: the world is closed, or the process of its environment has ended."""
        return self._closed or self.env.ended is not None

    def now(self) -> float:
        """Return the world's time, seconds."""
        return self._clock.now()

    def applied_by(self, lane: int) -> object:
        """Return who the action is of that a lane is stepped by now: `default` where it is nobody's."""
        return self.loop.lanes[lane].applied_by or "default"

    def moment(self, lane: int) -> tuple[float, int, float]:
        """Return the world's seconds, the number of the frame, and when the action came that it applies; NaN: never."""
        part = self.loop.lanes[lane]
        # A recording says when the frame began, and not when the environment had returned from it.
        now = part.applied_at if part.phase is Phase.RUNNING else self.now()
        return now, self.loop.frames, part.acted_at if part.applied_by else math.nan

    @property
    def clock_frames(self) -> int:
        """Frames of the world's clock."""
        return self.loop.frames

    # Agents

    def join(self, settings: Settings) -> Agent:
        """Join an agent; the settings are `role` (player, spectator) and `wait` (now, next_frame, new_frame)."""
        if "seat" in settings:
            return self.acting.join(settings)
        refuse_unknown(settings, self.SETTINGS, "JoinWorld")
        role, wait = read_choice(settings, "role", ROLES), read_choice(settings, "wait", WAITS)
        return self._let_in(settings, role == "player", wait)

    @abc.abstractmethod
    def _let_in(self, settings: Settings, player: bool, wait: str) -> RealtimeAgent:
        """Let an agent in, by other settings than `role` and `wait` too."""

    @property
    def agents(self) -> int:
        """How many agents are in, spectators too."""
        return len(self.loop.loop_agents)

    @property
    def has_players(self) -> bool:
        """True if somebody plays."""
        return any(loop_agent.player for loop_agent in self.loop.loop_agents)

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, by the name of the seat; a world of several agents has a seat for each."""
        names = [loop_agent.name for loop_agent in self.loop.loop_agents if loop_agent.player]
        return dict.fromkeys(self.seats, names[0]) if names else {}

    def counts(self) -> WorldCounts:
        """Return how much it has done; frames count as steps."""
        lanes = self.loop.lanes
        ended = sum(lane.begun - (lane.phase is Phase.RUNNING) for lane in lanes)
        return WorldCounts(len(lanes), sum(lane.frames for lane in lanes), ended)

    def describe(self) -> dict[str, object]:
        """Return what a page shows of it."""
        return {**super().describe(), "fps": self.options.fps}

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld; the first agent that is told carries it out."""
        # Not carried out yet: a ResetWorld of which no agent hears in time is withdrawn, and then has reset nothing
        # (D-2).
        asked = self.read_reset(settings)
        self.refuse_if_over()
        before, self._ordered = self._ordered, asked
        return lambda: setattr(self, "_ordered", before if self._ordered is asked else self._ordered)

    def read_reset(self, settings: Settings) -> ResetRequest:
        """Read the settings of a Reset or ResetWorld; raises RequestError."""
        lanes = self.env.facts.num_envs
        known = ("seed", "options", "restart", "reset_mask")
        return read_reset(settings, known if lanes else known[:3], lanes)

    @abc.abstractmethod
    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Carry out an agent's Reset: give up its episodes, and where it is a player see to new ones.

        Without `restart`, and without a seed or options, lanes that run stay as they are, and the agent enters the
        episodes that run there.
        """

    def restart(self, caller: Agent | None) -> None:
        """Begin a new episode in every lane."""
        # No other agent had to be told, or the last ones have left: then nobody has carried it out.
        self.carry_out_reset()
        if isinstance(caller, RealtimeAgent):
            caller.abandon()
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
        self.refuse_if_over()
        pending: PendingResult[None] | None = None
        try:
            while not ready():  # again: before the coroutine went on, another agent may have changed that
                if pending is not None and agent not in self._waiters:
                    # `cancel` came when the result was there already, which an error cannot replace.
                    raise _hung_up()
                pending = PendingResult()
                self._waiters[agent] = ready, pending
                # The machine's clock and not the world's: nobody may ever turn a virtual one again, and the client
                # would hang.
                timer = self.scheduler.call_later(seconds, partial(pending.set_result, None))
                try:
                    await pending
                finally:
                    # The scheduler clears the callback of a timer when it runs it.
                    expired = timer.callback is None
                    timer.cancel()
                self.refuse_if_over()
                if expired and not ready() and (text := reason()) is not None:
                    raise RequestError(Code.DEADLINE_EXCEEDED, text)
        finally:
            self._waiters.pop(agent, None)

    def cancel(self, agent: Agent) -> None:
        """End the wait of an agent whose client has gone."""
        # Taken out first, so that `wait_until` sees it even if its result is there already.
        if agent in self._waiters:
            _, pending = self._waiters.pop(agent)
            pending.set_error(_hung_up())

    def _changed(self) -> None:
        """Let agents go on for whom enough has happened, and see when the next frame is due."""
        for ready, pending in list(self._waiters.values()):
            try:
                self.refuse_if_over()
                if ready():
                    pending.set_result(None)
            except RequestError as error:
                pending.set_error(error)
        self._set_timer()

    # The clock

    def start(self) -> None:
        """Let the clock run, and with a clock that is turned by hand do at once what waits."""
        if self._over:
            return
        self.loop.start(self.now())
        if self._subscribe is None:
            self._set_timer()
            return
        if self._unsubscribe is None:
            self._unsubscribe = self._subscribe(self._turned)
        # A Reset must not wait until somebody turns the clock: its agent would wait for the answer meanwhile.
        self.scheduler.start(self._run_until(self.now()), _log_failure)

    async def settled(self) -> None:
        """Wait until what is due of a virtual clock is done."""
        # Another turn may have begun before this coroutine went on.
        while self._turning is not None:
            await self._turning

    def _set_timer(self) -> None:
        """Have the next frame, or a reset that waits, run when it is due."""
        if self._timer is not None:
            self._timer.cancel()
        # No frame begins while one is being stepped: calls of a slow environment would pile up. Resets do not count: a
        # lane that takes long to reset holds up no other one (U-6).
        if self._over or self._subscribe is not None or self._stepping:
            return
        # At a low frame rate the next frame is far away; of several agents with `autoreset=False` none is due before
        # the reset.
        due = self.now() if self.loop.reset_waits else self.loop.next_due()
        if due is not None:
            # By a delay, because a clock of the user's need not be the scheduler's.
            self._timer = self.scheduler.call_later(max(0.0, due - self.now()), self._run_frame)

    def _run_frame(self) -> None:
        jobs = [] if self._over else self.loop.poll(self.now())
        # All of them before the first is started: an environment of this thread is stepped within `start`, and its end
        # would set the timer of the next frame while other lanes wait for this one.
        self._stepping += sum(job.kind == "step" for job in jobs)
        for job in jobs:
            self.scheduler.start(self._run(job), _log_failure)
        self._set_timer()

    async def _run(self, job: Job) -> None:
        try:
            await self._do(job)
        finally:
            self._stepping -= job.kind == "step"
            self._set_timer()

    def _turned(self, when: float) -> None:
        """Run what is due, for a virtual clock that was turned: by any thread, which waits until it is done."""
        done = threading.Event()
        # An environment that turns the clock in its `step` would wait for itself.
        if self.scheduler.is_inside():
            raise RuntimeError("expected the clock to be advanced outside of the environments that it drives")
        self.scheduler.call_soon_threadsafe(
            lambda: self.scheduler.start(self._run_until(when), lambda result, error: done.set())
        )
        # Not without a limit: where the server has been stopped meanwhile, its loop never calls back.
        while not done.wait(0.2):
            if self._over:
                return

    async def _run_until(self, when: float) -> None:
        """Run every frame that is due by then, one after the other, each at its own time."""
        # Of two turns at once, or a turn and a `start`, one would begin a frame while the other waits for its own.
        await self.settled()
        turning = self._turning = PendingResult()
        try:
            at: float | None = None
            while not self._over:
                due = self.loop.next_due()
                again = at is not None  # a frame that ended an episode: the next one begins at that same time
                if at is None:
                    at = when if due is None else min(due, when)
                jobs = self.loop.poll(at)
                for job in jobs:
                    await self._do(job, at)
                if not jobs:
                    if again:
                        at = None
                    elif due is None or due > when:
                        return
        finally:
            self._turning = None
            turning.set_result(None)

    async def _do(self, job: Job, at: float | None = None) -> None:
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
        if self._over:
            # A call that was cut off by the end of the world is no failure of the environment: nothing is counted or
            # tried again.
            self.loop.lanes[job.lane].busy = False
            self._stopped(job, now)
        else:
            self._note(job, now, spent, outcome, error)
        self._changed()

    @abc.abstractmethod
    async def _call_environment(self, job: Job) -> Outcome:
        """Reset or step an environment, as a job says; return what came of it, copied.

        Raises:
            Exception: The environment raised, or what it returned cannot be read.
        """

    @abc.abstractmethod
    def _note(self, job: Job, now: float, spent: float, outcome: Outcome | None, error: str) -> None:
        """Tell the loop what came of a job that took `spent` seconds; None: the environment raised `error`."""

    def _stopped(self, job: Job, now: float) -> None:
        """Take note that the world came to its end while the job was under way."""

    # The end

    def stop(self) -> None:
        """Stop the clock; agents that wait hear that the world is gone."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._changed()

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Take note that an agent has left; the world goes on (D-16)."""
        self.loop.leave(loop_agent)

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with the clock's."""
        fps = Property("world.fps", ENCODED, "frames a second", lambda: self.options.fps)
        statistics = Property("world.realtime", ENCODED, "the clock's counts and percentiles", self.loop.statistics)
        return super().properties().merged(PropertyTree([fps, statistics]))


def _hung_up() -> RequestError:
    return RequestError(Code.CANCELLED, "the client hung up while it waited")


def _log_failure(result: None, error: BaseException | None) -> None:
    """Log what no request is answered with: none is known."""
    if error is not None:
        _log.error("a frame was not run", exc_info=error)
