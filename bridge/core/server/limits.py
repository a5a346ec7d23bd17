"""The limits of a server, the counts of what it has admitted within them, and each connection's processor time.

A server is there for requests, and serves them as they come. All other data of a client (pings, settings, header
blocks, resets, frames without effect) costs the client nothing and the server something. Each connection may use a
little processor time for it at once, and all connections together a fixed share of the time. A connection that used
more is read later, and in smaller pieces; none is closed for it. A request in the same turn does not make other data
free: a request is worth the time that requests have been seen to take on this machine, and the rest of the turn is
charged.

The shares are of the time that the server gets. Beside other programs that may be a third of a core: otherwise
attackers on the same machine, or a training loop, would leave the server no time for requests.
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
"""The least `max_world_bytes`: with less no process can start, whatever its environment."""


@dataclasses.dataclass(frozen=True)
class CoreLimits:
    """The limits of a server. Users give `bridge.Limits`, which has further fields.

    A request beyond a limit is refused with an error that names the limit, and has no other effect.

    Args:
        max_connections: The most connections at a time, not counting those of viewers.
        max_viewers: The most connections at a time of clients with the watch token.
        max_worlds: The most worlds that clients use at a time, including the default world; 0: there is only the
            default world, which all clients join.
        max_lanes: The most lanes in a world that a client may request.
        max_message_bytes: The largest request or response, in bytes.
        max_requests_in_flight: The most requests served at a time, over all connections.
        max_queued_bytes: The most bytes of requests and responses held at a time, over all connections.
        call_timeout: With isolation, the seconds that one call of an environment, or its construction, may take before
            its process is killed; None: no limit.
        max_world_bytes: With isolation, the bytes that a world's process may allocate, on systems that can limit it;
            None: no limit.
        idle_timeout: Seconds after which a world without agents is destroyed; None: never.
        abandoned_timeout: Seconds after which a world whose creator has gone is destroyed; None: `idle_timeout`.
        reset_world_timeout: Seconds that ResetWorld waits for the next Steps of the world's other agents.
        drain_timeout: Seconds that clients have to leave after SIGTERM or `Server.drain()`. If slots must move to other
            servers without losing an episode, no less than the longest episode.
        hello_timeout: Seconds that a client has to begin to speak, including the TLS handshake.

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
            may_be_zero = field.name == "max_worlds"  # there is only the default world
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
        """Return the limits that every server has, by name, for clients to read."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.type == "int"}


def check_drain_timeout(seconds: Any, name: str = "drain_timeout") -> None:
    """Raise SettingError if the value is no valid number of seconds."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise SettingError(f"expected {name} to be a number of seconds, 0 or more, got {seconds!r}")


class ConnectionCount:
    """Counts the connections of a server over all its transports, and admits no more than a limit.

    Only the event loop changes the count; any thread may read it.

    Args:
        limit: The most connections at a time.
        name: The name of the limit, for messages.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self.value = 0
        """The number of open connections."""

    @property
    def full(self) -> bool:
        """True if no more connections are accepted."""
        return self.value >= self._limit

    def enter(self) -> None:
        """Admit a connection.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many.
        """
        if self.full:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"this server has {self._name}={self._limit} connections already; close one, or start another server",
            )
        self.value += 1

    def leave(self) -> None:
        """Note that a connection ended."""
        self.value -= 1


def checked_limits(limits: Any) -> CoreLimits:
    """Return the keyword `limits`; raise SettingError if it has another type."""
    if limits is not None and not isinstance(limits, CoreLimits):
        raise SettingError(f"expected limits to be bridge.Limits(…), got a {type(limits).__name__}")
    return limits or CoreLimits()


class Admission:
    """Counts the requests being served and the bytes of requests and answers, and refuses requests beyond the limits.

    The code that serves a request changes `requests` and `bytes` directly, which saves a call in every step.

    Args:
        limits: `max_requests_in_flight` and `max_queued_bytes`.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.max_requests, self.max_bytes = limits.max_requests_in_flight, limits.max_queued_bytes
        self.requests = 0
        """The requests being served, including those that wait for other agents or for a clock."""
        self.bytes = 0
        """The bytes of those requests, of large requests being received, and of unsent answers."""

    def check(self, size: int) -> None:
        """Check whether a request of `size` bytes may be served.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many requests, or they take too much memory.
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
"""Seconds that all connections together may use per second, in equal parts, in addition."""
SHARE = 0.1
"""The share of the time for all connections that have used more than that."""
MESSAGE_SHARE = 0.5
"""The same share for messages of features. A client that makes others wait leaves them the server for as long."""
# A turn may take this many times the fastest request, for each of its requests or blocks of a large one, without being
# examined.
_USUAL = 8
# Seconds that any turn may take without being examined.
_SHORT = 2e-4
# The most seconds of a turn that one byte can explain: the system gave the rest to other programs.
_PER_BYTE = 1e-6
# The seconds of turns over which the server's speed is averaged, and the least speed that is assumed.
_MEMORY = 0.2
_LEAST_SPEED = 0.1
# Seconds that a request is assumed to need before one has arrived: a few times those of a fast machine. With a larger
# value, all data before the first request would be free.
_FIRST = 5e-5
# A clock that shows less is not reliable.
_LEAST = 2e-6
_BLOCK = 4096


class FairShare:
    """The state that all connections of a server share."""

    def __init__(self) -> None:
        self.fastest = _FIRST
        """The shortest time in seconds in which a request was received. It never increases."""
        self.usual = _FIRST * _USUAL
        """Seconds that a turn with one request may take without being examined."""
        self.connections = 0
        """The number of connections."""
        self.charged = {"client": 0.0, "viewer": 0.0, "stranger": 0.0}
        """The seconds charged to connections, by the role of their clients."""
        self.waiting = 0
        """The number of connections that wait until they are read again."""
        self.speed = 1.0
        """The processor time that the server gets per second in which it has something to do."""
        self.visits = ProcessorAccount(self, 0.0)
        """Charged for all connections that came and went without a call. Each by itself is too short to be slowed."""

    @property
    def worth(self) -> float:
        """Seconds of a turn that are not charged, for each of its requests."""
        return 2 * self.fastest

    def note_turn(self, seconds: float, lasted: float) -> None:
        """Note the processor time of a turn, and how long the turn lasted."""
        # Weighted by time, not by turns, so that one long pause has little effect.
        speed = (self.speed * _MEMORY + seconds) / (_MEMORY + lasted)
        self.speed = min(1.0, max(_LEAST_SPEED, speed))

    def note_fastest(self, seconds: float) -> None:
        """Note that a request was received in less time than any before."""
        self.fastest = max(seconds, _LEAST)
        self.usual = max(_SHORT, self.fastest * _USUAL)


class ProcessorAccount:
    """Counts the processor time of one connection. `now` is in seconds, monotonic.

    Args:
        share: The state that the server's connections share.
        now: The time.
    """

    __slots__ = ("_credit", "_seen", "excess", "probed", "productive", "share", "spent", "timer", "until")

    def __init__(self, share: FairShare, now: float) -> None:
        self.share = share
        # Enough for a greeting, which took 0.4 ms when it was measured (0.9 ms with TLS), also on a slower machine. Not
        # a whole burst, because a client could get another one by each new connection.
        self._credit = BURST / 4
        self._seen = now
        self.productive = False
        """True if the last data of the connection were requests and little else: the next turn is not measured."""
        self.excess = 0.0
        """Seconds to charge for a turn that was not measured, but took longer than its requests explain."""
        self.spent = 0.0
        """Seconds used since the connection was accepted, as far as they were measured."""
        self.timer: Timer | None = None
        """Starts reading again, if the connection has used too much; None: it is being read."""
        self.until = now
        """The time at which the connection is to be read again."""
        self.probed = now
        """The time at which its client was last sent a ping, to detect whether it has closed."""

    def judge(self, seconds: float, size: int, requests: int, *, receives_large: bool) -> None:
        """Examine a turn that took long, or in which not exactly one request arrived.

        Args:
            seconds: The duration of the turn, by a clock that runs on while other programs do.
            size: The bytes received.
            requests: The number of requests that they completed.
            receives_large: True if a large request is being received.
        """
        share = self.share
        # A large request takes many turns that complete none. Its blocks count as requests, otherwise receiving it
        # would be charged.
        blocks = 1 + size // _BLOCK if receives_large else 0
        self.productive = requests + blocks > 0 and seconds <= max(_SHORT, share.fastest * _USUAL * (requests + blocks))
        self.excess = max(0.0, min(seconds, size * _PER_BYTE) - requests * share.worth)

    def charge(self, seconds: float, now: float, *, share: float = SHARE, alone: bool = False) -> float:
        """Charge processor time that completed no request; return the seconds for which reading must pause.

        Time that is charged during the pause, as for requests that came together, extends it.

        Args:
            seconds: The processor time.
            now: The time.
            share: The share of the time that the connection may use.
            alone: True if the account has that share for itself, and does not divide it with others that wait.
        """
        self.spent += seconds
        # If the server gets half of a core, a second of its processor time takes two.
        seconds /= self.share.speed
        refill = REFILL / max(2, self.share.connections)
        self._credit = min(BURST, self._credit + (now - self._seen) * refill) - seconds
        self._seen = now
        if self._credit > 0:
            return 0.0
        self._credit = 0.0
        # All waiting connections divide the share, so each waits longer the more there are.
        sharers = 1 if alone else self.share.waiting + 1
        self.until = max(self.until, now) + seconds * sharers / share
        return self.until - now
