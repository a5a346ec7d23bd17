"""A program with a loop of its own as an environment: a step is over when the program calls again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bridge.core.worlds.environment import Environment, EnvironmentProxy, Result, Spaces
from bridge.core.worlds.group import ONE
from bridge.core.worlds.scheduling import PendingResult, Scheduler, Timer
from bridge.errors import Code, RequestError
from bridge.game.handover import Choice, Handover, News

__all__ = ["GameEnvironment", "GameScreen"]

_LOOKS = 4
"""How often its calls are looked for in the time after which a program stands still."""
_TURNS = 20
"""Turns of the event loop between the end of a program and that of its server."""


class GameScreen:
    """What is known of a program without a call: its spaces, as an environment has them, and what it shows.

    Args:
        spaces: Of observations and actions, by agent.
        several: Whether it has several agents, as an environment of PettingZoo.
        default_actions: What is done where nobody acts, by agent.
    """

    metadata: Mapping[str, Any] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, spaces: Mapping[str, Spaces], several: bool, default_actions: Mapping[str, Any]) -> None:
        self.frame: Any = None
        """The picture; None: the program passed none."""
        self.observation_space: Any = lambda agent: spaces[agent][0]
        self.action_space: Any = lambda agent: spaces[agent][1]
        if several:
            self.possible_agents, self.agents = [*spaces], list[str]()
        else:
            self.observation_space, self.action_space = spaces[ONE]
            self.default_action = default_actions[ONE]

    def reset(self, seed: object = None, options: object = None) -> Any:
        """Stand for the program's rounds."""

    def step(self, action: object) -> Any:
        """Stand for its frames; `GameEnvironment` has both."""

    def render(self) -> Any:
        """Return the picture."""
        if self.frame is None:
            raise NotImplementedError
        return self.frame

    def close(self) -> None:
        """Close nothing: the program goes on."""


# A program that waits is answered here, once for each wait, and does nothing else: `_waiting` has its news until then.
# One that does not wait takes what it has been offered by the time of its next call. Its news say what that was, which
# is in `chosen` from then on: the next news tell what came of it.
class GameEnvironment(EnvironmentProxy):
    """Stands for a program: `reset` asks for a round, and a call is over when the program has called again.

    Args:
        env: Has the description of the program.
        screen: What it shows.
        handover: Where the program leaves its news, the first one by now.
        scheduler: Runs what waits for them.
        patience: Seconds without a call after which the program stands still.
        timeout: Seconds that a program that waits does so; None: any.
    """

    def __init__(
        self,
        env: Environment,
        screen: GameScreen,
        handover: Handover,
        scheduler: Scheduler,
        patience: float,
        timeout: float | None,
    ) -> None:
        super().__init__(env)
        self.handover = handover
        self._screen = screen
        self._scheduler = scheduler
        self._patience, self._timeout = patience, timeout
        self._several = bool(env.facts.agents)
        self._pending: PendingResult[None] | None = None
        self._look_timer: Timer | None = None
        self._wait_timer: Timer | None = None
        self._last_call = 0.0
        """When the program had called last at the last look."""
        self._idle_looks = 0
        """Looks in a row that found no call since the one before."""
        self._closing = False
        """True if it was seen that the program is closed."""
        self._gone: RequestError | None = None
        self._observations: dict[str, Any] = {}
        """What each agent of the round was told last."""
        self._rewards: dict[str, float] = {}
        """Those that no step has told yet, by agent."""
        self._waiting: News | None = None
        """The news with which the program waits; None: it does not."""
        self._offers: dict[int, Choice] = {}
        """The choices that the program may take, or has taken, by number."""
        self._offered = 0
        self.stamp = 0
        """That of the news that were read last."""
        self.chosen = Choice(handover.defaults)
        """What the program took with the news that were read last."""
        self.frames = 0
        """The exchanges of the program that came of actions, from when this is there to what was read last."""
        self.step_frames = 0
        """How many of them the last step is of."""
        self.read_at = 0.0
        """When the program called with what was read last, in seconds of the scheduler."""
        self.asked = False
        """True if somebody who plays asked for the round that begins next; False: one that runs is as good."""
        self.late: Callable[[], bool] = lambda: False
        """Called when a program has waited for too long; returns whether it is stepped now, by default actions."""
        self.all_ended: Callable[[], PendingResult[None]] = PendingResult
        """Returns what is done once all agents were told of the end of the episode that they are in."""
        self.drawn: Callable[[], None] = lambda: None
        """Called when the program has shown a picture."""
        self.noticed: Callable[[], None] = lambda: None
        """Called when the program begins to stand still, and when it is gone."""
        handover.notify = lambda: scheduler.call_soon_threadsafe(self._wake)
        self._read_all()
        self.frames = 0
        self._look()

    # The program's state

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with once the program is gone; None: it is not."""
        return self._gone

    def standstill(self) -> RequestError | None:
        """Return the error of requests while the program stands still; None: it does not."""
        since = self._scheduler.now() - self.handover.last
        # A server that got no processor time itself has not read the calls of that time yet: then it has not looked,
        # either.
        if (
            self.handover.closed is not None
            or self.handover.waiting
            or since < self._patience
            or self._idle_looks < _LOOKS
        ):
            return None
        text = f"the game stands still: the last call of exchange() was {since:.1f} s ago; reset again once it goes on"
        if self.chosen.actions is None:
            text = (
                f"the game has not begun its round for {since:.1f} s: its program has not called exchange(), or goes "
                "on with its old round, as it has not read game.begins"
            )
        return RequestError(Code.DEADLINE_EXCEEDED, text)

    def _look(self) -> None:
        """Look again and again whether the program goes on."""
        self._look_timer = self._scheduler.call_later(self._patience / _LOOKS, self._look)
        self._idle_looks = self._idle_looks + 1 if self.handover.last == self._last_call else 0
        self._last_call = self.handover.last
        self._wake()
        if self.standstill() is not None:
            self.noticed()

    def _wake(self) -> None:
        """Have a call look for news; those of a program that waits are read also without one."""
        # What the program has shown before it was closed is told first.
        reads = self._pending is not None and self.handover.unread
        if self._pending is not None:
            self._pending.set_result(None)
        elif self.handover.waits:
            self._read_all()
        if self.handover.closed is not None and not self._closing and not reads:
            self._closing = True
            if self.handover.in_order:
                # The step that is under way goes on first, and returns the end of the episode.
                self.all_ended().add_done_callback(partial(self._scheduler.call_soon, self._give_up))
            else:  # the answer to all is the error
                self._give_up()

    def _give_up(self) -> None:
        """Refuse all requests from now on: the program is gone."""
        self._gone = self._gone or self.handover.closed
        self.noticed()
        self._settle(_TURNS)

    def _settle(self, turns: int) -> None:
        """Let the server stop once a step that begins now has failed, and the answers that this leads to are written.

        Args:
            turns: Those of the event loop that are left for it.
        """
        if turns:
            self._scheduler.call_soon(partial(self._settle, turns - 1))
        else:
            self.handover.settled.set()

    def _read_all(self) -> None:
        while (news := self.handover.read()) is not None:
            self._take(news)

    def _take(self, news: News) -> None:
        """Take what the program has shown, and note what it does."""
        self.read_at, self.stamp = news.at, news.stamp
        self.frames += news.skipped + news.frames
        self.notes.extend(note for note in news.notes if note not in self.notes)
        if news.frame is not None:
            self._screen.frame = news.frame
            self.drawn()
        for name, reward in news.rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + reward
        if news.waits:
            self._waiting, self.chosen = news, Choice(self.handover.defaults)
            # The first round of all begins when somebody asks for it.
            if (news.frames or news.first) and self._timeout is not None:
                self._wait_timer = self._scheduler.call_at(news.at + self._timeout, partial(self._is_late, news))
            return
        own = Choice(None if news.begins else self.handover.defaults)
        self.chosen = self._offers.get(news.taken, own)
        live = {number: of for number, of in self._offers.items() if of.stamp == news.stamp and number >= news.taken}
        self._offers = live

    @property
    def waits_since(self) -> float | None:
        """When the program began to wait for its agents, in seconds of the scheduler; None: it does not."""
        return None if self._waiting is None else self._waiting.at

    # What it does next

    def offer(self, choice: Choice) -> None:
        """Have the program take a choice next."""
        self._offered += 1
        choice.number, choice.stamp = self._offered, self.stamp
        if self._waiting is None:
            self._offers[choice.number] = choice
        else:
            self._waiting, self.chosen = None, choice
            if self._wait_timer is not None:
                self._wait_timer.cancel()
        self.handover.offer(choice)

    def _is_late(self, news: News) -> None:
        # It may have been answered and called again meanwhile.
        if self._waiting is news and not self.late() and self._waiting is news:
            # Nobody plays, so nobody is told of it.
            self.offer(Choice(self.handover.defaults if news.alive else None))

    def round_comes(self, seed: object, options: object) -> bool:
        """True if a round with a seed and options was asked for, or has begun, whose first news were not read yet."""
        newest = self._offers.get(self._offered)
        return self.chosen.begins(seed, options) or (newest is not None and newest.begins(seed, options))

    # Calls of the world

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Ask for a round, and return what the program shows first in it."""
        began = time.perf_counter()
        plain = seed is None and not options
        # Who only watches enters the round that runs, and so does a world that begins anew after a failure.
        enters = plain and not self.asked and self.handover.waits is False
        try:
            while True:
                before = self.chosen
                waits = self.handover.waits and self._waiting is None  # it has yet to call
                if not waits and not (enters and before.actions is not None) and not self.round_comes(seed, options):
                    self.offer(Choice(None, seed, options))  # type: ignore[arg-type]
                    before = self.chosen
                self._take(news := await self._next_news(begins=True))
                if news.first and (plain or before.begins(seed, options)):
                    break
                if enters and news.alive and self.chosen.actions is not None:
                    break
        finally:
            self.times.reset.add(time.perf_counter() - began)
        self.asked = False
        self._rewards.clear()
        self._observations, self._alive = dict(news.observations), tuple(news.alive)
        if self._several:
            return dict(news.observations), {name: news.infos.get(name, {}) for name in news.alive}, list(news.alive)
        return news.observations[ONE], dict(news.infos.get(ONE, {}))

    async def step(self, action: Any, lane: int | None = None) -> Result:
        """Have the program act, and return what came of it; one that does not wait acts as it has chosen already."""
        began = time.perf_counter()
        try:
            news = await self._act(action)
        except RequestError as error:
            if error is not self.handover.closed or not self.handover.in_order:
                raise
            news = self._cut()
        finally:
            self.times.step.add(time.perf_counter() - began)
        self._observations.update(news.observations)
        self._alive = tuple(news.alive)
        rewards, self._rewards, self.step_frames = self._rewards, {}, news.frames
        if self._several:
            flags = (dict(news.terminated), dict(news.truncated))
            infos = {name: news.infos.get(name, {}) for name in news.observations}
            return dict(news.observations), rewards, *flags, infos, list(news.alive)
        ends = news.terminated.get(ONE, False), news.truncated.get(ONE, False)
        return news.observations[ONE], rewards.get(ONE, 0.0), *ends, dict(news.infos.get(ONE, {}))

    async def _act(self, action: Any) -> News:
        # A program that waits has yet to call where an earlier step was refused because it stood still.
        while self.handover.waits and self._waiting is None:
            self._take(await self._next_news())
        if self._waiting is not None:
            if not self._waiting.alive:
                return self._waiting
            self.offer(Choice(action if self._several else {ONE: action}))
        news = await self._next_news()
        if news.first:  # of those that would tell the end there were too many
            self.handover.put_back(news)
            return self._cut()
        self._take(news)
        return news

    def _cut(self) -> News:
        """Return news of a round that is broken off."""
        seen = {name: self._observations[name] for name in self._alive}
        return News(self.read_at, 0, observations=seen, truncated=dict.fromkeys(seen, True))

    async def _next_news(self, *, begins: bool = False) -> News:
        """Wait for the program's next call; once it is closed, one that `begins` a round waits until all is over."""
        while (news := self.handover.read()) is None:
            if self._gone is not None:
                raise self._gone
            if self.handover.closed is not None and self.handover.in_order and not begins:
                raise self.handover.closed
            # In real time its agents are told so at once, and the frame waits.
            if self.handover.waits and (still := self.standstill()) is not None:
                raise still
            self._pending = PendingResult()
            await self._pending
            self._pending = None
        if self.handover.closed is not None:
            self._scheduler.call_soon(self._wake)
        return news

    async def close(self, reason: RequestError | None = None) -> None:
        """Give the program up; it goes on."""
        for timer in (self._look_timer, self._wait_timer):
            if timer is not None:
                timer.cancel()
        self._gone = self._gone or reason or RequestError(Code.FAILED_PRECONDITION, "the world was destroyed")
        self.handover.notify = None
        self._wake()
        self._screen.frame = None
        await self.inner.close(reason)
