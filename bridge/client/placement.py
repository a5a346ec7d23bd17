"""On which endpoint of a directory each world of a vector environment is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bridge.client.endpoints import Endpoint, EndpointWatch
from bridge.client.members import Member
from bridge.client.world_request import WorldRequest
from bridge.errors import SettingError, shown_url

__all__ = ["Load", "Placement"]


class Load:
    """What endpoints carry now.

    Args:
        members: The worlds that have a place.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.slots: Counter[str] = Counter()
        """The number of slots on each endpoint, by its key."""
        self.draining: set[str] = set()
        """The URLs of servers that have said that they take no further worlds."""
        for member in members:
            if member.endpoint is not None:
                self.slots[member.endpoint] += member.lanes
                if member.remote.draining:
                    self.draining.add(member.remote.url)


class Placement:
    """Chooses endpoints: the one with the fewest slots first, of those that have not just failed.

    Args:
        watch: Knows the endpoints.
        request_for: Makes the request for a world at a URL.
    """

    def __init__(self, watch: EndpointWatch, request_for: Callable[[str], WorldRequest]) -> None:
        self.watch = watch
        self.request_for = request_for
        self._failures: Counter[str] = Counter()
        self._avoid_until: dict[str, float] = {}

    def choose(self, load: Load, lanes: int, now: float) -> Endpoint | None:
        """Return where a world may go now, and count it in `load`; None: nowhere.

        Args:
            load: Of the worlds that have a place.
            lanes: The slots that the world fills.
            now: Monotonic seconds.
        """
        slots, draining, avoid_until = load.slots, load.draining, self._avoid_until
        best: Endpoint | None = None
        for endpoint in self.watch.endpoints:
            key = endpoint.key
            if endpoint.draining or avoid_until.get(key, now) > now:
                continue
            if draining and shown_url(endpoint.url) in draining:
                continue
            if endpoint.slots is not None and slots[key] + lanes > endpoint.slots:
                continue
            if best is None or slots[key] < slots[best.key]:
                best = endpoint
        if best is not None:
            slots[best.key] += lanes
        return best

    def has_failed(self, key: str | None) -> bool:
        """Tell whether the last attempt at an endpoint failed."""
        return key in self._failures

    def is_draining(self, key: str | None) -> bool:
        """Tell whether the directory says that an endpoint takes no further worlds."""
        return key is not None and key in self.watch.draining

    def check_room(self, num_envs: int) -> None:
        """Raise SettingError where the endpoints say that they cannot carry so many slots."""
        slots = [endpoint.slots for endpoint in self.watch.endpoints if not endpoint.draining]
        room = sum(number for number in slots if number is not None)
        if None not in slots and room < num_envs:
            raise SettingError(
                f"expected endpoints with room for num_envs={num_envs} slots, got room for {room} on {len(slots)} of "
                f"{self.watch.directory!r}; start more servers, or ask for fewer slots"
            )

    def failed(self, key: str, now: float, pause: Callable[[int], float]) -> None:
        """Avoid an endpoint for a while; `pause` gives the seconds for the number of failures in a row."""
        self._failures[key] += 1
        self._avoid_until[key] = now + pause(self._failures[key])

    def succeeded(self, key: str) -> None:
        """Take note that a world of an endpoint answers."""
        if self._failures.pop(key, 0):
            self._avoid_until.pop(key, None)
