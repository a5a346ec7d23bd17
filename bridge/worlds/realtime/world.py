"""The real-time world: a clock of the server steps the environments, whether agents call Step or not (U-1).

`RealtimeLoop` decides what happens when; this file gives it the environments, timers, and agents that wait.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.clock import Clock, MonotonicClock
from bridge.encoding.properties import ENCODED, Property, PropertyTree
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array, unpack_tensor
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.logs import SafeLog
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.base import Agent, failures_in, refuse_unknown
from bridge.worlds.default_actions import neutral_action
from bridge.worlds.realtime.agent import RealtimeAgent
from bridge.worlds.realtime.loop import Job, Observer, Phase, RealtimeLoop
from bridge.worlds.resets import ResetOrder
from bridge.worlds.scheduling import Pending, Scheduler, Timer
from bridge.worlds.single import EnvWorld

__all__ = ["Realtime", "RealtimeWorld"]

_log = SafeLog(__name__)
ROLES = ("player", "spectator")
WAITS = ("now", "next_frame")


@dataclasses.dataclass(frozen=True)
class Realtime:
    """How a real-time world runs."""

    fps: float
    """Frames a second."""
    default_action: Any = None
    """Applied where there is no action of the player; None: the neutral one, zeros where the space has them."""
    max_action_age: float | None = None
    """Seconds that an action goes on at most before the default one takes its place; None: until the next one."""
    catch_up: float = 0.25
    """Seconds of frames that are made up for when the server is late; later ones are dropped."""
    reset_timeout: float = 60.0
    """Seconds that a first Step waits for an episode to begin."""
    clock: Clock | None = None
    """None: the machine's monotonic clock. One that has `subscribe` drives the world itself."""

    def check(self) -> None:
        """Raise SettingError where a number is out of its range."""
        RealtimeLoop(1, self.fps, None, max_action_age=self.max_action_age, catch_up=self.catch_up)


class RealtimeWorld(EnvWorld):
    """The world of one environment, or of lanes that are stepped one by one, that a clock drives.

    One agent plays, any number of others look on. The world goes on as long as it exists, also without agents; its
    clock starts with the first Step of the first of them.

    Args:
        name: The world's name.
        env: What is stepped; owned by the world from here on.
        scheduler: Runs the frames.
        options: How it runs.

    Raises:
        SettingError: The lanes cannot be stepped one by one, or options do not fit.
    """

    def __init__(self, name: str, env: Any, scheduler: Scheduler, options: Realtime) -> None:
        super().__init__(name, env, scheduler)
        if not env.lanes:
            raise SettingError(
                "a real-time world of lanes steps each environment by itself: expected vectorization_mode='sync', "
                f"got {env.kind}"
            )
        if env.reward_space is not None:
            raise SettingError(
                f"a real-time world adds rewards up, which are numbers then: expected none of {env.reward_space}; make "
                "them numbers by a wrapper such as mo_gymnasium.wrappers.LinearReward"
            )
        space = env.action_space
        default = neutral_action(space) if options.default_action is None else options.default_action
        if not space.contains(default):
            raise SettingError(f"expected default_action to be an element of {space}, got {default!r:.80}")
        self.options = options
        self.single = getattr(env, "num_envs", None) is None
        """Whether it is of one environment, without lanes."""
        self.loop = RealtimeLoop(
            len(env.lanes),
            options.fps,
            default,
            max_action_age=options.max_action_age,
            catch_up=options.catch_up,
        )
        self._clock: Clock = MonotonicClock() if options.clock is None else options.clock
        self._subscribe: Callable[[Callable[[float], None]], Callable[[], None]] | None = getattr(
            options.clock, "subscribe", None
        )
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._stepping = 0
        """The environments that are in a frame's step."""
        self._turning: Pending[None] | None = None
        """Done once the frames are run for which a virtual clock was turned."""
        self._waiters: dict[Agent, tuple[Callable[[], bool], Pending[None]]] = {}
        self._ordered: tuple[Array, list[int | None], Any] | None = None
        self.single_layout = Layout(env.observation_space, "observation")

    @property
    def _over(self) -> bool:
        """Whether the clock stands: the world is closed, or the process of its environment has ended."""
        return self._closed or self.env.ended is not None

    def now(self) -> float:
        """Return the world's time, seconds."""
        return self._clock.now()

    # Agents

    @property
    def agents(self) -> int:
        """How many agents are in, spectators too."""
        return len(self.loop.observers)

    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Let an agent in: settings `role` (player, spectator) and `wait` (now, next_frame)."""
        refuse_unknown(settings, ("role", "wait"), "JoinWorld")
        role = _one_of(settings, "role", ROLES)
        wait = _one_of(settings, "wait", WAITS)
        self.refuse_if_over()
        if role == "player" and any(observer.player for observer in self.loop.observers):
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"the world {self.name!r} has its one player already; join it with the setting role=spectator, "
                "or create a world of your own",
            )
        return RealtimeAgent(self, self.loop.join(role == "player"), wait)

    def prepare_reset(self, settings: Mapping[str, pb.Tensor], caller: Agent | None) -> Callable[[], None]:
        """Take the settings of a ResetWorld; the first agent that is told carries it out."""
        reader = RealtimeAgent(self, Observer(len(self.loop.lanes), False), WAITS[0])
        mask, seeds, options, _ = reader.read_reset(settings)
        self.refuse_if_over()
        self._ordered = mask, seeds, options
        return self._withdraw

    def _withdraw(self) -> None:
        self._ordered = None

    async def reset(
        self,
        settings: Mapping[str, pb.Tensor],
        caller: Agent | None,
        timeout: float,
        waiting: Callable[[ResetOrder], None] = lambda order: None,
    ) -> None:
        """Begin a new episode in every lane, once every other agent was told that its own is over (D-15)."""
        await super().reset(settings, caller, timeout, waiting)
        self.carry_out_reset()
        if isinstance(caller, RealtimeAgent):
            caller.abandon()
        self.start()

    def carry_out_reset(self) -> None:
        """Cut off what runs, as a ResetWorld ordered; again: nothing."""
        if self._ordered is None:
            return
        (mask, seeds, options), self._ordered = self._ordered, None
        for index in np.flatnonzero(mask).tolist():
            self.loop.ask_reset(index, seeds[index], options, self.now())
        self._changed()

    def ask_reset(
        self, observer: Observer, mask: Array, seeds: Sequence[int | None], options: Any, restart: bool = True
    ) -> None:
        """Give up an agent's episodes, and where it is the player have the lanes begin new ones.

        Without `restart`, lanes that run stay as they are, and the agent enters the episodes that run there.
        """
        self.refuse_if_over()
        for index, chosen in enumerate(mask.tolist()):
            if not chosen:
                continue
            observer.buffers[index].abandon()
            lane = self.loop.lanes[index]
            plain = seeds[index] is None and not options
            under_way = lane.phase in (Phase.RESETTING, Phase.IDLE) or not restart
            if not observer.player or (plain and under_way):
                continue
            self.loop.ask_reset(index, seeds[index], options, self.now())
        if observer.player:
            self.loop.start(self.now())
        self._changed()
        self.start()

    # Waiting

    async def wait_until(
        self, agent: Agent, ready: Callable[[], bool], seconds: float, reason: Callable[[], str]
    ) -> None:
        """Wait until `ready()`; raise DEADLINE_EXCEEDED after so many seconds of the machine's clock.

        Raises:
            RequestError: As `ready` does, or the world is over, or the agent's client has gone.
        """
        self.refuse_if_over()
        if ready():
            return
        pending: Pending[None] = Pending()
        self._waiters[agent] = ready, pending
        late = self.scheduler.call_later(
            seconds, lambda: pending.set_error(RequestError(Code.DEADLINE_EXCEEDED, reason()))
        )
        try:
            await pending
        finally:
            late.cancel()
            self._waiters.pop(agent, None)

    def cancel(self, agent: Agent) -> None:
        """End the wait of an agent whose client has gone."""
        if agent in self._waiters:
            self._waiters[agent][1].set_error(RequestError(Code.CANCELLED, "the client hung up while it waited"))

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
        self.scheduler.start(self._run_until(self.now()), _log_failure)

    async def settled(self) -> None:
        """Wait until what is due of a virtual clock is done."""
        while self._turning is not None:
            await self._turning

    def _set_timer(self) -> None:
        """Have the next frame, or a reset that waits, run when it is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.loop.next_due()
        if self._over or self._subscribe is not None or due is None or self._stepping:
            return
        wait = 0.0 if self.loop.reset_waits else due - self.now()
        self._timer = self.scheduler.call_later(max(0.0, wait), self._run_frame)

    def _run_frame(self) -> None:
        self._timer = None
        jobs = [] if self._over else self.loop.poll(self.now())
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
        if self.scheduler.is_inside():
            raise RuntimeError("expected the clock to be advanced outside of the environments that it drives")
        self.scheduler.call_soon_threadsafe(
            lambda: self.scheduler.start(self._run_until(when), lambda result, error: done.set())
        )
        while not done.wait(0.2):
            if self._over:
                return

    async def _run_until(self, when: float) -> None:
        """Run every frame that is due by then, one after the other, each at its own time."""
        await self.settled()
        turning = self._turning = Pending()
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
        env, error = self.env.lanes[job.lane], None
        outcome: tuple[Any, ...] | None = None
        began = time.perf_counter()
        try:
            if job.kind == "reset":
                observation, info = await env.reset(seed=job.seed, options=job.options)
                outcome = _kept(observation), _kept(info)
            else:
                result = await env.step(job.action)
                with failures_in("step"):
                    observation, reward, terminated, truncated, info = result
                    outcome = _kept(observation), float(reward), bool(terminated), bool(truncated), _kept(info)
        except RequestError as problem:
            error = problem.message
        spent = time.perf_counter() - began
        now = self.now() if at is None else at
        if self._over:
            self.loop.lanes[job.lane].busy = False
        elif error is not None:
            self.loop.failed(job, now, error)
        elif outcome is not None and job.kind == "reset":
            self.loop.began(job, now, *outcome)
        elif outcome is not None:
            self.loop.stepped(job, now, spent, *outcome)
        self._changed()

    # The end

    async def close(self) -> None:
        """Stop the clock and close the environments; one that is in a call is closed when the call returns."""
        if self._closed:
            return
        self._closed = True
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._changed()
        await self.env.close(self._destroyed())

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with the clock's."""
        fps = Property("world.fps", ENCODED, "frames a second", lambda: self.options.fps)
        statistics = Property("world.realtime", ENCODED, "the clock's counts and percentiles", self.loop.statistics)
        return super().properties().merged(PropertyTree([fps, statistics]))


def _log_failure(result: None, error: BaseException | None) -> None:
    """Log what no request is answered with: none is known."""
    if error is not None:
        _log.error("a frame was not run", exc_info=error)


def _kept(value: Any) -> Any:
    """A copy that the environment cannot change when it steps on."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_kept(item) for item in value)
    return value


def _one_of(settings: Mapping[str, pb.Tensor], name: str, choices: Sequence[str]) -> str:
    """A setting that is one of a few words; the first is the default."""
    if name not in settings:
        return choices[0]
    try:
        value = unpack_tensor(settings[name], name)[()]
    except TensorError as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"bad JoinWorld settings: {error}") from error
    if value not in choices:
        raise RequestError(
            Code.INVALID_ARGUMENT, f"expected the setting {name} to be one of {', '.join(choices)}, got {value!r:.80}"
        )
    return str(value)
