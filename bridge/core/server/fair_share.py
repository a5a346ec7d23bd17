"""Processor time, shared fairly: what a connection may use beside the requests that it is served.

Requests are what a server is for, and are served as they come. Everything else that a client can send (pings, settings,
header blocks, resets, frames of no meaning) costs it nothing and this server something: each connection may use a
little of that at once, and all of them together a fixed share of the time. Who uses more is read later, and in smaller
pieces; nobody is cut for it. A request beside such bytes does not make them free: it is worth what a request has been
seen to take on this machine, and the rest of the turn is charged.

The shares are of the time that the server gets. Beside other programs that may be a third of a core: attackers on the
same machine, or a training loop, would else leave it no time for requests.
"""

from __future__ import annotations

from bridge.core.worlds.scheduling import Timer

__all__ = ["FairShare", "ProcessorAccount"]

BURST = 0.01
"""Seconds that a connection may use at once."""
REFILL = 0.05
"""Seconds that all connections together may use a second, beyond those, in equal parts."""
SHARE = 0.1
"""The share of the time that all connections together may use which have used more than that."""
# A turn may take so many times the fastest request, for each of its requests or blocks of a large one, without a closer
# look.
_USUAL = 8
# Seconds that any turn may take without a closer look.
_SHORT = 2e-4
# The most that a byte can explain of a turn's seconds: the rest of it the system gave to other programs.
_PER_BYTE = 1e-6
# The seconds of turns over which the server's speed is averaged, and the least that is assumed.
_MEMORY = 0.2
_LEAST_SPEED = 0.1
# Seconds that a request is taken to need before one has come: a few times those of a fast machine. Were it more, all
# that comes before the first request would be free.
_FIRST = 5e-5
# Below this a clock is not to be believed.
_LEAST = 2e-6
_BLOCK = 4096


class FairShare:
    """The state that all connections of a server share."""

    def __init__(self) -> None:
        self.fastest = _FIRST
        """The fewest seconds in which a request was received. Nobody can raise it."""
        self.usual = _FIRST * _USUAL
        """Seconds that a turn with one request may take without a closer look."""
        self.connections = 0
        """How many connections there are."""
        self.charged = {"client": 0.0, "viewer": 0.0, "stranger": 0.0}
        """The seconds that connections were charged, by what their clients may do."""
        self.waiting = 0
        """How many connections wait until they are read again."""
        self.speed = 1.0
        """The processor time that the server gets a second in which it has something to do."""
        self.visits = ProcessorAccount(self, 0.0)
        """Charged for all connections that came and went without a call: each by itself is too short to be slowed."""

    @property
    def worth(self) -> float:
        """Seconds of a turn that are not charged, for each of its requests."""
        return 2 * self.fastest

    def note_turn(self, seconds: float, lasted: float) -> None:
        """Note that a turn took so much processor time, and how long it lasted."""
        # Weighted by time and not by turns, so that one long pause says little.
        speed = (self.speed * _MEMORY + seconds) / (_MEMORY + lasted)
        self.speed = min(1.0, max(_LEAST_SPEED, speed))

    def note_fastest(self, seconds: float) -> None:
        """Note that a request was received in fewer seconds than any before."""
        self.fastest = max(seconds, _LEAST)
        self.usual = max(_SHORT, self.fastest * _USUAL)


class ProcessorAccount:
    """Counts the processor time of one connection. `now` is seconds, monotonic.

    Args:
        share: That of the server.
        now: The time.
    """

    __slots__ = ("_credit", "_seen", "excess", "probed", "productive", "share", "spent", "timer", "until")

    def __init__(self, share: FairShare, now: float) -> None:
        self.share = share
        # Enough for a greeting, which took 0.4 ms when it was measured (0.9 ms with TLS), also on a slower machine. Not
        # a whole burst: a client could have another one by each new connection.
        self._credit = BURST / 4
        self._seen = now
        self.productive = False
        """True if what the connection sent last was requests and little else: what follows is not measured."""
        self.excess = 0.0
        """Seconds to charge for a turn that was not measured, and showed to be more than its requests."""
        self.spent = 0.0
        """Seconds that it took since it was accepted, as far as they were measured."""
        self.timer: Timer | None = None
        """Has the connection read again, where it has used more than it may; None: it is read."""
        self.until = now
        """When it is to be read again."""
        self.probed = now
        """When its client was last sent a ping for a sign that it has closed."""

    def judge(self, seconds: float, size: int, requests: int, *, receives_large: bool) -> None:
        """Look closer at a turn in which other than one request came, or which took long.

        Args:
            seconds: What it took, by a clock that runs on while other programs do.
            size: The bytes received.
            requests: The requests that they completed.
            receives_large: Whether a large request is being received.
        """
        share = self.share
        # A large request takes many turns that complete none: its blocks count as requests, or its reception would be
        # charged.
        blocks = 1 + size // _BLOCK if receives_large else 0
        self.productive = requests + blocks > 0 and seconds <= max(_SHORT, share.fastest * _USUAL * (requests + blocks))
        self.excess = max(0.0, min(seconds, size * _PER_BYTE) - requests * share.worth)

    def charge(self, seconds: float, now: float, *, alone: bool = False) -> float:
        """Count processor time that completed no request; return the seconds for which it is not to be read.

        What is charged while it is not read, as for requests that came together, adds to these seconds.

        Args:
            seconds: What it took.
            now: The time.
            alone: Whether the account has a `SHARE` of the time for itself, and divides none with others that wait.
        """
        self.spent += seconds
        # Where the server gets half of a core, a second of its processor time takes two.
        seconds /= self.share.speed
        refill = REFILL / max(2, self.share.connections)
        self._credit = min(BURST, self._credit + (now - self._seen) * refill) - seconds
        self._seen = now
        if self._credit > 0:
            return 0.0
        self._credit = 0.0
        # `SHARE` is for all that wait, so each waits longer by those beside it.
        sharers = 1 if alone else self.share.waiting + 1
        self.until = max(self.until, now) + seconds * sharers / SHARE
        return self.until - now
