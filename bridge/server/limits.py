"""How much one server gives, each limit with its name."""

from __future__ import annotations

import dataclasses

from bridge.errors import SettingError

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server refuses beyond, with RESOURCE_EXHAUSTED and the limit's name."""

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
