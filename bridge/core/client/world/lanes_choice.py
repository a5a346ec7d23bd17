"""Whether one world of lanes stands in for a world for each slot.

One message steps a world of N lanes, which is faster than N worlds. Where whoever steps them waits for all of them
anyway, and the server runs its worlds one after the other, nothing else tells the two forms apart. `choose_lanes` looks
at the call, before anything is connected; `LanesQuestion` at the server, before a world is made. A user's `lanes=True`
or `lanes=False` decides it without either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bridge.core.client.world.extensions import property_request, property_value
from bridge.core.client.world.world_request import WorldRequest
from bridge.errors import PeerError, RefusedError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["LanesQuestion", "choose_lanes"]

# Of a server: the most lanes that are as good as worlds.
_PROPERTY = "server.lanes"


def choose_lanes(
    asked: bool | None,
    num_envs: int | None,
    requests: Sequence[WorldRequest],
    *,
    directory: bool,
    spares: bool,
    waits_for_all: bool,
) -> WorldRequest | None:
    """Return the request of one world for all slots; None: each slot, or each URL, has a world.

    Args:
        asked: The keyword `lanes`: True and False as they say; None: lanes where nothing but speed is changed by them.
        num_envs: The number of slots; None: the user has said none.
        requests: The worlds that the URLs ask for.
        directory: Whether a directory has the URLs.
        spares: Whether worlds are to stand by.
        waits_for_all: Whether whoever steps the slots waits for all of them.

    Returns:
        With True a request for lanes, which the server may refuse; with None one whose `lanes_if_alike` has the
        session ask the server first.

    Raises:
        SettingError: With True: there cannot be one world for all slots.
    """
    if asked is False or (asked is None and not waits_for_all):
        return None
    obstacle = _obstacle(num_envs, requests, directory)
    if asked and obstacle:
        raise SettingError(f"lanes=True asks for one world with num_envs lanes, but {obstacle}")
    if obstacle or num_envs is None or num_envs == 1:
        return None
    if asked:
        return requests[0].as_lanes(num_envs)
    # A spare of a world is no spare of lanes. A mode of the URL says how a world of its own is to be stepped.
    if spares or "vectorization_mode" in dict(requests[0].address.settings):
        return None
    return dataclasses.replace(requests[0], lanes_if_alike=num_envs)


def _obstacle(num_envs: int | None, requests: Sequence[WorldRequest], directory: bool) -> str | None:
    """Return why there cannot be one world for all slots, and what to do; None: there can be."""
    if directory:
        return "a directory spreads worlds over its servers: leave lanes out, or give the URL of one server"
    if len(requests) > 1:
        return f"there are {len(requests)} worlds to join, one by one: leave lanes out, or give one URL"
    (request,) = requests
    if request.address.world is not None:
        return f"{request.address.url!r} joins a world that exists, with the lanes that it has: leave lanes out"
    if request.agent is not None:
        return f"agent={request.agent!r} is one of several in a world: leave lanes out"
    if "num_envs" in dict(request.address.settings):
        return f"{request.address.url!r} gives num_envs already: leave it out there, or leave lanes out"
    if num_envs is None:
        return "num_envs was not given: give it too"
    return None


class LanesQuestion:
    """What a server is asked before a world is made: whether so many lanes are as good as worlds.

    Args:
        count: The number of lanes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._identified = False
        self.agreed = False
        """True once the server has said so."""

    def first(self) -> pb.EnvironmentRequest:
        """Return the first request, by whose answer a server of ours is known.

        Other servers are asked for no property: they may not bear an extension. To leave a world that was not joined
        does nothing, at any server (D-16).
        """
        return pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest())

    def following(
        self, message: pb.EnvironmentResponse, error: RefusedError | None, version: str | None, url: str
    ) -> pb.EnvironmentRequest | None:
        """Return the request that follows an answer; None: nothing more is to be asked.

        Args:
            message: The answer.
            error: Its text, if it is a refusal.
            version: The version of a server of this package; None: another server.
            url: The server's, for errors.
        """
        if not self._identified:
            self._identified = True
            return None if version is None else property_request(_PROPERTY)
        # An older server of ours refuses, for it has no such property.
        if error is None:
            try:
                most: Any = property_value(message, url, encoded=False)
                self.agreed = bool(most >= self._count)
            except (PeerError, TypeError, ValueError):
                pass  # no number: then it has not said so
        return None
