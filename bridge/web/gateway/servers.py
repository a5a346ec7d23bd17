"""The servers behind a gateway: their lists of worlds, and calls to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from bridge.core.client.world.extensions import property_request
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.server.calls import ServedSession
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.web.gateway.loop_poller import LoopPoller
from bridge.web.gateway.relay import Relay

__all__ = ["OVERVIEW", "EnvServer", "PublishedServer", "world_entry"]

OVERVIEW = "server.web"
"""The property with a server's worlds. A gateway answers it itself, with all worlds of all servers."""
# Seconds after which a list of worlds is outdated; people in a match watch a countdown.
_EVERY = 0.5
_EVERY_IN_MATCH = 0.1
_TIMEOUT = 5.0


class PublishedServer(Protocol):
    """A server whose worlds a gateway shows."""

    name: str
    """The prefix of its worlds' names."""
    settled: PendingResult[None]
    """Set when the server has answered, or failed to, since it was added or changed."""

    def look(self, now: float) -> None:
        """Request the list of worlds if the last one is outdated; do not wait."""

    def changed(self) -> None:
        """Mark the last list as outdated, because a client of the gateway changed something."""

    def describe(self) -> dict[str, Any]:
        """Return the description of the server for the page, as values for JSON.

        It has the keys `name`, `title`, `kind`, `problem` (a text, or ""), `realtime` and `fps`.
        """

    def worlds(self) -> list[dict[str, Any]]:
        """Return the worlds' descriptions for the page, as values for JSON; `name` is without the server's prefix.

        Each has the keys `name`, `title`, `seats` (by name, whether each is taken), `viewers` (their number), `fps` and
        `lanes` (numbers, or None). `kind` is optional, and selects how the page draws the world.
        """

    def open(self, version: str, may_act: bool) -> ServedSession:
        """Open a call to the server."""

    def creating(self, settings: Mapping[str, pb.Tensor]) -> list[pb.EnvironmentRequest]:
        """Return CreateWorld requests to try in order until one is accepted."""

    def close(self) -> None:
        """End the call that `look` opened."""


def world_entry(name: str, title: str, **more: Any) -> dict[str, Any]:
    """Return the description of a world of which little is known.

    Args:
        name: Its name.
        title: The name for people.
        more: The known entries.
    """
    return {"name": name, "title": title, "seats": {}, "viewers": 0, "fps": None, "lanes": None, **more}


class EnvServer:
    """A dm_env_rpc server. Servers of this package report their worlds; for others, the default world is shown.

    Args:
        name: The prefix of its worlds' names.
        request: The server's address, and the settings in its URL for worlds to create or join.
        poller: Runs the connections.
        scheduler: Runs the coroutines that wait for responses.
        max_message_bytes: The largest request or response.
    """

    def __init__(
        self, name: str, request: WorldRequest, poller: LoopPoller, scheduler: Scheduler, max_message_bytes: int
    ) -> None:
        self.name = name
        self.settled: PendingResult[None] = PendingResult()
        self._request = request
        self._poller = poller
        self._scheduler = scheduler
        self._max_message_bytes = max_message_bytes
        self._relay: Relay | None = None
        self._asked_at = -float("inf")
        self._asking = False
        self._outdated = False
        self._problem = ""
        self._known: dict[str, Any] = {}

    def open(self, version: str, may_act: bool) -> Relay:
        """Open a call to the server, for a client that reports this version.

        The gateway has checked the client's permissions; the call checks that the server enforces them.
        """
        # The server publishes different observations to clients of other packages.
        address = dataclasses.replace(self._request.address, client_version=version)
        return Relay(self.name, address, self._poller, self._max_message_bytes, may_act=may_act)

    def creating(self, settings: Mapping[str, pb.Tensor]) -> list[pb.EnvironmentRequest]:
        """Return CreateWorld requests with the settings of the server's URL; the first one asks for rendering."""
        given = {**self._request.settings(), **settings}
        tried = [given] if "render_mode" in given else [{**given, "render_mode": pack_tensor("rgb_array")}, given]
        return [pb.EnvironmentRequest(create_world=pb.CreateWorldRequest(settings=each)) for each in tried]

    # Requests for the list of worlds

    def look(self, now: float) -> None:
        """Request the list of worlds if the last one is outdated."""
        every = _EVERY_IN_MATCH if self._known.get("match") is True else _EVERY
        if self._asking or (now - self._asked_at < every and not self._outdated):
            return
        self._asked_at, self._asking, self._outdated = now, True, False
        if self._relay is None:
            # One call for all requests: a page makes two a second, and more during a match.
            self._relay = self.open("", True)
        relay = self._relay
        # A cancelled call cannot be used again: `_lost` drops it, and the next `look` opens another.
        timer = self._scheduler.call_later(_TIMEOUT, relay.hang_up)

        def answered(answer: bytes | None, error: BaseException | None) -> None:
            timer.cancel()
            self._asking = False
            if error is not None or answer is None:
                self._lost(error)
            else:
                self._read(answer)
            if self._outdated:  # changed during the request
                self.look(self._scheduler.now())
            else:
                self.settled.set_result(None)

        request = property_request(OVERVIEW)
        self._scheduler.start(relay.ask(request.SerializeToString()), answered)

    def changed(self) -> None:
        """Mark the last list as outdated; the next caller waits for a new one."""
        self._outdated = True
        if self.settled.done:
            # A new result, because later callers must not get the list from before the change.
            self.settled = PendingResult()

    def _lost(self, error: BaseException | None) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if not isinstance(error, RequestError):
            self._problem = f"{self.name}: {error!r}"
        elif error.code is Code.CANCELLED:
            self._problem = f"{self.name} has not answered within {_TIMEOUT:g} s"
        else:
            self._problem = error.message

    def _read(self, answer: bytes) -> None:
        """Read the list of worlds; a server without the property has its default world."""
        try:
            response = pb.EnvironmentResponse.FromString(answer)
            known = {}
            # A server of another package answers with an error, but has its default world.
            if response.WhichOneof("payload") == "extension":
                read = properties_pb2.PropertyResponse.FromString(response.extension.value).read_property
                known = json.loads(str(unpack_tensor(read.value, OVERVIEW)[()]))
            json.dumps(known, allow_nan=False)  # browsers cannot read NaN: the page would show no server at all
            if not isinstance(known, dict) or not isinstance(known.get("worlds", []), list):
                raise ValueError(f"expected worlds, got {known!r:.80}")
        except (DecodeError, TensorError, ValueError, RecursionError) as error:
            self._problem = f"{self.name}: its list of worlds cannot be read: {error}"
            return
        self._problem, self._known = "", known

    @property
    def _title(self) -> str:
        return self._request.env_id or str(self._known.get("title") or self.name)

    def describe(self) -> dict[str, Any]:
        """Return the description of the server for the page."""
        known = self._known
        return {
            "name": self.name,
            "title": self._title,
            "kind": "dm_env_rpc",
            "problem": self._problem,
            "fps": None,
            "realtime": known.get("realtime") is True,
            **{name: known[name] for name in ("fps", "play_fps") if isinstance(known.get(name), (int, float))},
            "match": known.get("match") is True,
            "one_world": known.get("one_world") is True,
            "called": known.get("called") is not False,
            "environments": _texts(known.get("environments")),
        }

    def worlds(self) -> list[dict[str, Any]]:
        """Return its worlds; if there are none yet, an entry for the world to join or create."""
        if self._problem:
            return []
        wanted = self._request.address.world
        listed = [_checked(world) for world in self._known.get("worlds", []) if isinstance(world, dict)]
        found = [world for world in listed if wanted in (None, world.get("name"))]
        # A program may be watched before anybody plays. Older servers report it only if joining does not wait.
        goes_on = self._known.get("one_world") is True and True in map(self._known.get, ("realtime", "called"))
        waits = wanted is None and not goes_on
        return found or [world_entry(wanted or "", self._title, waiting=waits)]

    def close(self) -> None:
        """End the call for lists of worlds."""
        if self._relay is not None:
            self._relay.hang_up()
            self._relay = None


def _texts(value: Any) -> list[str]:
    """Return the texts in a list from a server; empty if it is something else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _checked(world: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's description of a world, with all entries that pages need: a server must not break a page."""
    seats, players, people = (world.get(name) for name in ("seats", "players", "taken_over"))
    numbers = {name: world.get(name) for name in ("viewers", "fps", "lanes")}
    return {
        **world,
        "name": str(world.get("name", "")),
        "title": str(world.get("title", "")),
        "seats": {str(seat): bool(taken) for seat, taken in seats.items()} if isinstance(seats, dict) else {},
        "players": {str(seat): str(who) for seat, who in players.items()} if isinstance(players, dict) else {},
        "taken_over": {str(seat): str(who) for seat, who in people.items()} if isinstance(people, dict) else {},
        "taken_over_by": _texts(world.get("taken_over_by")),
        **{name: value if isinstance(value, (int, float)) else None for name, value in numbers.items()},
    }
