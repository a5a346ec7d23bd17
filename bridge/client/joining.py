"""How a vector environment joins its worlds at first: of a list of URLs, or of a directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bridge.client.endpoints import Endpoint
from bridge.client.events import Joined, Lost
from bridge.client.slots.placement import Load, Placement
from bridge.client.slots.policy import Connect
from bridge.client.slots.slot import Member
from bridge.client.vector_pool import VectorPool
from bridge.client.world_request import WorldRequest
from bridge.errors import RemoteError, SettingError
from bridge.progress import LOOK, tell

__all__ = ["join_directory", "join_urls"]


def join_urls(pool: VectorPool, requests: Sequence[WorldRequest], num_envs: int | None) -> None:
    """Join a world for each request, all at once, and further ones where `num_envs` asks for more slots.

    Raises:
        SettingError: The worlds differ in their spaces, or do not add up to `num_envs`.
        RemoteError: One cannot be joined.
    """
    _check_number(num_envs)
    places = {(request.address.scheme, request.address.target) for request in requests}
    pool.shared = len(places) < max(len(requests), num_envs or 0)
    _join(pool, requests)
    if num_envs is None:
        return
    have = pool.num_envs
    if have < num_envs and (num_envs - have) % have == 0:
        _join(pool, list(requests) * ((num_envs - have) // have))
    elif have != num_envs:
        lanes = ", ".join(f"{member.remote.url} ({member.lanes})" for member in pool.members)
        raise SettingError(
            f"num_envs={num_envs} is no multiple of the {have} slots that the URLs give: {lanes}. "
            "A world of N lanes fills N slots"
        )


def _join(pool: VectorPool, requests: Sequence[WorldRequest]) -> None:
    new = [pool.add_member(request) for request in requests]
    pool.wait_for_all([member.remote for member in new], Joined, "to join a world")
    for member in new:
        pool.joined(member)
    pool.place_members()


def join_directory(pool: VectorPool, placement: Placement, num_envs: int | None) -> None:
    """Join worlds spread over the endpoints of a directory.

    Args:
        pool: Gets them.
        placement: Chooses the endpoints.
        num_envs: The number of slots; None: a world for each endpoint.

    Raises:
        SettingError: The endpoints have too little room, or `num_envs` is no multiple of a world's lanes.
        RemoteError: No endpoint can be joined.
    """
    _check_number(num_envs)
    pool.policy.placement = placement
    count = len(placement.watch.wait(time.monotonic(), pool.timeout))
    if num_envs is not None:
        placement.check_room(num_envs)
        pool.shared = num_envs > count
    _join_endpoints(pool, placement, 1)
    lanes = pool.members[0].lanes
    if num_envs is not None:
        count, rest = divmod(num_envs, lanes)
        if rest:
            raise SettingError(f"num_envs={num_envs} is no multiple of the {lanes} lanes of each world")
    _join_endpoints(pool, placement, count - 1)


def _join_endpoints(pool: VectorPool, placement: Placement, count: int) -> None:
    """Join so many further worlds, each at an endpoint that takes it."""
    deadline = time.monotonic() + pool.timeout
    lanes = pool.members[0].lanes if pool.members else 1
    missing: dict[Member, None] = {}
    load = Load(pool.members)
    for _ in range(count):
        endpoint = _require_endpoint(pool, placement, load, lanes, None)
        missing[pool.add_member(placement.request_for(endpoint.url), lanes, endpoint.key)] = None
    while missing:
        event, source = pool.next_event(min(deadline, time.monotonic() + LOOK))
        if source is None and time.monotonic() < deadline:
            tell(f"waiting for {next(iter(missing)).remote.url}; {count - len(missing)} of {count} worlds joined")
            continue
        if source is None:
            raise next(iter(missing)).remote.late("to join a world", pool.timeout)
        if source not in missing:
            if event is not None:
                pool.handle(event, source)
        elif isinstance(event, Joined):
            pool.joined(source)
            del missing[source]
        elif isinstance(event, Lost):
            pool.lose(source, event)
            load = Load([member for member in pool.members if member is not source])
            pool.execute([Connect(source, _require_endpoint(pool, placement, load, lanes, event.error))])
    pool.place_members()


def _require_endpoint(
    pool: VectorPool, placement: Placement, load: Load, lanes: int, error: RemoteError | None
) -> Endpoint:
    endpoint = placement.choose(load, lanes, time.monotonic(), pool.timeout)
    if endpoint is not None:
        return endpoint
    if error is not None:
        raise error
    raise SettingError(
        f"no endpoint of {placement.watch.directory!r} has room for another world, after {len(pool.members)} worlds"
    )


def _check_number(num_envs: Any) -> None:
    if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1):
        raise SettingError(f"expected num_envs to be a positive integer, got {num_envs!r}")
