"""Renders a world while somebody watches: at most once per step, and within a share of the environment's time.

A `Watch` is inserted between a world and its environment while there are viewers, so that a world without viewers has
no extra cost. Viewers request a picture newer than the last one they have; all get the same newest picture.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from bridge.core.encoding.tensors import Array
from bridge.core.image_files import QUALITY
from bridge.core.logs import SafeLog
from bridge.core.worlds.environment import EnvFacts, Result
from bridge.core.worlds.observers import Background, Episode, Episodes, Listener, ObservedEnv
from bridge.core.worlds.scheduling import PendingResult, Timer
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError
from bridge.web.watching.pictures import View, encode
from bridge.web.watching.shared_steps import SharedSteps
from bridge.web.watching.takeovers import Takeover, Takeovers, mark

__all__ = ["Picture", "Watch"]

_log = SafeLog(__name__)
SHARE = 0.07
"""The largest share of the environment thread's time that pictures may take."""
REALTIME_SHARE = 0.5
"""The same if the thread would otherwise wait for the next frame, by a clock or at a person's pace."""
VIEWER_COST = 0.0005
"""Seconds that each viewer adds to the cost of a picture beside rendering: its request and its response."""
PATIENCE = 2.0
"""Seconds after which a viewer is told that there is no newer picture."""
RECENT_COSTS = 8
"""Of this many pictures, the one that took least time determines the rendering cost."""
MAX_RETURNS = 200
"""The number of returns of finished episodes that are kept."""


class Picture:
    """An encoded picture.

    Args:
        number: The number of the picture in its view, from 1.
        data: JPEG or PNG.
        changes: How often the world had been reset or stepped.
        steps: The steps of the world since watching began; in real time, the frames of its clock.
        drawn_at: When it was rendered, in seconds of the scheduler.
        cost: Seconds spent on rendering.
    """

    __slots__ = ("changes", "cost", "data", "drawn_at", "number", "steps")

    def __init__(self, number: int, data: bytes, changes: int, steps: int, drawn_at: float, cost: float) -> None:
        self.number = number
        self.data = data
        self.changes = changes
        self.steps = steps
        self.drawn_at = drawn_at
        self.cost = cost


class Returns:
    """The returns of the episodes that ended since watching began."""

    def __init__(self) -> None:
        self.episodes = 0
        """The number of those episodes."""
        self.values: deque[float] = deque(maxlen=MAX_RETURNS)
        """The latest returns, the oldest first; empty for several agents, whose sum means nothing."""
        self.of_agents: dict[str, deque[float]] = {}
        """The latest returns of each agent of a group."""

    def add(self, episode: Episode) -> None:
        """Add an episode that has ended."""
        self.episodes += 1
        if len(episode.agents) <= 1:
            self.values.append(episode.reward)
        for agent, total in episode.agents.items():
            self.of_agents.setdefault(agent, deque(maxlen=MAX_RETURNS)).append(total)


class Watch(Listener):
    """The viewers of one world.

    Args:
        world: The world.
        encoder: Encodes the pictures.
        share: The largest share of the environment thread's time for rendering.
        takeover_timeout: Seconds without input after which a person who has taken over at a limited pace loses the
            seat.
        quality: JPEG quality of pictures, 1 to 100.
    """

    def __init__(
        self,
        world: EnvWorld,
        encoder: Background,
        share: float = SHARE,
        takeover_timeout: float = 60.0,
        quality: int = QUALITY,
    ) -> None:
        self.takeover_timeout = takeover_timeout
        """Seconds after which an inactive person gives the seat back."""
        self._world = world
        self._scheduler = world.scheduler
        self._encoder = encoder
        self._quality = quality
        self._share = share
        self._viewers: dict[object, View | None] = {}
        """The viewers and their views; None: no pictures."""
        self._shared_steps: SharedSteps | None = None
        self._waiting: dict[View, list[PendingResult[Picture | None]]] = {}
        self._pending: dict[object, PendingResult[Picture | None]] = {}
        self._newest: dict[View, Picture] = {}
        self._busy = False
        self._polls = False
        """True if a call of `_poll` is scheduled."""
        self._not_before = 0.0
        self._costs: deque[float] = deque(maxlen=RECENT_COSTS)
        """Seconds spent on rendering the last pictures."""
        self._encoding = 0.0
        """Seconds spent on encoding since the last rendering began, for all views."""
        self._timer: Timer | None = None
        self._seen: dict[View, int] = {}
        """The value of `_changes` when each view was last drawn."""
        self._changes = 0
        self.steps = 0
        """Steps since watching began; a joint step of all lanes of a world counts as one."""
        self.returns = Returns()
        """The returns of the episodes since then."""
        self._episodes = Episodes(world.env.facts, self.returns.add)
        self._taken: dict[int | None, dict[Any, Takeover]] = {}
        """Who acts for agents in the current steps, by lane."""
        self._ahead: dict[Any, Takeover] = {}
        """Who acts in the next step, if the pacer chooses ahead."""
        self._paces: dict[int | None, float] = {}
        """The steps-per-second limit of the current steps, by lane, if a person is to follow."""
        self._due: dict[int | None, float] = {}
        """When a lane's next step is due, in seconds of the scheduler, if a person is to follow."""
        self.ended: RequestError | None = None
        """Why the world has ended; None: it has not."""
        self.takeovers = Takeovers()
        """The people who act for agents."""

    # Viewers

    @property
    def shared_steps(self) -> SharedSteps:
        """The environment's results for spectators; created for the first one."""
        if self._shared_steps is None:
            self._shared_steps = SharedSteps(self._world.newest, self._world.env.facts.num_envs is not None)
        return self._shared_steps

    def add(self, viewer: object, view: View | None = None) -> None:
        """Add a viewer and its view; None: no pictures."""
        if not self._viewers:
            self._world.env = ObservedEnv(self._world.env, self, self, self._world.report_failure)
            self._world.substitution = self
            self._world.redraw = self._change
            self._changes += 1
        self._viewers[viewer] = view

    def remove(self, viewer: object) -> bool:
        """Remove a viewer; return True if it was the last one. May be called twice."""
        if viewer not in self._viewers:
            return False
        del self._viewers[viewer]
        if self._viewers:
            # Otherwise viewers with ever different lanes would fill the memory with pictures.
            views = set(self._viewers.values())
            self._newest = {view: picture for view, picture in self._newest.items() if view in views}
            self._seen = {view: changes for view, changes in self._seen.items() if view in views}
            return False
        if isinstance(self._world.env, ObservedEnv):
            self._world.env = self._world.env.inner
            self._world.substitution = None
            self._world.redraw = lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._newest.clear()
        self._shared_steps = None
        return True

    @property
    def viewers(self) -> int:
        """The number of viewers, not counting takeovers: the page has a separate stream for its pictures."""
        return len(self._viewers) - len(self.takeovers)

    async def picture(self, viewer: object, view: View, after: int, *, now: bool = False) -> Picture | None:
        """Return a picture with a number above `after`; None if there was none within `PATIENCE` seconds.

        Args:
            viewer: The viewer.
            view: The viewer's view.
            after: The number of the viewer's last picture.
            now: True to draw the present state regardless of the share of time, for a viewer who steps the world and
                waits for the picture.

        Raises:
            RequestError: The environment does not render, or the world has ended.
        """
        least = 0
        if now:
            # The client that steps the world waits for this picture: limiting its share of time would only make that
            # wait longer.
            self._not_before = 0.0
            self._changes += 1
            least = self._changes
        while True:
            if self.ended is not None:
                raise self.ended
            newest = self._newest.get(view)
            if newest is not None and newest.number > after and newest.changes >= least:
                return newest
            if await self._wait(viewer, view) is None:
                return None

    def cancel(self, viewer: object) -> None:
        """Cancel the wait of a viewer whose client has disconnected."""
        if viewer in self._pending:
            self._pending[viewer].set_error(RequestError(Code.CANCELLED, "the client hung up while it waited"))

    async def _wait(self, viewer: object, view: View) -> Picture | None:
        """Return the next picture of a view; None if there was none within `PATIENCE` seconds."""
        pending: PendingResult[Picture | None] = PendingResult()
        self._pending[viewer] = pending
        self._waiting.setdefault(view, []).append(pending)
        self._poll()
        timer = self._scheduler.call_later(PATIENCE, lambda: pending.set_result(None))
        try:
            return await pending
        finally:
            timer.cancel()
            self._pending.pop(viewer, None)
            # `_answer` has removed the list. After PATIENCE or a disconnection, this viewer is still in it.
            waiting = self._waiting.get(view, [])
            if pending in waiting:
                waiting.remove(pending)
            if not waiting:
                self._waiting.pop(view, None)

    # Events of the environment

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Process the result of `reset`."""
        self._episodes.began(lane, result, mask)
        self._change()
        if self._shared_steps is not None:
            self._shared_steps.began(lane, result, mask)

    async def acting(self, lane: int | None, action: object) -> object:
        """Return the action of whoever acts: the agent, or a person instead."""
        self._taken.pop(lane, None)  # remains from a step that failed
        self._paces.pop(lane, None)
        if self._world.pacer.chooses_ahead:
            self._begin_taken(lane, self._ahead)
            self._ahead = {}
            return action
        if not self.takeovers:
            return action
        facts = self._facts(lane)
        await self._wait_for_people(lane, facts)
        # A lane of a vector environment that this step resets executes no action.
        action, taken = self.takeovers.replace(action, facts, lane or 0, self.now(), self._world.ended_lanes)
        self._begin_taken(lane, taken)
        return action

    def _begin_taken(self, lane: int | None, taken: dict[Any, Takeover]) -> None:
        self._taken[lane] = taken
        # The recorder between this object and the environment records it.
        self._world.substitutes = {key: one.who for key, one in taken.items()}

    # Calls of a pacer that chooses ahead

    def substitute(self, action: Any) -> tuple[Any, Any]:
        """Return the action after replacements, and who acts instead of agents."""
        return self.takeovers.put_in(action, self._world.env.facts, 0, self.now())

    def substituted(self, note: Any) -> None:
        """Record who acts in the next step, as returned by `substitute`; None: only agents."""
        self._ahead = note or {}
        self.takeovers.use(self._ahead)

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Process the result of `step`; report people's actions in its infos."""
        if self._taken:
            result = mark(result, self._facts(lane), self._taken.pop(lane, {}), self._paces.pop(lane, None))
        self.steps += 1
        self._episodes.stepped(lane, action, result)
        self._change()
        if self._shared_steps is not None:
            self._shared_steps.stepped(lane, action, result)
        return result

    def _facts(self, lane: int | None) -> EnvFacts:
        facts = self._world.env.facts
        return facts if lane is None else facts.of_lane

    async def _wait_for_people(self, lane: int | None, facts: EnvFacts) -> None:
        """Wait until the step is due at the pace of people in seats: they cannot follow thousands of steps per second.

        The action is chosen after the wait, so that a key acts in the next step.
        """
        now = self.now()
        pace = self.takeovers.pace(facts, lane or 0, now)
        if pace is None or self.has_clock:
            return
        # The first step at a pace does not wait, so its response tells a trainer to allow for the next ones.
        self._paces[lane] = pace
        due = self._due.get(lane, 0.0)
        if due > now:
            over: PendingResult[None] = PendingResult()
            self._scheduler.call_later(due - now, lambda: over.set_result(None))
            await over
        # Counted from when the step was due, because delays would otherwise add up; but not from the past, so that no
        # steps are made up for after a pause.
        self._due[lane] = max(due + 1 / pace, self.now())

    def now(self) -> float:
        """Return the time, in seconds of the scheduler."""
        return self._scheduler.now()

    @property
    def has_clock(self) -> bool:
        """True if the world's own clock paces its steps."""
        return self._world.clock_frames is not None

    def mark(self) -> int:
        """Return the steps of the world since watching began; in real time, the frames of its clock."""
        frames = self._world.clock_frames
        return self.steps if frames is None else frames

    def over(self, error: RequestError) -> None:
        """Tell all waiting viewers that the world has ended."""
        self.ended = error
        # Copied, because viewers that are told remove themselves at once.
        for waiting in list(self._waiting.values()):
            for pending in list(waiting):
                pending.set_error(error)
        if self._shared_steps is not None:
            self._shared_steps.over(error)

    def _change(self) -> None:
        self._changes += 1
        if self._waiting and self._timer is None and not self._busy and not self._polls:
            self._polls = True
            self._scheduler.call_soon(self._poll)  # after the response to the client that stepped

    # Rendering

    def _poll(self) -> None:
        """Render if a viewer waits, something has changed, and it is due."""
        self._polls = False
        views = [view for view, waiting in self._waiting.items() if waiting and self._seen.get(view) != self._changes]
        # Gymnasium refuses to render an environment that has not been reset.
        begun = self._world.draws_itself or self._world.env.times.reset.count > 0
        if not views or self._busy or self.ended is not None or not begun:
            return
        wait = self._not_before - self._scheduler.now()
        if wait > 0:
            if self._timer is None:
                self._timer = self._scheduler.call_later(wait, self._expired)
            return
        self._busy = True
        self._scheduler.start(self._draw(views), self._drawn)

    def _expired(self) -> None:
        self._timer = None
        self._poll()

    async def _draw(self, views: list[View]) -> None:
        """Render the lanes of some views, and start the encoding."""
        # Each lane is rendered once, whatever the number of views that show it.
        lanes = sorted({lane for view in views for lane in view.lanes})
        # Read before rendering: later changes must be drawn again.
        changes = self._changes
        steps = self.mark()
        began = time.perf_counter()
        try:
            frames = dict(zip(lanes, await self._world.env.render(lanes), strict=True))
        except RequestError as error:
            self._refuse(views, error)
            return
        finally:
            cost = time.perf_counter() - began
            drawn_at = self._scheduler.now()
            # On a busy machine, other processes run in the middle of a picture, which then seems to take several times
            # as long. The fastest of the latest pictures is the best estimate of the rendering time.
            self._costs.append(cost)
            # Encoding runs in the helper thread, but needs the interpreter's lock, or a core that the trainer may need.
            spent = min(self._costs) + self._encoding + VIEWER_COST * len(self._viewers)
            self._encoding = 0.0
            # While a person has a seat, steps wait for the person's pace, so drawing delays nobody.
            paced = self.takeovers.pace(self._world.env.facts, 0, drawn_at) is not None
            share = max(self._share, REALTIME_SHARE) if paced else self._share
            # Counted from the beginning of rendering. Set even if it raised: an environment that fails to draw takes
            # time, too.
            self._not_before = drawn_at + spent / share - cost
        for view in views:
            self._seen[view] = changes
            drawn = (changes, steps, drawn_at, cost)
            self._encode(view, [frames[lane] for lane in view.lanes], drawn)

    def _drawn(self, result: None, error: BaseException | None) -> None:
        self._busy = False
        if error is not None:
            _log.error("the world %r was not drawn", self._world.name, exc_info=error)
            self._refuse(list(self._waiting), RequestError(Code.INTERNAL, f"it was not drawn: {error!r}"))
        self._poll()

    def _encode(self, view: View, frames: list[Any], drawn: tuple[int, int, float, float]) -> None:
        def job() -> tuple[bytes, float]:
            began = time.perf_counter()
            data = encode(frames, view, self._quality)
            return data, time.perf_counter() - began

        def done(result: Any) -> None:
            if isinstance(result, RequestError):
                self._refuse([view], result)
            elif isinstance(result, Exception):
                self._refuse([view], RequestError(Code.INTERNAL, f"the picture was not encoded: {result!r}"))
            else:
                newest = self._newest.get(view)
                number = 1 if newest is None else newest.number + 1
                picture = self._newest[view] = Picture(number, result[0], *drawn)
                self._encoding += result[1]
                self._answer(view, picture)

        # Not in this thread, which steps and serves the worlds in the meantime.
        self._encoder.submit(job, done)

    def _answer(self, view: View, picture: Picture) -> None:
        for pending in self._waiting.pop(view, []):
            pending.set_result(picture)

    def _refuse(self, views: list[View], error: RequestError) -> None:
        for view in views:
            for pending in self._waiting.pop(view, []):
                pending.set_error(error)
