"""Renders a world while somebody watches: at most once a step, and for a share of the environment's time.

A `Watch` puts itself between a world and its environment while there are viewers, so that a world without any costs
nothing. Viewers ask for a picture that is newer than the one they have; the newest one is for all of them.
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
"""The share of the time of an environment's thread that pictures may take."""
REALTIME_SHARE = 0.5
"""The same where the thread waits for the next frame otherwise: by a clock, or at the pace of a person."""
VIEWER_COST = 0.0005
"""Seconds of that time that a picture takes for each viewer beside rendering: its request, and its answer."""
PATIENCE = 2.0
"""Seconds after which a viewer is told that there is no newer picture."""
RECENT_COSTS = 8
"""Pictures of which the one that took least says what rendering takes."""
MAX_RETURNS = 200
"""Returns of finished episodes that are remembered."""


class Picture:
    """An encoded picture.

    Args:
        number: Counts the pictures of a view, from 1.
        data: JPEG or PNG.
        changes: What the world was like: how often it had been reset or stepped.
        steps: How many steps the world had made since it is watched; in real time, the frames of its clock.
        drawn_at: When it was rendered, in seconds of the scheduler.
        cost: Seconds that rendering took.
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
    """The returns of the episodes that ended since a world is watched."""

    def __init__(self) -> None:
        self.episodes = 0
        """The number of those episodes."""
        self.values: deque[float] = deque(maxlen=MAX_RETURNS)
        """Those of the last ones, the oldest first; none where several agents act, whose sum says nothing."""
        self.of_agents: dict[str, deque[float]] = {}
        """The same for each agent of a group."""

    def add(self, episode: Episode) -> None:
        """Take an episode that ended."""
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
        share: Of the time of the environment's thread that rendering may take.
        takeover_timeout: Seconds that a person who has taken over at a pace may do nothing.
        quality: Of pictures as JPEG, 1 to 100.
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
        """Seconds after which a person who does nothing gives the seat back."""
        self._world = world
        self._scheduler = world.scheduler
        self._encoder = encoder
        self._quality = quality
        self._share = share
        self._viewers: dict[object, View | None] = {}
        """Who looks, and what each sees; None: no pictures."""
        self._shared_steps: SharedSteps | None = None
        self._waiting: dict[View, list[PendingResult[Picture | None]]] = {}
        self._pending: dict[object, PendingResult[Picture | None]] = {}
        self._newest: dict[View, Picture] = {}
        self._busy = False
        self._polls = False
        """True if `_poll` is about to be called."""
        self._not_before = 0.0
        self._costs: deque[float] = deque(maxlen=RECENT_COSTS)
        """Seconds that rendering the last pictures took."""
        self._encoding = 0.0
        """Seconds that encoding has taken since rendering began last, for all views."""
        self._timer: Timer | None = None
        self._seen: dict[View, int] = {}
        """The value of `_changes` when each view was drawn last."""
        self._changes = 0
        self.steps = 0
        """Steps since it is watched; those of all lanes of a world that steps them together count as one."""
        self.returns = Returns()
        """Of the episodes since then."""
        self._episodes = Episodes(world.env.facts, self.returns.add)
        self._taken: dict[int | None, dict[Any, Takeover]] = {}
        """Who acts in an agent's place in the steps that are under way, by lane."""
        self._ahead: dict[Any, Takeover] = {}
        """Who acts in the step that is under way next, where the pacer chooses ahead."""
        self._paces: dict[int | None, float] = {}
        """The most steps a second of the steps that are under way, by lane, where a person is to follow."""
        self._due: dict[int | None, float] = {}
        """When a lane's next step is due, in seconds of the scheduler, while a person is to follow."""
        self.ended: RequestError | None = None
        """Why the world is over; None: it is not."""
        self.takeovers = Takeovers()
        """Who acts in an agent's place."""

    # Viewers

    @property
    def shared_steps(self) -> SharedSteps:
        """The results of the environment for spectators; made for the first one."""
        if self._shared_steps is None:
            self._shared_steps = SharedSteps(self._world.newest, self._world.env.facts.num_envs is not None)
        return self._shared_steps

    def add(self, viewer: object, view: View | None = None) -> None:
        """Note a viewer, and what it sees; None: no pictures."""
        if not self._viewers:
            self._world.env = ObservedEnv(self._world.env, self, self, self._world.report_failure)
            self._world.substitution = self
            self._world.redraw = self._change
            self._changes += 1
        self._viewers[viewer] = view

    def remove(self, viewer: object) -> bool:
        """Forget a viewer; return whether it was the last one. Again: nothing."""
        if viewer not in self._viewers:
            return False
        del self._viewers[viewer]
        if self._viewers:
            # Else those who come and go, each with other lanes, would fill the memory with pictures.
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
        """The number of viewers, without those who take over: the page has a stream of its own for pictures."""
        return len(self._viewers) - len(self.takeovers)

    async def picture(self, viewer: object, view: View, after: int, *, now: bool = False) -> Picture | None:
        """Return a picture with a number above `after`; None: there was none within `PATIENCE` seconds.

        Args:
            viewer: Who asks.
            view: Which.
            after: The number of the viewer's last one.
            now: Whether one is drawn of what there is now, whatever share of the time that takes: the viewer is who
                steps the world, and waits.

        Raises:
            RequestError: The environment does not render, or the world is over.
        """
        least = 0
        if now:
            # Whoever steps the world waits for this picture: to limit its share of the time would only make the wait
            # longer.
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
        """End the wait of a viewer whose client has gone."""
        if viewer in self._pending:
            self._pending[viewer].set_error(RequestError(Code.CANCELLED, "the client hung up while it waited"))

    async def _wait(self, viewer: object, view: View) -> Picture | None:
        """Return the next picture of a view; None: there was none within `PATIENCE` seconds."""
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
            # `_answer` has taken the list out. After PATIENCE, or a hang-up, this one is still in it.
            waiting = self._waiting.get(view, [])
            if pending in waiting:
                waiting.remove(pending)
            if not waiting:
                self._waiting.pop(view, None)

    # What the environment does

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Take what `reset` returned."""
        self._episodes.began(lane, result, mask)
        self._change()
        if self._shared_steps is not None:
            self._shared_steps.began(lane, result, mask)

    async def acting(self, lane: int | None, action: object) -> object:
        """Return the action of whoever acts: the agent's, or a person's in its place."""
        self._taken.pop(lane, None)  # of a step that failed
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
        # A recording takes it, which stands between this and the environment.
        self._world.substitutes = {key: one.who for key, one in taken.items()}

    # For a pacer that chooses ahead

    def substitute(self, action: Any) -> tuple[Any, Any]:
        """Return the action of whoever acts now, and who does."""
        return self.takeovers.put_in(action, self._world.env.facts, 0, self.now())

    def substituted(self, note: Any) -> None:
        """Note who acts in the step that is under way next, as `substitute` said; None: nobody else than agents."""
        self._ahead = note or {}
        self.takeovers.use(self._ahead)

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Take what `step` returned; mark in its infos what people did."""
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
        """Wait until the step is due at the pace of those who have a seat: nobody can follow thousands a second.

        The action is chosen after the wait, so that a key acts in the very next step.
        """
        now = self.now()
        pace = self.takeovers.pace(facts, lane or 0, now)
        if pace is None or self.has_clock:
            return
        # The first step at a pace does not wait, so its answer tells a trainer to wait for the next in time.
        self._paces[lane] = pace
        due = self._due.get(lane, 0.0)
        if due > now:
            over: PendingResult[None] = PendingResult()
            self._scheduler.call_later(due - now, lambda: over.set_result(None))
            await over
        # From when the step was due and not from now, or the delay of each step would slow the pace down. Not before
        # now: after a pause no steps are made up for.
        self._due[lane] = max(due + 1 / pace, self.now())

    def now(self) -> float:
        """Return the time, in seconds of the scheduler."""
        return self._scheduler.now()

    @property
    def has_clock(self) -> bool:
        """True if the world's own clock paces its steps."""
        return self._world.clock_frames is not None

    def mark(self) -> int:
        """Return how many steps the world has made since it is watched; in real time, the frames of its clock."""
        frames = self._world.clock_frames
        return self.steps if frames is None else frames

    def over(self, error: RequestError) -> None:
        """Let all who wait hear that the world is over."""
        self.ended = error
        # Copies: whoever hears of it takes itself out at once.
        for waiting in list(self._waiting.values()):
            for pending in list(waiting):
                pending.set_error(error)
        if self._shared_steps is not None:
            self._shared_steps.over(error)

    def _change(self) -> None:
        self._changes += 1
        if self._waiting and self._timer is None and not self._busy and not self._polls:
            self._polls = True
            self._scheduler.call_soon(self._poll)  # after the answer to whoever stepped

    # Rendering

    def _poll(self) -> None:
        """Render if somebody waits, something has changed, and it is time."""
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
        """Render the lanes of some views, and have them encoded."""
        # Each lane is rendered once, however many views show it.
        lanes = sorted({lane for view in views for lane in view.lanes})
        # Before rendering: what changes meanwhile is to be drawn again.
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
            # Where a machine has more to do than processors, others run in the middle of a picture, which then seems to
            # take several times as long. What rendering takes says the one that was disturbed least.
            self._costs.append(cost)
            # Encoding is the helper thread's, but takes the interpreter's lock, or a core that the trainer may need.
            spent = min(self._costs) + self._encoding + VIEWER_COST * len(self._viewers)
            self._encoding = 0.0
            # While a person has a seat, steps wait for their pace, and drawing holds up nobody.
            paced = self.takeovers.pace(self._world.env.facts, 0, drawn_at) is not None
            share = max(self._share, REALTIME_SHARE) if paced else self._share
            # From when rendering began. Set also where it raised: an environment that cannot draw takes time for it,
            # too.
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

        # Not in this thread, which steps and serves the worlds meanwhile.
        self._encoder.submit(job, done)

    def _answer(self, view: View, picture: Picture) -> None:
        for pending in self._waiting.pop(view, []):
            pending.set_result(picture)

    def _refuse(self, views: list[View], error: RequestError) -> None:
        for view in views:
            for pending in self._waiting.pop(view, []):
                pending.set_error(error)
