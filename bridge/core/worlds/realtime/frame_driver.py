"""Runs the frames of a real-time world when they are due, by timers or whenever a virtual clock is advanced."""

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
    """Runs the jobs of a loop: the world's pacer."""

    @property
    def over(self) -> bool:
        """True once the world is over."""

    def run_job(self, job: Job, at: float | None) -> Coroutine[Any, Any, None]:
        """Run a job and report its outcome to the loop; `at` is the job's time, None: now."""

    def turned(self, when: float) -> bool:
        """Do other work that is due when a virtual clock was advanced; return True if frames may be due again."""


class FrameDriver:
    """Polls a loop when jobs are due, and runs them.

    Args:
        runner: Runs the jobs.
        loop: Decides which jobs are due.
        scheduler: Provides timers.
        clock: The world's clock; None: the scheduler's.
    """

    def __init__(self, runner: JobRunner, loop: FrameLoop, scheduler: Scheduler, clock: Clock | None) -> None:
        self._runner = runner
        self._loop = loop
        self._scheduler = scheduler
        self._clock: Clock | Scheduler = scheduler if clock is None else clock
        self.subscribe: Callable[..., Callable[[], None]] | None = getattr(clock, "subscribe", None)
        """The `subscribe` of a virtual clock, which only advances by hand (`VirtualClock`); None: a real clock."""
        self._unsubscribe: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._stepping = 0
        """How many environments are being stepped for a frame."""
        self._turning: PendingResult[None] | None = None
        """Set once the frames of the current advance of a virtual clock have run; None: no advance is running."""

    def now(self) -> float:
        """Return the clock's time, seconds."""
        return self._clock.now()

    def start(self) -> None:
        """Start the clock. With a virtual clock, run what is due now. May be called again."""
        if self._runner.over:
            return
        self._loop.start(self.now())
        if self.subscribe is None:
            self.set_timer()
            return
        if self._unsubscribe is None:
            # Timers do not follow a virtual clock, so the clock calls us.
            self._unsubscribe = self.subscribe(self._turned)
        # A Reset must not wait until the clock is advanced: the agent waits for the answer.
        self._scheduler.start(self._run_until(self.now()), _log_failure)

    def stop(self) -> None:
        """Stop the clock of a world that is over."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self.set_timer()

    # Timers

    def set_timer(self) -> None:
        """Set the timer for the next frame or for a pending reset."""
        if self._timer is not None:
            self._timer.cancel()
        # No frame begins while another one is being stepped: calls to a slow environment would pile up. Resets do not
        # count: a slow reset does not delay other lanes (U-6).
        if self._runner.over or self.subscribe is not None or self._stepping:
            return
        # Run a pending reset now: at a low frame rate the next frame is far away, and with `autoreset=False` no frame
        # is due before the reset.
        due = self.now() if self._loop.reset_waits else self._loop.next_due()
        if due is not None:
            # Use a delay, because a user's clock may differ from the scheduler's.
            self._timer = self._scheduler.call_later(max(0.0, due - self.now()), self._run_frame)

    def _run_frame(self) -> None:
        jobs = [] if self._runner.over else self._loop.poll(self.now())
        # Count all jobs before starting the first one: `start` may step an environment of this thread to its end, which
        # would set the timer of the next frame while other lanes still wait for this one.
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
        """Wait until the current advance of a virtual clock is complete."""
        # Another advance may have begun before this coroutine continued.
        while self._turning is not None:
            await self._turning

    def _turned(self, when: float) -> None:
        """Run what is due after a virtual clock was advanced. Called by any thread, which waits until it is done."""
        done = threading.Event()
        # An environment that advances the clock in its own `step` would wait for itself.
        if self._scheduler.is_inside():
            raise RuntimeError("expected the clock to be advanced outside of the environments that it drives")
        self._scheduler.call_soon_threadsafe(
            lambda: self._scheduler.start(self._run_until(when), lambda result, error: done.set())
        )
        # Check for the end: the event loop of a stopped server never calls back.
        while not done.wait(0.2):
            if self._runner.over:
                return

    async def _run_until(self, when: float) -> None:
        """Run everything that is due at `when`."""
        await self._run_frames(when)
        while self._runner.turned(when):
            await self._run_frames(when)

    async def _run_frames(self, when: float) -> None:
        """Run every frame that is due at `when`, in order, each at its own time."""
        # Two advances at once, or an advance and a `start`, would run frames at the same time.
        await self.settled()
        turning = self._turning = PendingResult()
        try:
            at: float | None = None
            while not self._runner.over:
                due = self._loop.next_due()
                again = at is not None  # the frame may have ended an episode: the next one begins at the same time
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
    """Log an error that no request is answered with. No such error is known."""
    if error is not None:
        _log.error("a frame was not run", exc_info=error)
