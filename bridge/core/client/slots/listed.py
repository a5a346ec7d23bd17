"""A list of URLs as a directory that never changes: slots are pinned to its endpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from bridge.core.client.endpoints import Endpoint, Kind
from bridge.core.client.world.world_request import WorldRequest

__all__ = ["ListedEndpoint", "ListedEndpoints"]


@dataclasses.dataclass(frozen=True)
class ListedEndpoint(Endpoint):
    """A URL of a list, with what is asked for there."""

    request: WorldRequest = dataclasses.field(kw_only=True, repr=False)
    """The world, for each slot that is pinned to it."""

    @classmethod
    def of(cls, request: WorldRequest) -> ListedEndpoint:
        """Return the endpoint of a request."""
        url, agent = request.address.url, request.agent
        # Agents of one world have a URL in common, and each joins it by itself.
        return cls(url, "" if agent is None else f"{url} as {agent}", request=request)

    @functools.cached_property
    def kind(self) -> Kind:
        """The environment, settings and agent; only endpoints of one kind replace each other."""
        # A world that exists already is in one place: nothing else is of its kind.
        return self.request.kind or ("world", self.key)


class ListedEndpoints:
    """The endpoints of a list of URLs, as `EndpointWatch` has those of a directory.

    Args:
        endpoints: One for each URL.
    """

    title = "the list of URLs"
    """What has them, for errors."""
    pinned = True
    """True: each slot belongs to one of them."""
    draining: frozenset[str] = frozenset()
    """The keys of those that take no further worlds: a list does not say."""

    def __init__(self, endpoints: Sequence[ListedEndpoint]) -> None:
        self.endpoints = tuple({endpoint.key: endpoint for endpoint in endpoints}.values())
        """The endpoints, each once, in the order of the list."""

    def poll(self, now: float, *, soon: bool = False) -> None:
        """Do nothing: a list never changes."""
