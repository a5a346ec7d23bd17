"""On which endpoint of a directory each world of a vector environment is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bridge.client.endpoints import Endpoint, EndpointWatch
from bridge.client.members import Member
from bridge.client.world_request import WorldRequest
from bridge.errors import SettingError

__all__ = ["Placement"]


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

    def choose(self, members: Sequence[Member], lanes: int, now: float) -> Endpoint | None:
        """Return where a world may go now; None: nowhere.

        Args:
            members: The worlds that have a place.
            lanes: The slots that the world fills.
            now: Monotonic seconds.
        """
        load = self._load(members)
        free = [
            endpoint
            for endpoint in self.watch.endpoints
            if not endpoint.draining
            and self._avoid_until.get(endpoint.key, now) <= now
            and (endpoint.slots is None or load[endpoint.key] + lanes <= endpoint.slots)
        ]
        return min(free, key=lambda endpoint: load[endpoint.key], default=None)

    def _load(self, members: Sequence[Member]) -> Counter[str]:
        load: Counter[str] = Counter()
        for member in members:
            if member.endpoint is not None:
                load[member.endpoint] += member.lanes
        return load

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
