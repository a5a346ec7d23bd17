"""What a server has in hand at a time, over all its connections: requests being served, and bytes that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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

    @property
    def requests(self) -> int:
        """The requests that are being served."""
        with self._guard:
            return self._requests

    @property
    def bytes(self) -> int:
        """The bytes of those requests, and of answers that were not sent yet."""
        with self._guard:
            return self._bytes

    @contextmanager
    def request(self, size: int) -> Iterator[None]:
        """Count a request of `size` bytes while it is served.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: there are too many, or they take too much; nothing was done.
        """
        limits = self._limits
        with self._guard:
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
            self._requests += 1
            self._bytes += size
        try:
            yield
        finally:
            with self._guard:
                self._requests -= 1
                self._bytes -= size

    @contextmanager
    def answer(self, size: int) -> Iterator[None]:
        """Count an answer of `size` bytes until it is sent. It is never refused: what it tells has happened."""
        with self._guard:
            self._bytes += size
        try:
            yield
        finally:
            with self._guard:
                self._bytes -= size
