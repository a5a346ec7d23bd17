"""What passes between the thread of a program and its server.

In each exchange the program leaves its `News`, what its last actions led to, and takes a `Choice`, what to do next. A
program that never waits takes the newest one, which the server has made ahead. The server reads the news later, in
their order, each with the number of the choice that was taken with it: so the world is told what the program did,
however late the server is. One that waits takes the choice that answers its news, and no other one.

`Handover` is the server's end, and `ProgramEnd` adds the program's. In one process both are one object; between two,
`bridge.game.process` carries the news one way, and the choices the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.core.encoding.infos import merge_interventions, split_intervention
from bridge.errors import ClosedError, Code, RequestError

__all__ = ["Choice", "Handover", "News", "ProgramEnd"]

_QUEUED = 4
"""News that wait before exchanges under one choice are put together."""
_MOST_QUEUED = 16
"""News that wait at most: of rounds before the newest nobody is told whose reader has fallen so far behind."""
_MOST_FPS = 1000.0
_SLICE = 0.1
"""Seconds after which a wait of the program's thread is interrupted, so that Python runs its signal handlers."""
_LATE = 1.0
"""Seconds that a program whose timeout is over, or that is closed, gives its server to answer."""
_IN_ORDER = Code.FAILED_PRECONDITION
"""With what agents are refused once the program has ended well."""


@dataclasses.dataclass(eq=False)
class Choice:
    """What an exchange gives the program: actions, or a round to begin."""

    actions: Mapping[str, Any] | None
    """By the name of the agent; None: a round begins."""
    seed: int | None = None
    options: Any = None
    number: int = 0
    """Which choice of the server it is; 0: the program has made it, as nobody did."""
    stamp: int = 0
    """The stamp of the newest news that the server had read: where the program's is another one, it is not taken."""
    by: dict[str, str] = dataclasses.field(default_factory=dict)
    """Whose the actions are, by agent; none: the default one stands in."""
    came: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each agent's action came, in seconds of the scheduler."""
    substitutes: Any = None
    """What an observer put in the place of agents' actions."""

    def begins(self, seed: object, options: object) -> bool:
        """True if it is a round with a seed and options."""
        return self.actions is None and self.seed == seed and (self.options or None) == (options or None)


@dataclasses.dataclass(eq=False)
class News:
    """What the program passed in an exchange: observations and the like by the name of the agent."""

    at: float
    """When, in seconds of `time.monotonic`."""
    frames: int = 1
    """How many exchanges they are of; 0: they are no result of a choice, as those of the first exchange."""
    skipped: int = 0
    """How many exchanges there were before them of which nobody is told."""
    observations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    terminated: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    truncated: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    infos: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    """What of the infos did not travel to another process."""
    frame: Any = None
    """A picture, uint8 `(height, width, 3)`; None: the program passed none."""
    alive: Sequence[str] = ()
    """The agents that are still in the round; none: it is over."""
    first: bool = False
    """True if it is the beginning of a round."""
    waits: bool = False
    """True if the program waits until this is answered."""
    under: int = 0
    """The number of the choice that led to it."""
    taken: int = 0
    """The number of the choice that was taken next; where the program waits, it is not known yet."""
    begins: bool = False
    """True if that begins a round."""
    stamp: int = 0
    """Goes up with each round that begins, and with each wait."""

    def add(self, later: News) -> None:
        """Add what came of the same choice in a further exchange."""
        self.observations = {**self.observations, **later.observations}
        names = {*self.rewards, *later.rewards}
        self.rewards = {name: self.rewards.get(name, 0.0) + later.rewards.get(name, 0.0) for name in names}
        self.terminated, self.truncated = {**self.terminated, **later.terminated}, {**self.truncated, **later.truncated}
        infos, names = self.infos, {*self.infos, *later.infos}
        self.infos = {name: _put_together(infos.get(name, {}), later.infos.get(name, {})) for name in names}
        self.alive = later.alive
        self.notes = [*self.notes, *later.notes]
        self.frame, self.at = self.frame if later.frame is None else later.frame, later.at
        self.frames += later.frames
        self.taken, self.begins, self.stamp = later.taken, later.begins, later.stamp


def _put_together(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the info of the later of two frames, with who acted in the agent's place in both."""
    (_, before), (info, acted) = split_intervention(earlier), split_intervention(later)
    return {**info, **merge_interventions(before, acted)}


class Handover:
    """The server's end: the news that it has not read, and how the program is.

    Args:
        defaults: The actions of agents that have none, by name.
        offer: Takes a choice to the program.
    """

    def __init__(self, defaults: Mapping[str, Any], offer: Callable[[Choice], None]) -> None:
        self.defaults = defaults
        self.notify: Callable[[], None] | None = None
        """Tells who reads that there are news, or that it is closed; called by any thread. None: nobody reads."""
        self.waits: bool | None = None
        """Whether the program waits for agents; None: it has not called yet."""
        self.closed: RequestError | None = None
        """What agents are answered with once there is no further exchange."""
        self.waiting = False
        """True while the program waits in an exchange."""
        self.last = 0.0
        """When the program called last, or was answered after a wait, in seconds of `time.monotonic`."""
        self.settled = threading.Event()
        """Set once who reads has seen that it is closed, and agents are told of it."""
        self._interval = 0.0
        self._offer = offer
        self._changed = threading.Condition()
        self._news: deque[News] = deque()

    def offer(self, choice: Choice) -> None:
        """Have the program take a choice next."""
        if self.waiting:
            self.waiting, self.last = False, time.monotonic()
        self._offer(choice)

    def add(self, news: News) -> None:
        """Keep news until they are read. Those of a program that is faster than its reader are put together."""
        with self._changed:
            if self.waits is not None:
                gap = (news.at - self.last) / max(1, news.frames + news.skipped)
                self._interval = 0.9 * self._interval + 0.1 * gap if self._interval else gap
            self.waits, self.waiting, self.last = news.waits, news.waits, news.at
            if self.notify is None:  # the newest tell how the program is, and the pictures of others take memory
                self._news.clear()
            self._keep(news)
        if self.notify is not None:
            self.notify()

    def _keep(self, news: News) -> None:
        waiting = self._news
        if len(waiting) > _QUEUED:
            before, last = waiting[-2], waiting[-1]
            goes_on = last.alive and not (last.first or news.first)
            # A row of a recording has one action, and the frames that are put together are of the same agents: but for
            # a round that alone is too much to wait.
            alike = last.under == news.under and {*before.alive} == {*last.alive}
            if goes_on and (alike or (len(waiting) >= _MOST_QUEUED and not self._has_rounds())):
                last.add(news)
                return
        waiting.append(news)
        if len(waiting) > _MOST_QUEUED:
            # Rounds are left out as a whole, for what is told of one begins with its first observation.
            left_out = [waiting.popleft()]
            while not waiting[0].first:
                left_out.append(waiting.popleft())
            waiting[0].skipped += sum(old.skipped + old.frames for old in left_out)

    def _has_rounds(self) -> bool:
        """True if a further round begins in what waits."""
        return any(news.first for news in itertools.islice(self._news, 1, None))

    def read(self) -> News | None:
        """Return the oldest news, and forget them; None: there are none."""
        with self._changed:
            return self._news.popleft() if self._news else None

    def put_back(self, news: News) -> None:
        """Keep news that were read, to be read first."""
        with self._changed:
            self._news.appendleft(news)

    @property
    def in_order(self) -> bool:
        """True if it was closed because the program has ended well."""
        return self.closed is not None and self.closed.code is _IN_ORDER

    @property
    def unread(self) -> bool:
        """True if there are news that were not read."""
        return bool(self._news)

    def rate(self, otherwise: float) -> float:
        """Return how often a second the program calls, as far as clients take it; `otherwise` where that is unknown."""
        return round(min(1.0 / self._interval, _MOST_FPS), 2) if self._interval > 0 else otherwise

    # Attached to the server: a program may end without `close`

    def start(self) -> None:
        """Begin with the server."""

    def stop(self) -> None:
        """End with the server, once agents are told how their episode has ended."""
        self.close()
        if self.notify is not None:
            self.settled.wait(_LATE)

    def close(self, reason: RequestError | None = None) -> None:
        """End it: an exchange that waits raises; may be called by any thread.

        Args:
            reason: What agents are answered with; None: that the game was closed.
        """
        with self._changed:
            self.closed = self.closed or reason or RequestError(_IN_ORDER, "the game was closed")
            self._changed.notify_all()
        if self.notify is not None:
            self.notify()


class ProgramEnd(Handover):
    """The program's end.

    Args:
        defaults: As of a `Handover`.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        super().__init__(defaults, self.take)
        self.taken: Choice | None = None
        """What the program does now; None: it has not called yet."""
        self.ended = "this game was closed"
        """Why there is no further exchange, as the program is told."""
        self._next = Choice(defaults)
        self._stamp = 0
        self._asking = False
        """True if the server is to answer a wait; where Ctrl-C has broken that off, the next call goes on with it."""

    def exchange(self, news: News, begins: bool, timeout: float | None) -> Choice:
        """Leave news, and take what to do next.

        Args:
            news: What the last choice led to.
            begins: True if a round is to begin next, whoever asks for it.
            timeout: Seconds that a program that waits does so for somebody to act; None: any.

        Raises:
            ClosedError: The game was closed, perhaps while this waited.
        """
        with self._changed:
            self.refuse_closed()
            news.under = 0 if self.taken is None else self.taken.number
            if news.waits:
                if not self._asking:
                    self._stamp += 1
                    self._leave(news)
                self._asking = True
                self._wait(timeout)
                self._asking = False
            self._look()
            self.refuse_closed()
            choice = self._next if self._next.stamp == self._stamp else Choice(self.defaults)
            if begins and choice.actions is not None:
                choice = Choice(None)
            self.taken = choice
            if not news.waits:
                self._stamp += choice.actions is None
                self._leave(news)
            return choice

    def take(self, choice: Choice) -> None:
        """Have the next exchange take a choice; called by another thread."""
        with self._changed:
            self._next = choice
            self._changed.notify_all()

    def refuse_closed(self) -> None:
        """Raise ClosedError once there is no further exchange."""
        if self.closed:
            raise ClosedError(f"{self.ended}; serve_game() makes another one")

    def _look(self) -> None:
        """Take the choices that wait elsewhere."""

    def _leave(self, news: News) -> None:
        if self.taken is not None:
            news.taken, news.begins = self.taken.number, self.taken.actions is None
        news.stamp = self._stamp
        self.add(news)

    def _wait(self, timeout: float | None) -> None:
        until = None if timeout is None else self.last + timeout + _LATE
        while self._next.stamp != self._stamp and not self.closed:
            left = _SLICE if until is None else min(until - time.monotonic(), _SLICE)
            if left <= 0:
                return
            self._pause(left)

    def _pause(self, seconds: float) -> None:
        """Wait for a choice for so many seconds; the lock is not held meanwhile."""
        self._changed.wait(seconds)
