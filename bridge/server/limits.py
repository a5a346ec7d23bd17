"""The limits of a server."""

from __future__ import annotations

import dataclasses
import threading

from bridge.errors import Code, RequestError, SettingError

__all__ = ["ConnectionCount", "Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server; beyond one it answers RESOURCE_EXHAUSTED with the limit's name."""

    max_connections: int = 256
    """Connections at a time."""
    max_worlds: int = 256
    """Worlds at a time, the default world apart."""
    max_lanes: int = 4096
    """Lanes in a world."""
    max_message_bytes: int = 512 * 1024 * 1024
    """Bytes in a request or response."""
    max_requests_in_flight: int = 256
    """Requests being served at a time, over all connections."""
    max_queued_bytes: int = 2 * 1024 * 1024 * 1024
    """Bytes of requests being served and of responses being sent at a time, over all connections."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SettingError(f"expected {field.name} to be a positive integer, got {value!r}")


class ConnectionCount:
    """Counts the connections of a server over all its transports, and admits no more than a limit."""

    def __init__(self, max_connections: int) -> None:
        self._limit = max_connections
        self._guard = threading.Lock()
        self._value = 0

    @property
    def value(self) -> int:
        """The number of open connections."""
        with self._guard:
            return self._value

    def enter(self) -> None:
        """Admit a connection.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are as many as there may be.
        """
        with self._guard:
            if self._value >= self._limit:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"this server has max_connections={self._limit} connections already; "
                    "close one, or start another server",
                )
            self._value += 1

    def leave(self) -> None:
        """Take note that a connection ended."""
        with self._guard:
            self._value -= 1
