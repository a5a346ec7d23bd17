"""What a server has in hand at a time, over all its connections: requests being served, and bytes that wait."""

from __future__ import annotations

import threading

from bridge.errors import Code, RequestError
from bridge.server.limits import Limits

__all__ = ["Flight"]


class Flight:
    """Counts requests in flight and the bytes that they and their answers take, and refuses those that are too many.

    Args:
        limits: `max_requests_in_flight` and `max_queued_bytes`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._guard = threading.Lock()
        self._requests = 0
        self._bytes = 0
        self.room = limits.max_queued_bytes
        """The bytes that a further request may have, to be looked at without a lock; negative: there may be none."""

    @property
    def requests(self) -> int:
        """The requests that are being served, or wait in the queue of their connection's own thread."""
        with self._guard:
            return self._requests

    @property
    def bytes(self) -> int:
        """The bytes of those requests, of large ones that are being received, and of answers that were not sent yet."""
        with self._guard:
            return self._bytes

    def _count(self, requests: int, size: int) -> None:
        self._requests += requests
        self._bytes += size
        full = self._requests >= self._limits.max_requests_in_flight
        self.room = -1 if full else self._limits.max_queued_bytes - self._bytes

    def _check(self, size: int) -> None:
        limits = self._limits
        if self._requests >= limits.max_requests_in_flight:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"this server serves max_requests_in_flight={limits.max_requests_in_flight} requests already; "
                "send it again later, or start another server",
            )
        if self._bytes + size > limits.max_queued_bytes:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"with this request of {size} bytes, requests and answers would take {self._bytes + size} bytes, "
                f"more than max_queued_bytes={limits.max_queued_bytes}; send it again later",
            )

    def check(self, size: int) -> None:
        """Raise RequestError, RESOURCE_EXHAUSTED, where a request of `size` bytes would be one too many."""
        with self._guard:
            self._check(size)

    def enter(self, size: int) -> None:
        """Count a request of `size` bytes until `leave`.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many, or they take too much; nothing was done.
        """
        with self._guard:
            self._check(size)
            self._count(1, size)

    def hold_up(self, size: int) -> None:
        """Count a request that is being served and was not counted, until `leave`. It is never refused."""
        with self._guard:
            self._count(1, size)

    def leave(self, size: int) -> None:
        """Take note that a request of `size` bytes was served."""
        with self._guard:
            self._count(-1, -size)

    def hold(self, size: int) -> None:
        """Count bytes that wait, fewer where `size` is negative. They are never refused."""
        with self._guard:
            self._count(0, size)

    def reserve(self, size: int) -> None:
        """Count the bytes of a request that is being received, or raise as `enter`; `hold(-size)` ends it."""
        with self._guard:
            self._check(size)
            self._count(0, size)
