"""The limits of a server, and the count of what it has admitted within them."""

from __future__ import annotations

import dataclasses
from typing import Any

from bridge.core.worlds.environment import CALL_TIMEOUT
from bridge.errors import Code, RequestError, SettingError

__all__ = ["Admission", "ConnectionCount", "CoreLimits", "check_drain_timeout", "checked_limits"]


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
