"""A program with a loop of its own as an environment: a step completes when the program calls `exchange` again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bridge.core.encoding.infos import split_intervention
from bridge.core.worlds.environment import Environment, EnvironmentProxy, Result, Spaces
from bridge.core.worlds.group import ONE
from bridge.core.worlds.scheduling import PendingResult, Scheduler, Timer
from bridge.errors import Code, RequestError
from bridge.game.handover import Choice, Handover, News

__all__ = ["GameEnvironment", "GameScreen"]

_LOOKS = 4
"""How often we check for a call within the time after which the program counts as standing still."""
_TOLD = 1.0
"""Seconds that an agent has to learn how its episode ended, before the server of a closed game stops."""
_BETWEEN = 0.01
"""Seconds between two looks for a step of a program that has raised."""
_TURNS = 20
"""Turns of the event loop between the end of the program and the end of its server."""


class GameScreen:
    """What is known of a program before its first call: its spaces, and the picture that it shows.

    Args:
        spaces: The observation and action space of each agent.
        several: True for several agents, as in a PettingZoo environment.
        default_actions: The action of each agent while nobody acts for it.
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
        """Do nothing: `GameEnvironment` resets."""

    def step(self, action: object) -> Any:
        """Do nothing: `GameEnvironment` steps."""

    def render(self) -> Any:
        """Return the picture."""
        if self.frame is None:
            raise NotImplementedError
        return self.frame

    def close(self) -> None:
        """Do nothing: the program goes on."""


# A program that waits blocks until it gets one choice for each wait; `_waiting` holds its news until then. A program
# that does not wait takes the newest choice offered before its next call. The news of that call names the choice, which
# `chosen` holds from then on; the following news holds the result of that choice.
class GameEnvironment(EnvironmentProxy):
    """Presents a program as an environment: `reset` asks for a round, and `step` returns at the program's next call.

    Args:
        env: Describes the program.
        screen: Holds the picture that the program shows.
        handover: Queues the program's news; it holds the first one by now.
        scheduler: Runs the coroutines and timers that wait for news.
        patience: Seconds without a call after which the program stands still.
        timeout: Seconds for which a waiting program waits for an action; None: without limit.
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
        self._end_timer: Timer | None = None
        self._last_call = 0.0
        """The time of the program's last call, as of the last check."""
        self._idle_looks = 0
        """Checks in a row that found no new call."""
        self._closing = False
        """True once we have seen that the program is closed."""
        self._gone: RequestError | None = None
        self._observations: dict[str, Any] = {}
        """The last observation of each agent in the round."""
        self._infos: dict[str, Mapping[str, Any]] = {}
        """The info of each of these observations."""
        self._alive: Sequence[str] = ()
        """The agents that were alive after them."""
        self._rewards: dict[str, float] = {}
        """Rewards that no step has returned yet, by agent."""
        self._waiting: News | None = None
        """The news with which the program waits; None: it does not wait."""
        self._offers: dict[int, Choice] = {}
        """Choices that the program may still take, or has taken, by number."""
        self._offered = 0
        self.stamp = 0
        """The stamp of the news that was read last."""
        self.chosen = Choice(handover.defaults)
        """The choice that the program took with the news that was read last."""
        self.frames = 0
        """Exchanges with the result of an action, from this object's start to the news that was read last."""
        self.step_frames = 0
        """How many of these frames the last step covers."""
        self.read_at = 0.0
        """When the program made the call that was read last, in seconds of the scheduler."""
        self.asked = False
        """True if a player asked for a new round; False: a round that already runs will do."""
        self.late: Callable[[], bool] = lambda: False
        """Called when a program has waited for too long; returns True if it is now stepped with default actions."""
        self.all_ended: Callable[[], PendingResult[None]] = PendingResult
        """Returns a result that is set once all agents have been told that their episode has ended."""
        self.drawn: Callable[[], None] = lambda: None
        """Called when the program has shown a picture."""
        self.noticed: Callable[[], None] = lambda: None
        """Called when the program begins to stand still, and when it has ended."""
        handover.notify = lambda: scheduler.call_soon_threadsafe(self._wake)
        self._read_all()
        self.frames = 0
        self._look()

    # The program's state

    @property
    def ended(self) -> RequestError | None:
        """The error that answers requests once the program has ended; None: it runs."""
        return self._gone

    def standstill(self) -> RequestError | None:
        """Return the error that answers requests while the program stands still; None: it does not."""
        since = self._scheduler.now() - self.handover.last
        # A server that got no processor time has not read the program's calls yet. It has not made its checks either,
        # so we count checks, not time alone.
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
                "on with its old round, as it has not read game.begins; if a round takes that long to begin, pass a "
                "longer serve_game(standstill=…)"
            )
        return RequestError(Code.DEADLINE_EXCEEDED, text)

    def _look(self) -> None:
        """Check periodically whether the program goes on."""
        self._look_timer = self._scheduler.call_later(self._patience / _LOOKS, self._look)
        self._idle_looks = self._idle_looks + 1 if self.handover.last == self._last_call else 0
        self._last_call = self.handover.last
        self._wake()
        if self.standstill() is not None:
            self.noticed()

    def _wake(self) -> None:
        """Wake the call that waits for news. Without such a call, read the news of a program that waits."""
        # News from before the program was closed is reported first.
        reads = self._pending is not None and self.handover.unread
        if self._pending is not None:
            self._pending.set_result(None)
        elif self.handover.waits:
            self._read_all()
        if self.handover.closed is not None and not self._closing and not reads:
            self._closing = True
            if self.handover.in_order:
                # The pending step completes first, and returns the end of the episode. An agent may make no request.
                self.all_ended().add_done_callback(partial(self._scheduler.call_soon, self._give_up))
                self._end_timer = self._scheduler.call_later(_TOLD, self._give_up)
            else:  # every request is answered with the error
                self._fail(_TURNS)

    def _fail(self, looks: int) -> None:
        """Have the running step raise the program's error, which ends the recorded episode as failed.

        Args:
            looks: How many times to look for a step. Between two frames there is none for a moment.
        """
        if looks and self._pending is None and not self.handover.waits:
            self._scheduler.call_later(_BETWEEN, partial(self._fail, looks - 1))
            return
        self._give_up()
        self._wake()

    def _give_up(self) -> None:
        """Refuse all requests from now on: the program has ended."""
        self._gone = self._gone or self.handover.closed
        self.noticed()
        self._settle(_TURNS)

    def _settle(self, turns: int) -> None:
        """Let the server stop after some turns of the event loop, in which pending steps fail and are answered.

        Args:
            turns: How many turns are left.
        """
        if turns:
            self._scheduler.call_soon(partial(self._settle, turns - 1))
        else:
            self.handover.settled.set()

    def _read_all(self) -> None:
        while (news := self.handover.read()) is not None:
            self._take(news)

    def _take(self, news: News) -> None:
        """Apply one news: the picture, the rewards, and the choice that the program took."""
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
            # No timeout before the very first round: it begins when somebody asks for it.
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

    # Offers

    def offer(self, choice: Choice) -> None:
        """Offer a choice, which the program takes next."""
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
        # The program may have been answered, and may have called again, in the meantime.
        if self._waiting is news and not self.late() and self._waiting is news:
            # Nobody plays: no request waits for this step.
            self.offer(Choice(self.handover.defaults if news.alive else None))

    def round_comes(self, seed: object, options: object) -> bool:
        """True if a round with this seed and options was requested or has begun, and its first news is unread."""
        newest = self._offers.get(self._offered)
        return self.chosen.begins(seed, options) or (newest is not None and newest.begins(seed, options))

    # Calls from the world

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Ask for a round, and return its first observations."""
        began = time.perf_counter()
        plain = seed is None and not options
        # A viewer joins the running round, and so does a world that starts again after a failure.
        enters = plain and not self.asked and self.handover.waits is False
        try:
            while True:
                before = self.chosen
                waits = self.handover.waits and self._waiting is None  # the program has not called yet
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
        self._observations.clear()
        self._infos.clear()
        self._keep(news)
        if self._several:
            return dict(news.observations), {name: news.infos.get(name, {}) for name in news.alive}, list(news.alive)
        return news.observations[ONE], dict(news.infos.get(ONE, {}))

    async def step(self, action: Any, lane: int | None = None) -> Result:
        """Return the result of the program's next call.

        A program that waits gets `action` first. A program that does not wait has already taken its actions.
        """
        began = time.perf_counter()
        try:
            news = await self._act(action)
        except RequestError as error:
            if error is not self.handover.closed or not self.handover.in_order:
                raise
            news = self._cut()
        finally:
            self.times.step.add(time.perf_counter() - began)
        self._keep(news)
        rewards, self._rewards, self.step_frames = self._rewards, {}, news.frames
        if self._several:
            flags = (dict(news.terminated), dict(news.truncated))
            infos = {name: news.infos.get(name, {}) for name in news.observations}
            return dict(news.observations), rewards, *flags, infos, list(news.alive)
        ends = news.terminated.get(ONE, False), news.truncated.get(ONE, False)
        return news.observations[ONE], rewards.get(ONE, 0.0), *ends, dict(news.infos.get(ONE, {}))

    async def _act(self, action: Any) -> News:
        # A waiting program may not have called yet: an earlier step was refused because it stood still.
        while self.handover.waits and self._waiting is None:
            self._take(await self._next_news())
        if self._waiting is not None:
            if not self._waiting.alive:
                return self._waiting
            self.offer(Choice(action if self._several else {ONE: action}))
        news = await self._next_news()
        if news.first:  # the news with the end of the round was dropped: the queue was full
            self.handover.put_back(news)
            return self._cut()
        self._take(news)
        return news

    def _keep(self, news: News) -> None:
        """Keep what `_cut` repeats."""
        self._observations.update(news.observations)
        self._infos.update({name: news.infos.get(name, {}) for name in news.observations})
        self._alive = tuple(news.alive)

    def _cut(self) -> News:
        """Return news that truncates the round, with the last observations and their infos."""
        seen = {name: self._observations[name] for name in self._alive}
        # The intervention was of the frame before.
        infos = {name: split_intervention(self._infos[name])[0] for name in seen}
        return News(self.read_at, 0, observations=seen, infos=infos, truncated=dict.fromkeys(seen, True))

    async def _next_news(self, *, begins: bool = False) -> News:
        """Wait for the program's next call.

        Args:
            begins: True for a reset. After the program is closed, a reset waits until all agents know of the end.
        """
        while (news := self.handover.read()) is None:
            if self._gone is not None:
                raise self._gone
            if self.handover.closed is not None and self.handover.in_order and not begins:
                raise self.handover.closed
            # Only in lock step: in real time agents are refused at once, and the frame waits.
            if self.handover.waits and (still := self.standstill()) is not None:
                raise still
            self._pending = PendingResult()
            await self._pending
            self._pending = None
        if self.handover.closed is not None:
            self._scheduler.call_soon(self._wake)
        return news

    async def close(self, reason: RequestError | None = None) -> None:
        """Detach from the program, which goes on."""
        for timer in (self._look_timer, self._wait_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._gone = self._gone or reason or RequestError(Code.FAILED_PRECONDITION, "the world was destroyed")
        self.handover.notify = None
        self._wake()
        self._screen.frame = None
        await self.inner.close(reason)
