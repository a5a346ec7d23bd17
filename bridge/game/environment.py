"""A program with a loop of its own as an environment: a step is over when the program calls again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from bridge.core.worlds.environment import Environment, EnvironmentProxy, Result, Spaces
from bridge.core.worlds.group import ONE
from bridge.core.worlds.scheduling import PendingResult, Scheduler, Timer
from bridge.errors import Code, RequestError
from bridge.game.handover import Choice, Handover, News

__all__ = ["GameEnvironment", "described"]

_LOOKS = 4
"""How often, in the time after which a program stands still, that is looked at."""


class _Screen:
    """What the program shows."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    render_mode: str | None = "rgb_array"
    frame: Any = None
    """The picture; None: the program passed none."""

    def render(self) -> Any:
        """Return the picture."""
        if self.frame is None:
            raise NotImplementedError
        return self.frame

    def close(self) -> None:
        """Close nothing: the program goes on."""


class _One(_Screen, gymnasium.Env[Any, Any]):
    """Describes a program with one agent; `GameEnvironment` has its resets and steps."""

    def __init__(self, spaces: Spaces, default_action: Any) -> None:
        self.observation_space, self.action_space = spaces
        self.default_action = default_action


class _Several(_Screen):
    """Describes a program with several agents, as PettingZoo does."""

    def __init__(self, spaces: Mapping[str, Spaces]) -> None:
        self._spaces = spaces
        self.possible_agents = [*spaces]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        """Return an agent's observation space."""
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Any:
        """Return an agent's action space."""
        return self._spaces[agent][1]

    def reset(self, seed: object = None, options: object = None) -> Any:
        """Stand for the program's rounds."""

    def step(self, actions: object) -> Any:
        """Stand for the program's frames."""


def described(spaces: Mapping[str, Spaces], several: bool, default_actions: Mapping[str, Any]) -> Any:
    """Return an environment with the spaces of a program, and its picture, that cannot be stepped.

    Args:
        spaces: Of observations and actions, by agent.
        several: Whether it has several agents.
        default_actions: What is done where nobody acts, by agent.
    """
    return _Several(spaces) if several else _One(spaces[ONE], default_actions.get(ONE))


class GameEnvironment(EnvironmentProxy):
    """Stands for a program: `reset` asks for a round, and a call is over when the program has called again.

    Args:
        env: Has the description of the program.
        screen: What it shows, as `described` returned it.
        handover: Where the program's thread leaves its news.
        scheduler: Runs what waits for them.
        patience: Seconds without a call after which the program stands still.
    """

    def __init__(
        self, env: Environment, screen: Any, handover: Handover, scheduler: Scheduler, patience: float
    ) -> None:
        super().__init__(env)
        self.handover = handover
        self._screen = screen
        self._scheduler = scheduler
        self._patience = patience
        self._several = bool(env.facts.agents)
        self._pending: PendingResult[None] | None = None
        self._timer: Timer | None = None
        self._gone: RequestError | None = None
        self._observations: dict[str, Any] = {}
        self.ahead = False
        """True if a clock chooses ahead: a step is of the choice that the program has taken already."""
        self.chosen: Choice | None = None
        """What the program took with the news that were read last."""
        self.read_at = 0.0
        """When the program called with what was read last, in seconds of the scheduler."""
        self.missed = False
        """True if the next step is of a frame that the program made without agents, with the actions that it took."""
        self.asked = False
        """True if somebody who plays asked for the round that begins next; False: one that runs is as good."""
        self.noticed: Callable[[], None] = lambda: None
        """Called when the program begins to stand still, and when it is gone."""
        handover.wakes = True
        handover.notify = lambda: scheduler.call_soon_threadsafe(self._wake)
        self._look()

    # The program's state

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with once the program is gone; None: it is not."""
        return self._gone

    def standstill(self) -> RequestError | None:
        """Return the error of requests while the program stands still; None: it does not."""
        since = time.monotonic() - self.handover.last
        if self.handover.waiting or since < self._patience:
            return None
        text = f"the game stands still: the last call of exchange() was {since:.1f} s ago; send the request again"
        return RequestError(Code.DEADLINE_EXCEEDED, text)

    def _look(self) -> None:
        """Look again and again whether the program goes on."""
        self._timer = self._scheduler.call_later(self._patience / _LOOKS, self._look)
        self._wake()
        if self.standstill() is not None:
            self.noticed()

    def _wake(self) -> None:
        """Let a call look for news."""
        if self.handover.closed is not None and self._gone is None:
            self._gone = self.handover.closed
            self.noticed()
        if self._pending is not None:
            self._pending.set_result(None)

    # Calls of the world

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Ask for a round, and return what the program shows first in it."""
        began, handover = time.perf_counter(), self.handover
        plain = seed is None and not options
        # Who only watches enters the round that runs, and so does a world that begins anew after a failure.
        runs = handover.taken is not None and handover.taken.actions is not None
        enters = plain and self.ahead and not self.asked and runs
        if not enters and not handover.round_to_come(seed, options):
            handover.offer(Choice(None, seed, options))  # type: ignore[arg-type]
        self._observations.clear()

        def fits(news: News) -> bool:
            if news.first:
                return news.under is not None and (plain or news.under.begins(seed, options))
            return enters and bool(news.alive)

        try:
            news = await self._next_news(fits)
        finally:
            self.times.reset.add(time.perf_counter() - began)
        self.asked = False
        if self._several:
            return dict(news.observations), {name: news.infos.get(name, {}) for name in news.alive}, list(news.alive)
        return news.observations[ONE], dict(news.infos.get(ONE, {}))

    async def step(self, action: Any, lane: int | None = None) -> Result:
        """Have the program act, and return what came of it."""
        began, handover, choice = time.perf_counter(), self.handover, self.chosen
        was_made, self.missed = self.missed, False
        if not was_made and (choice is None or not self.ahead):
            choice = Choice(action if self._several else {ONE: action})
            handover.offer(choice)
        missed: dict[str, float] = {}

        def fits(news: News) -> bool:
            if was_made or news.first or news.under is choice or not news.alive:
                return True
            # Frames before it took the action, in which default ones stood in.
            missed.update({name: missed.get(name, 0.0) + reward for name, reward in news.rewards.items()})
            return False

        news: News | None = None
        try:
            news = await self._next_news(fits)
        except RequestError as error:
            handover.withdraw(choice)
            if error is not handover.closed or not handover.in_order:
                raise
        finally:
            self.times.step.add(time.perf_counter() - began)
        if news is None or news.first:  # the program is closed, or has gone on to another round
            if news is not None:
                handover.put_back(news)
            news = News(dict(self._observations), {}, {}, dict.fromkeys(self._observations, True), {}, None, ())
        rewards = {name: missed.get(name, 0.0) + news.rewards.get(name, 0.0) for name in {*missed, *news.rewards}}
        if self._several:
            flags = (dict(news.terminated), dict(news.truncated))
            infos = {name: news.infos.get(name, {}) for name in news.observations}
            return dict(news.observations), rewards, *flags, infos, list(news.alive)
        ends = news.terminated.get(ONE, False), news.truncated.get(ONE, False)
        return news.observations[ONE], rewards.get(ONE, 0.0), *ends, dict(news.infos.get(ONE, {}))

    async def _next_news(self, fits: Callable[[News], bool]) -> News:
        """Wait for news that fit; others are forgotten."""
        while True:
            while (news := self.handover.read()) is not None:
                if fits(news):
                    self.read_at, self.chosen = news.at, news.next
                    self._observations.update(news.observations)
                    if news.frame is not None:
                        self._screen.frame = news.frame
                    return news
            if self._gone is not None:
                raise self._gone
            if not self.ahead and (still := self.standstill()) is not None:
                raise still
            self._refuse_ignored()
            self._pending = PendingResult()
            await self._pending
            self._pending = None

    def _refuse_ignored(self) -> None:
        """Raise where the program has ignored for a second that a round is to begin."""
        since = self.handover.ignored
        if since and time.monotonic() - since > self._patience:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "the game goes on with its old round: it has not read game.begins since exchange() returned None",
            )

    async def close(self, reason: RequestError | None = None) -> None:
        """Give the program up; it goes on."""
        if self._timer is not None:
            self._timer.cancel()
        self._gone = self._gone or reason or RequestError(Code.FAILED_PRECONDITION, "the world was destroyed")
        self.handover.wakes, self.handover.notify = False, lambda: None
        self._wake()
        self._screen.frame = None
        await self.inner.close(reason)
