"""The queue between a program's thread and its server.

In each exchange the program leaves its `News`, the result of its last actions, and takes a `Choice`: the next actions,
or a new round. A program that never waits takes the newest choice, which the server has made ahead. The server reads
the news later, in order, each with the number of the choice that was taken with it. So the world learns what the
program did, however late the server is. A program that waits takes only the choice that answers its news.

`Handover` is the server's end, and `ProgramEnd` adds the program's end. Within one process both are one object. Between
two processes `bridge.game.process` carries the news one way and the choices the other way.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bridge.core.encoding.infos import merge_interventions, split_intervention
from bridge.errors import ClosedError, Code, RequestError

__all__ = ["Choice", "Handover", "News", "ProgramEnd"]

_QUEUED = 4
"""How many news are queued before further ones with the same choice are merged."""
_MOST_QUEUED = 16
"""The most queued news. When the reader has fallen so far behind, whole rounds before the newest are dropped."""
_MOST_FPS = 1000.0
_GAPS = 9
"""Frames of whose times the median tells how often the program calls: one that took long says nothing of the others."""
_SLICE = 0.1
"""The longest single wait of the program's thread, in seconds, so that Python can run signal handlers."""
_LATE = 1.0
"""Seconds that the program gives its server to answer after a timeout."""
_SETTLED = 10.0
"""Seconds that `stop` waits for the server, which needs that long only if it gets no processor time."""
_IN_ORDER = Code.FAILED_PRECONDITION
"""The code that answers agents after the program has ended without an error."""


@dataclasses.dataclass(eq=False)
class Choice:
    """What an exchange gives the program: actions, or the order to begin a round."""

    actions: Mapping[str, Any] | None
    """The action of each agent, by name; None: a round begins."""
    seed: int | None = None
    options: Any = None
    number: int = 0
    """The number of the server's choice; 0: the program itself made it, because the server had none."""
    stamp: int = 0
    """The stamp of the newest news that the server had read. The program ignores a choice with another stamp."""
    by: dict[str, str] = dataclasses.field(default_factory=dict)
    """The player who chose each agent's action; an agent without an entry gets the default action."""
    came: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each agent's action arrived, in seconds of the scheduler."""
    stood_in: Collection[str] = ()
    """The agents whose actions policies chose, as nobody plays them."""
    substitutes: Any = None
    """The actions with which an observer replaced those of agents."""

    def begins(self, seed: object, options: object) -> bool:
        """True if this choice begins a round with this seed and these options."""
        return self.actions is None and self.seed == seed and (self.options or None) == (options or None)


@dataclasses.dataclass(eq=False)
class News:
    """What the program passed in an exchange: observations, rewards, flags and infos by agent name."""

    at: float
    """When the program called, in seconds of `time.monotonic`."""
    frames: int = 1
    """How many exchanges are merged in it; 0 if it is not the result of a choice, such as in the first exchange."""
    skipped: int = 0
    """How many exchanges just before it were dropped."""
    observations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    terminated: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    truncated: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    infos: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    """Notes on values of infos that could not be sent to another process."""
    frame: Any = None
    """A picture, uint8 `(height, width, 3)`; None: the program passed none."""
    alive: Sequence[str] = ()
    """The agents that are still in the round; empty: the round is over."""
    first: bool = False
    """True if it begins a round."""
    waits: bool = False
    """True if the program waits until this is answered."""
    under: int = 0
    """The number of the choice whose result it is."""
    taken: int = 0
    """The number of the choice that was taken next; not known yet if the program waits."""
    begins: bool = False
    """True if the choice that was taken next begins a round."""
    stamp: int = 0
    """A counter that goes up with each new round and with each wait."""

    def add(self, later: News) -> None:
        """Merge the news of a later exchange into this one."""
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
    """Return the info of the later of two frames, with the interventions of both."""
    (_, before), (info, acted) = split_intervention(earlier), split_intervention(later)
    return {**info, **merge_interventions(before, acted)}


class Handover:
    """The server's end: the unread news, and the state of the program.

    Args:
        defaults: The default action of each agent, by name.
        offer: Passes a choice to the program.
    """

    def __init__(self, defaults: Mapping[str, Any], offer: Callable[[Choice], None]) -> None:
        self.defaults = defaults
        self.notify: Callable[[], None] | None = None
        """Tells the reader about news, or that the game is closed; called from any thread. None: nobody reads."""
        self.waits: bool | None = None
        """Whether the program waits for agents; None: it has not called yet."""
        self.closed: RequestError | None = None
        """The error that answers agents once there are no further exchanges; None: the game runs."""
        self.waiting = False
        """True while the program waits in an exchange."""
        self.last = 0.0
        """When the program called last, or was answered after a wait, in seconds of `time.monotonic`."""
        self.settled = threading.Event()
        """Set once the reader has seen the close and has told the agents."""
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        """Seconds between the newest calls, but for those that began a round."""
        self._offer = offer
        self._changed = threading.Condition()
        self._news: deque[News] = deque()

    def offer(self, choice: Choice) -> None:
        """Pass a choice to the program, which takes it next."""
        if self.waiting:
            self.waiting, self.last = False, time.monotonic()
        self._offer(choice)

    def add(self, news: News) -> None:
        """Queue news until it is read. If the program is faster than the reader, news is merged."""
        with self._changed:
            if news.frames:
                self._gaps.append((news.at - self.last) / (news.frames + news.skipped))
            self.waits, self.waiting, self.last = news.waits, news.waits, news.at
            if self.notify is None:  # nobody reads: keep only the newest, because pictures take memory
                self._news.clear()
            self._keep(news)
        if self.notify is not None:
            self.notify()

    def _keep(self, news: News) -> None:
        waiting = self._news
        if len(waiting) > _QUEUED:
            before, last = waiting[-2], waiting[-1]
            goes_on = last.alive and not (last.first or news.first)
            # A row of a recording has one action, so merge only frames with the same choice and the same agents. Merge
            # others too if the queue is full and holds one round only: there is no older round to drop.
            alike = last.under == news.under and {*before.alive} == {*last.alive}
            if goes_on and (alike or (len(waiting) >= _MOST_QUEUED and not self._has_rounds())):
                last.add(news)
                return
        waiting.append(news)
        if len(waiting) > _MOST_QUEUED:
            # Drop whole rounds, because a reader needs the first observation of each round.
            left_out = [waiting.popleft()]
            while not waiting[0].first:
                left_out.append(waiting.popleft())
            waiting[0].skipped += sum(old.skipped + old.frames for old in left_out)

    def _has_rounds(self) -> bool:
        """True if another round begins in the queued news."""
        return any(news.first for news in itertools.islice(self._news, 1, None))

    def read(self) -> News | None:
        """Remove and return the oldest news; None: the queue is empty."""
        with self._changed:
            return self._news.popleft() if self._news else None

    def put_back(self, news: News) -> None:
        """Put news back, to be read first."""
        with self._changed:
            self._news.appendleft(news)

    @property
    def in_order(self) -> bool:
        """True if it was closed because the program ended without an error."""
        return self.closed is not None and self.closed.code is _IN_ORDER

    @property
    def unread(self) -> bool:
        """True if there is unread news."""
        return bool(self._news)

    def rate(self, otherwise: float) -> float:
        """Return the program's calls per second, at most 1,000; `otherwise` if the rate is unknown."""
        gap = statistics.median(self._gaps.copy()) if self._gaps else 0.0
        return round(min(1.0 / gap, _MOST_FPS), 2) if gap > 0 else otherwise

    # The server calls these two: a program may end without `close`

    def start(self) -> None:
        """Do nothing: the program has begun already."""

    def stop(self) -> None:
        """Close, and wait until the server has told agents how their episode ended, or has given up on them."""
        self.close()
        if self.notify is not None:
            self.settled.wait(_SETTLED)

    def close(self, reason: RequestError | None = None) -> None:
        """End the game: an exchange that waits raises ClosedError. May be called from any thread.

        Args:
            reason: The error that answers agents; None: an error that says that the game was closed.
        """
        with self._changed:
            self.closed = self.closed or reason or RequestError(_IN_ORDER, "the game was closed")
            self._changed.notify_all()
        if self.notify is not None:
            self.notify()


class ProgramEnd(Handover):
    """The program's end.

    Args:
        defaults: The default action of each agent, by name.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        super().__init__(defaults, self.take)
        self.taken: Choice | None = None
        """The choice that the program carries out now; None: it has not called yet."""
        self.ended = "this game was closed"
        """Why there are no further exchanges, for the program's error."""
        self._next = Choice(defaults)
        self._stamp = 0
        self._asking = False
        """True while the server has to answer a wait. After Ctrl-C, the next call continues that wait."""

    def exchange(self, news: News, begins: bool, timeout: float | None) -> Choice:
        """Leave news, and take the next choice.

        Args:
            news: The result of the last choice.
            begins: True if a round must begin next, even if nobody asks for one.
            timeout: Seconds that a waiting program waits for an action; None: without limit.

        Raises:
            ClosedError: The game was closed, possibly during the wait.
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
        """Store a choice for the next exchange; called from another thread."""
        with self._changed:
            self._next = choice
            self._changed.notify_all()

    def refuse_closed(self) -> None:
        """Raise ClosedError if the game is closed."""
        if self.closed:
            raise ClosedError(f"{self.ended}; serve_game() makes another one")

    def _look(self) -> None:
        """Receive choices; a subclass in another process overrides this."""

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
        """Wait up to `seconds` for a choice. The lock is released meanwhile."""
        self._changed.wait(seconds)
