"""CoreLimits on the requests and bytes that a server handles at a time, over all connections."""

from __future__ import annotations

from bridge.core.server.limits import CoreLimits
from bridge.errors import Code, RequestError

__all__ = ["Admission"]


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
