"""What passes between the thread of a program and that of its server.

In each exchange the program leaves what its last actions led to (`News`), and takes what to do next (`Choice`). The
server has the choice ready, so the program need not wait for it. It reads the news later, in their order, each with the
choice that was taken with it: so the world is told what the program did, however late the server is.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.errors import ClosedError, Code, RequestError

__all__ = ["Choice", "Handover", "News"]

_QUEUED = 4
"""News that wait before exchanges under one choice are put together."""
_MOST_QUEUED = 16
_MOST_FPS = 1000.0
_SLICE = 0.1
"""Seconds after which a wait of the program's thread is interrupted, so that Python runs its signal handlers."""


@dataclasses.dataclass(eq=False)
class Choice:
    """What an exchange gives the program: actions, or a round to begin."""

    actions: Mapping[str, Any] | None
    """By the name of the agent; None: a round begins."""
    seed: int | None = None
    options: Any = None
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Whose the actions are, by agent; empty: the default one stands in."""
    came: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """When each agent's action came, in seconds of the scheduler."""
    fresh: set[str] = dataclasses.field(default_factory=set)
    """The agents whose action no choice that was taken had before."""
    substitutes: Any = None
    """What an observer put in the place of agents' actions."""
    number: int = -1
    """By which another process knows it; 0: the default one; -1: it was not offered."""

    def begins(self, seed: object, options: object) -> bool:
        """True if it is a round with a seed and options."""
        return self.actions is None and self.seed == seed and (self.options or None) == (options or None)


@dataclasses.dataclass(eq=False)
class News:
    """What the program passed in an exchange: observations and the like by the name of the agent."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, float]
    terminated: Mapping[str, bool]
    truncated: Mapping[str, bool]
    infos: Mapping[str, Mapping[str, Any]]
    frame: Any
    """A picture, uint8 `(height, width, 3)`; None: the program passed none."""
    alive: Sequence[str]
    """The agents that are still in the round; none: it is over."""
    at: float = 0.0
    """When, in seconds of the scheduler."""
    first: bool = False
    """True if it is the beginning of a round."""
    under: Choice | None = None
    """What the program did until then; None: nothing was chosen yet."""
    next: Choice | None = None
    """What it took."""

    def add(self, later: News) -> None:
        """Add what came of the same choice in a further exchange."""
        self.observations = {**self.observations, **later.observations}
        names = {*self.rewards, *later.rewards}
        self.rewards = {name: self.rewards.get(name, 0.0) + later.rewards.get(name, 0.0) for name in names}
        self.terminated, self.truncated = {**self.terminated, **later.terminated}, {**self.truncated, **later.truncated}
        self.infos, self.alive = {**self.infos, **later.infos}, later.alive
        self.frame, self.at, self.next = later.frame, later.at, later.next


class Handover:
    """Where both threads meet.

    Args:
        defaults: The actions of agents that have none, by name.
    """

    pause = 0.0
    """Seconds in which news may arrive that the program has left."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self.default = Choice(defaults, number=0)
        """What is taken where nobody has acted."""
        self.notify: Callable[[], None] = lambda: None
        """Tells the server that there are news; called by the program's thread."""
        self.waits: bool | None = None
        """Whether the program waits for agents; None: it has not called yet."""
        self.began: Callable[[], None] = lambda: None
        """Tells the server of the first call."""
        self.taken: Choice | None = None
        """What the program does now; None: it has not called yet."""
        self.closed: RequestError | None = None
        """What agents are answered with once there is no further exchange."""
        self.in_order = True
        """True if it was closed because the program has ended well."""
        self.ended = "this game was closed"
        """Why there is none, as the program is told."""
        self.rounds = 0
        """How many rounds have begun."""
        self.waiting = False
        """True while the program waits in an exchange."""
        self.last = 0.0
        """When the program called last, or was answered after a wait, in seconds of `time.monotonic`."""
        self.interval = 0.0
        """Seconds between two exchanges, a moving average; 0: unknown."""
        self.ignored = 0.0
        """Since when the program ignores that a round is to begin, in seconds of `time.monotonic`; 0: it does not."""
        self.wakes = False
        """True if the server reads the news: somebody is in the world, or was."""
        self._changed = threading.Condition()
        self._next = self.default
        self._offered = False
        """True if the server has chosen since the last exchange."""
        self._news: deque[News] = deque()

    # The program's thread

    def exchange(self, news: News | None, begins: bool, wait: bool, timeout: float | None) -> Choice:
        """Leave news, and take what to do next.

        Args:
            news: What the last choice led to; None: nothing that counts.
            begins: True if a round is to begin next, whoever asks for it.
            wait: True to wait for somebody to act, or to ask for the round.
            timeout: Seconds of that wait at most; None: any.

        Raises:
            ClosedError: The game was closed, perhaps while this waited.
        """
        with self._changed:
            self._note_call(wait)
            self.ignored = 0.0
            if news is not None:
                news.under = self.taken
            if wait:
                if news is not None:
                    # The round has begun, though this has yet to return: a reset now is for another one.
                    self.taken = self.default if news.first else self.taken
                    self._add(news)
                self._wait(lambda: self._offered and (not begins or self._next.actions is None), timeout)
            self.refuse_closed()
            choice = self._next
            if begins and choice.actions is not None:
                choice = Choice(None)
            elif wait and not self._offered:
                choice = self.default  # nobody acted in time
            if choice.actions is None:
                self._next = self.default
                self.rounds += 1
            self.taken, self._offered = choice, False
            if news is not None:
                news.next = choice
                if not wait:
                    self._add(news)
            return choice

    def ignore(self) -> None:
        """Note an exchange of a program that has not looked whether a round is to begin, as one is."""
        with self._changed:
            self._note_call(False)
            self.refuse_closed()
            self.ignored = self.ignored or self.last

    def _note_call(self, wait: bool) -> None:
        now = time.monotonic()
        if self.taken is not None:
            gap = now - self.last
            self.interval = 0.9 * self.interval + 0.1 * gap if self.interval else gap
        self.last, self.waiting = now, wait
        self._called(wait)

    def _called(self, waits: bool) -> None:
        # Each wake-up of the server takes the program time: the first call alone has somebody who waits for it.
        first, self.waits = self.waits is None, waits
        if first:
            self.began()

    def _add(self, news: News) -> None:
        if news.frame is not None:
            news.frame = news.frame.copy("K")  # in the order of its memory: other orders take ten times as long
        queued = self._news
        if not self.wakes:
            queued.clear()
        last = queued[-1] if len(queued) > _QUEUED else None
        if last is not None and last.under is news.under and last.alive and not (last.first or news.first):
            last.add(news)
        else:
            # The server does not read: of older rounds nobody will be told.
            if news.first and len(queued) > _MOST_QUEUED:
                queued.clear()
            queued.append(news)
        self.notify()

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        until = None if timeout is None else self.last + timeout
        try:
            while not (ready() or self.closed):
                left = _SLICE if until is None else min(until - time.monotonic(), _SLICE)
                if left <= 0:
                    break
                self._changed.wait(left)
        finally:
            self.waiting, self.last = False, time.monotonic()

    def refuse_closed(self) -> None:
        """Raise ClosedError once there is no further exchange."""
        if self.closed:
            raise ClosedError(f"{self.ended}; serve_game() makes another one")

    # The server's thread

    def offer(self, choice: Choice) -> None:
        """Have the next exchange take a choice."""
        with self._changed:
            self._next, self._offered = choice, True
            self._changed.notify_all()

    def withdraw(self, choice: Choice | None = None) -> None:
        """Have the next exchange take the default, in the place of a choice; None: of any that has actions."""
        with self._changed:
            if self._next is choice or (choice is None and self._next.actions is not None):
                self._next, self._offered = self.default, False

    def read(self) -> News | None:
        """Return the oldest news, and forget them; None: there are none."""
        with self._changed:
            return self._news.popleft() if self._news else None

    def put_back(self, news: News) -> None:
        """Have news that were read be read again."""
        with self._changed:
            self._news.appendleft(news)

    def round_to_come(self, seed: object, options: object) -> bool:
        """True if a round with a seed and options was asked for, or has begun, whose first news were not read yet."""
        with self._changed:
            waiting = [news.under for news in self._news if news.first]
            asked = [self._next, self.taken, *waiting]
            return any(choice is not None and choice.begins(seed, options) for choice in asked)

    @property
    def round_asked(self) -> bool:
        """True if a round was asked for that the program has not taken yet."""
        return self._next.actions is None

    @property
    def unread(self) -> bool:
        """True if there are news that were not read, or on their way."""
        return bool(self._news)

    @property
    def queued(self) -> int:
        """How many news there are that were not read."""
        return len(self._news)

    @property
    def missed(self) -> int:
        """How many frames a program that waits for agents has made without them, or is about to make."""
        with self._changed:
            return len(self._news) + (not self.waiting and not self.closed)

    def rate(self, otherwise: float) -> float:
        """Return how often a second the program calls, as far as clients take it; `otherwise` where that is unknown."""
        return round(min(1.0 / self.interval, _MOST_FPS), 2) if self.interval > 0 else otherwise

    # Attached to the server: a program may end without `close`

    def start(self) -> None:
        """Begin with the server."""

    def stop(self) -> None:
        """End with the server."""
        self.close()

    def close(self, reason: RequestError | None = None) -> None:
        """End it: an exchange that waits raises; may be called by any thread.

        Args:
            reason: What agents are answered with; None: that the game was closed.
        """
        with self._changed:
            if self.closed is None:
                self.in_order = reason is None
            self.closed = self.closed or reason or RequestError(Code.FAILED_PRECONDITION, "the game was closed")
            self._changed.notify_all()
        self.notify()
