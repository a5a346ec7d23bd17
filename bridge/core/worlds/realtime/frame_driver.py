"""Runs the frames of a real-time world when they are due: by the machine's timers, or as a virtual clock is turned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from bridge.core.clock import Clock
from bridge.core.logs import SafeLog
from bridge.core.worlds.environment import Job
from bridge.core.worlds.realtime.frame_loop import FrameLoop
from bridge.core.worlds.scheduling import PendingResult, Scheduler, Timer

__all__ = ["FrameDriver", "JobRunner"]

_log = SafeLog(__name__)


class JobRunner(Protocol):
    """What runs the jobs of a loop: the world's pacer."""

    @property
    def over(self) -> bool:
        """True once the world is over."""

    def run_job(self, job: Job, at: float | None) -> Coroutine[Any, Any, None]:
        """Run a job and tell the loop; `at` is the time that it takes place, None: now."""

    def turned(self, when: float) -> bool:
        """Do what else is due by then, when a virtual clock was turned; return whether frames may be due again."""


class FrameDriver:
    """Asks a loop what is due, when it is due.

    Args:
        runner: Runs what is due.
        loop: Says what is due.
        scheduler: Has the machine's timers.
        clock: The world's; None: the scheduler's.
    """

    def __init__(self, runner: JobRunner, loop: FrameLoop, scheduler: Scheduler, clock: Clock | None) -> None:
        self._runner = runner
        self._loop = loop
        self._scheduler = scheduler
        self._clock: Clock | Scheduler = scheduler if clock is None else clock
        self.subscribe: Callable[..., Callable[[], None]] | None = getattr(clock, "subscribe", None)
        """That of a virtual clock, which moves only when it is turned (`VirtualClock`); None: it goes by itself."""
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._stepping = 0
        """How many environments are in a frame's step."""
        self._turning: PendingResult[None] | None = None
        """Done once the frames are run for which a virtual clock was turned."""

    def now(self) -> float:
        """Return the clock's time, seconds."""
        return self._clock.now()

    def start(self) -> None:
        """Start the clock, and with a clock that is turned by hand do at once what waits. Again: nothing."""
        if self._runner.over:
            return
        self._loop.start(self.now())
        if self.subscribe is None:
            self.set_timer()
            return
        if self._unsubscribe is None:
            # Timers of the machine would never fit it, so it calls us instead.
            self._unsubscribe = self.subscribe(self._turned)
        # A Reset must not wait until somebody turns the clock: its agent would wait for the answer meanwhile.
        self._scheduler.start(self._run_until(self.now()), _log_failure)

    def stop(self) -> None:
        """Stop the clock of a world that is over."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self.set_timer()

    # The machine's timers

    def set_timer(self) -> None:
        """Set the timer of the next frame, or of a reset that waits."""
        if self._timer is not None:
            self._timer.cancel()
        # No frame begins while one is being stepped: calls of a slow environment would pile up. Resets do not count: a
        # lane that takes long to reset holds up no other one (U-6).
        if self._runner.over or self.subscribe is not None or self._stepping:
            return
        # At a low frame rate the next frame is far away; of several agents with `autoreset=False` none is due before
        # the reset.
        due = self.now() if self._loop.reset_waits else self._loop.next_due()
        if due is not None:
            # By a delay, because a clock of the user's need not be the scheduler's.
            self._timer = self._scheduler.call_later(max(0.0, due - self.now()), self._run_frame)

    def _run_frame(self) -> None:
        jobs = [] if self._runner.over else self._loop.poll(self.now())
        # All of them before the first is started: an environment of this thread is stepped within `start`, and its end
        # would set the timer of the next frame while other lanes wait for this one.
        self._stepping += sum(job.kind == "step" for job in jobs)
        for job in jobs:
            self._scheduler.start(self._run(job), _log_failure)
        self.set_timer()

    async def _run(self, job: Job) -> None:
        try:
            await self._runner.run_job(job, None)
        finally:
            self._stepping -= job.kind == "step"
            self.set_timer()

    # A virtual clock

    async def settled(self) -> None:
        """Wait until what is due of a virtual clock is done."""
        # Another turn may have begun before this coroutine went on.
        while self._turning is not None:
            await self._turning

    def _turned(self, when: float) -> None:
        """Run what is due, for a virtual clock that was turned: by any thread, which waits until it is done."""
        done = threading.Event()
        # An environment that turns the clock in its `step` would wait for itself.
        if self._scheduler.is_inside():
            raise RuntimeError("expected the clock to be advanced outside of the environments that it drives")
        self._scheduler.call_soon_threadsafe(
            lambda: self._scheduler.start(self._run_until(when), lambda result, error: done.set())
        )
        # Not without a limit: where the server has been stopped meanwhile, its loop never calls back.
        while not done.wait(0.2):
            if self._runner.over:
                return

    async def _run_until(self, when: float) -> None:
        """Run what is due by then."""
        await self._run_frames(when)
        while self._runner.turned(when):
            await self._run_frames(when)

    async def _run_frames(self, when: float) -> None:
        """Run every frame that is due by then, one after the other, each at its own time."""
        # Of two turns at once, or a turn and a `start`, one would begin a frame while the other waits for its own.
        await self.settled()
        turning = self._turning = PendingResult()
        try:
            at: float | None = None
            while not self._runner.over:
                due = self._loop.next_due()
                again = at is not None  # a frame that ended an episode: the next one begins at that same time
                if at is None:
                    at = when if due is None else min(due, when)
                jobs = self._loop.poll(at)
                for job in jobs:
                    await self._runner.run_job(job, at)
                if not jobs:
                    if again:
                        at = None
                    elif due is None or due > when:
                        return
        finally:
            self._turning = None
            turning.set_result(None)


def _log_failure(result: None, error: BaseException | None) -> None:
    """Log what no request is answered with: none is known."""
    if error is not None:
        _log.error("a frame was not run", exc_info=error)
