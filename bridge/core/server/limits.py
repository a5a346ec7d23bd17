"""The limits of a server, the count of what it has admitted within them, and each connection's share of processor time.

Requests are what a server is for, and are served as they come. Everything else that a client can send (pings, settings,
header blocks, resets, frames of no meaning) costs it nothing and this server something: each connection may use a
little of that at once, and all of them together a fixed share of the time. Who uses more is read later, and in smaller
pieces; nobody is cut for it. A request beside such bytes does not make them free: it is worth what a request has been
seen to take on this machine, and the rest of the turn is charged.

The shares are of the time that the server gets. Beside other programs that may be a third of a core: attackers on the
same machine, or a training loop, would else leave it no time for requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bridge.core.worlds.environment import CALL_TIMEOUT
from bridge.core.worlds.scheduling import Timer
from bridge.errors import Code, RequestError, SettingError

__all__ = [
    "Admission",
    "ConnectionCount",
    "CoreLimits",
    "FairShare",
    "ProcessorAccount",
    "check_drain_timeout",
    "checked_limits",
]


_LEAST_WORLD = 32 * 2**20
"""The least `max_world_bytes`: with less no process starts, whatever its environment is."""


@dataclasses.dataclass(frozen=True)
class CoreLimits:
    """The limits of a server. Users give `bridge.Limits`, which has further fields.

    A request beyond a limit is refused with an error that names the limit; nothing else is changed by it.

    Args:
        max_connections: The most connections at a time, those of viewers apart.
        max_viewers: The most connections at a time of clients that the watch token let in.
        max_worlds: The most worlds that clients use at a time, the default world included; 0: there is the default
            world alone, which all of them join.
        max_lanes: The most lanes in a world that a client may ask for.
        max_message_bytes: The largest request or response, in bytes.
        max_requests_in_flight: The most requests served at a time, over all connections.
        max_queued_bytes: The most bytes of requests and responses held at a time, over all connections.
        call_timeout: With isolation, the seconds that one call of an environment, or its construction, may take before
            its process is ended; None: no limit.
        max_world_bytes: With isolation, the bytes that a world's process may allocate, where the system can limit it;
            None: no limit.
        idle_timeout: Seconds after which a world without agents is destroyed; None: never.
        abandoned_timeout: Seconds after which a world whose creator has gone is destroyed; None: as `idle_timeout`.
        reset_world_timeout: Seconds that ResetWorld waits for the next Steps of the world's other agents.
        drain_timeout: Seconds that clients have to leave after SIGTERM or `Server.drain()`: no less than the longest
            episode, where slots are to move to other servers without a cut.
        hello_timeout: Seconds that a client has to begin to speak, the TLS handshake included.

    Raises:
        SettingError: A value is out of its range.
    """

    max_connections: int = 256
    max_viewers: int = 256
    max_worlds: int = 256
    max_lanes: int = 4096
    max_message_bytes: int = 512 * 1024 * 1024
    max_requests_in_flight: int = 256
    max_queued_bytes: int = 2 * 1024 * 1024 * 1024
    call_timeout: float | None = CALL_TIMEOUT
    max_world_bytes: int | None = None
    idle_timeout: float | None = 3600.0
    abandoned_timeout: float | None = 60.0
    reset_world_timeout: float = 60.0
    drain_timeout: float = 2.0
    hello_timeout: float = 10.0

    def __post_init__(self) -> None:
        check_drain_timeout(self.drain_timeout)
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if field.name == "drain_timeout" or ("None" in kind and value is None):
                continue
            wanted, types = ("integer", int) if kind.startswith("int") else ("number of seconds", (int, float))
            fits = isinstance(value, types) and not isinstance(value, bool)
            may_be_zero = field.name == "max_worlds"  # the default world alone
            if not fits or not (value > 0 or (may_be_zero and value == 0)):
                sign = "non-negative" if may_be_zero else "positive"
                or_none = ", or None" if "None" in kind else ""
                raise SettingError(f"expected {field.name} to be a {sign} {wanted}{or_none}, got {value!r}")

        if self.max_world_bytes is not None and self.max_world_bytes < _LEAST_WORLD:
            raise SettingError(
                f"expected max_world_bytes to be bytes, {_LEAST_WORLD} (32 MiB) or more, as Python and NumPy alone "
                f"take that much, got {self.max_world_bytes}"
            )

    def counts(self) -> dict[str, int]:
        """Return those that every server has, by name: what clients can read of them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.type == "int"}


def check_drain_timeout(seconds: Any, name: str = "drain_timeout") -> None:
    """Raise SettingError where it is no number of seconds."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise SettingError(f"expected {name} to be a number of seconds, 0 or more, got {seconds!r}")


class ConnectionCount:
    """Counts the connections of a server over all its transports, and admits no more than a limit.

    The event loop alone changes it; any thread may read it.

    Args:
        limit: The most at a time.
        name: The limit's, for messages.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self.value = 0
        """The number of open connections."""

    @property
    def full(self) -> bool:
        """True if there are as many as there may be."""
        return self.value >= self._limit

    def enter(self) -> None:
        """Admit a connection.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are as many as there may be.
        """
        if self.full:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"this server has {self._name}={self._limit} connections already; close one, or start another server",
            )
        self.value += 1

    def leave(self) -> None:
        """Take note that a connection ended."""
        self.value -= 1


def checked_limits(limits: Any) -> CoreLimits:
    """Return the keyword `limits`, or raise SettingError where it is something else."""
    if limits is not None and not isinstance(limits, CoreLimits):
        raise SettingError(f"expected limits to be bridge.Limits(…), got a {type(limits).__name__}")
    return limits or CoreLimits()


class Admission:
    """Counts the requests being served and the bytes of requests and answers, and refuses requests beyond the limits.

    Whoever serves a request adds to `requests` and `bytes` while it does: in each step a call of a method less.

    Args:
        limits: `max_requests_in_flight` and `max_queued_bytes`.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.max_requests, self.max_bytes = limits.max_requests_in_flight, limits.max_queued_bytes
        self.requests = 0
        """The requests that are being served, those that wait for other agents or for a clock too."""
        self.bytes = 0
        """The bytes of those requests, of large ones that are being received, and of answers that were not sent yet."""

    def check(self, size: int) -> None:
        """Check whether a request of `size` bytes may be served.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many, or they take too much.
        """
        if self.requests >= self.max_requests:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"this server serves max_requests_in_flight={self.max_requests} requests already; "
                "send it again later, or start another server",
            )
        if self.bytes + size > self.max_bytes:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"with this request of {size} bytes, requests and answers would take {self.bytes + size} bytes, "
                f"more than max_queued_bytes={self.max_bytes}; send it again later",
            )


BURST = 0.01
"""Seconds that a connection may use at once."""
REFILL = 0.05
"""Seconds that all connections together may use a second, beyond those, in equal parts."""
SHARE = 0.1
"""The share of the time that all connections together may use which have used more than that."""
MESSAGE_SHARE = 0.5
"""As `SHARE`, for messages that features serve: a client that has others wait leaves them the server for as long."""
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

    def charge(self, seconds: float, now: float, *, share: float = SHARE, alone: bool = False) -> float:
        """Count processor time that completed no request; return the seconds for which it is not to be read.

        What is charged while it is not read, as for requests that came together, adds to these seconds.

        Args:
            seconds: What it took.
            now: The time.
            share: The share of the time that it may use.
            alone: Whether the account has that share for itself, and divides none with others that wait.
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
        # The share is for all that wait, so each waits longer by those beside it.
        sharers = 1 if alone else self.share.waiting + 1
        self.until = max(self.until, now) + seconds * sharers / share
        return self.until - now
