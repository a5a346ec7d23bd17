"""When a client asks a server that has been quiet for a sign of life, and when it gives the server up."""

from __future__ import annotations

from bridge.transport import keepalive

__all__ = ["ClientKeepalive", "patience"]


def patience() -> float:
    """Return the seconds that a server has for a sign."""
    return keepalive.KEEPALIVE / 2


class ClientKeepalive:
    """The signs of life of one connection.

    Args:
        now: The time, monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.heard = now
        """When something came last, or when the connection was made."""
        self.silent = True
        """True if not a byte has come yet."""
        self._asked: float | None = None

    @property
    def _waits(self) -> bool:
        return self._asked is not None and self.heard < self._asked

    def is_late(self, now: float) -> bool:
        """True if a sign that was asked for has not come in time."""
        return self._asked is not None and self._waits and now - self._asked > patience()

    def asks(self, now: float, interval: float) -> bool:
        """Return whether to ask for a sign now, after `interval` quiet seconds; it is waited for from then on."""
        if self._waits or now - self.heard <= interval:
            return False
        self._asked = now
        return True
