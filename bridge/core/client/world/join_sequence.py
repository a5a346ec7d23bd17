"""The requests with which a client joins a world, each made from the answer to the one before.

CreateWorld, JoinWorld and, at a server of this package, one request for each property of the world.

If the client prefers lanes, it asks the server for them first. One message steps a world of N lanes, which is faster
than N worlds. If the caller waits for all slots anyway, and the server steps its worlds one after the other, the two
forms differ only in speed. `choose_lanes` examines the call, before anything is connected; `LanesQuestion` asks the
server, before a world is made. A user's `lanes=True` or `lanes=False` decides without either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from bridge.core.client.world.extensions import property_request, property_value, property_write, reads_columns
from bridge.core.client.world.session_states import ClientState, Trigger
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding.names import NAMES
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, PeerError, RefusedError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["WORLD_PROPERTIES", "JoinSequence", "LanesQuestion", "choose_lanes"]

WORLD_PROPERTIES = (
    "observation_space",
    "action_space",
    "reward_space",
    "num_envs",
    "env_id",
    "metadata",
    "render_mode",
    "spec",
)
"""The properties below `world` that a client reads after it has joined a world."""
# The properties that the values codec encodes.
_ENCODED = ("metadata", "spec", "fps")
# Further properties of a world whose Steps are to be in flight.
_FAR = ("episode_uid", "wait")
_NAMES = NAMES.removeprefix("world.")

_Next: TypeAlias = tuple[Trigger, pb.EnvironmentRequest]
"""A request, and the change of state that it makes."""


class JoinSequence:
    """The requests of one stream, until the world is joined and its properties are known.

    Args:
        request: The world wanted.
    """

    def __init__(self, request: WorldRequest) -> None:
        self.request = request
        """The world wanted. It begins as the argument, and is updated by the decision about lanes."""
        lanes = request.lanes_if_alike
        self._question = None if lanes is None else LanesQuestion(lanes)
        self.agreed_on_lanes = False
        """True if the server has said that the lanes wanted are as good as worlds."""
        self._instead: WorldRequest | None = None
        """The request to use if the requested world of lanes cannot be had; None: there is none."""
        self.world_name: str | None = None
        """The name of the world that was requested; empty for the server's default world; None: none was."""
        self.specs = pb.ActionObservationSpecs()
        """The specs of that world."""
        self.properties: dict[str, Any] = {}
        """The properties that have been read, and whether the server `reads_columns`; with `round_trip`, in seconds, if
        the server holds Steps."""
        self._not_created: RefusedError | None = None
        """The reason why the server made no world, if the default one was requested in its place."""
        self._unread: list[str] = []
        self._round_trip = math.inf

    @property
    def made_world(self) -> bool:
        """True if the world was created for this stream, which then destroys it: other worlds may have other users."""
        return self.request.address.world is None and bool(self.world_name)

    def first(self) -> _Next:
        """Return the request that creates the world, or joins an existing one.

        Raises:
            SettingError: A setting cannot be sent.
        """
        name = self.request.address.world
        if name is not None:
            return self._join(name)
        return self._create() if self._question is None else (Trigger.ASK, self._question.first())

    @property
    def asking(self) -> bool:
        """True until it is decided which form of world to make."""
        return self._question is not None

    def _create(self) -> _Next:
        create = pb.CreateWorldRequest(settings=self.request.settings())
        return Trigger.CREATE, pb.EnvironmentRequest(create_world=create)

    def _decide(self, agreed: bool) -> _Next:
        """Create a world of lanes if the server agreed to it, otherwise one for a slot."""
        count = self.request.lanes_if_alike
        self.request = alone = dataclasses.replace(self.request, lanes_if_alike=None)
        if agreed and count is not None:
            self.agreed_on_lanes, self._instead = True, alone
            self.request = alone.as_lanes(count)
        self._question = None
        return self._create()

    def _without_lanes(self, instead: WorldRequest) -> _Next:
        """Continue without the world of lanes: its environment could not be made, or lanes do not suit it."""
        self.request, self._instead = instead, None
        # If it was made, and cannot be joined, it would keep its environments as long as the connection.
        if self.world_name:
            destroy = pb.DestroyWorldRequest(world_name=self.world_name)
            return Trigger.ASK, pb.EnvironmentRequest(destroy_world=destroy)
        return self._create()

    def _join(self, name: str) -> _Next:
        self.world_name = name
        texts = dict(self.request.join_settings)
        if self.request.agent is not None:
            texts["agent"] = self.request.agent
        join = pb.JoinWorldRequest(world_name=name, settings={key: pack_tensor(text) for key, text in texts.items()})
        return Trigger.JOIN, pb.EnvironmentRequest(join_world=join)

    def following(
        self,
        state: ClientState,
        message: pb.EnvironmentResponse,
        error: RefusedError | None,
        took: float,
        version: str | None,
    ) -> _Next | None:
        """Return the request that follows an answer; None: the world is joined and known.

        Args:
            state: The state in which the answer came.
            message: The answer.
            error: The error, if the answer is one.
            took: The seconds that it took.
            version: The version of a server of this package; None: another server.

        Raises:
            RefusedError: The world cannot be joined, or cannot be used without the refused property.
            PeerError: A property cannot be read.
        """
        if state is ClientState.ASKING:
            return self._after_question(message, error, version)
        if error is not None and self._instead is not None and state is not ClientState.DESCRIBING:
            return self._without_lanes(self._instead)
        if state is ClientState.CREATING:
            # The user asked for a certain environment: the default world may have any.
            if error is not None and self.request.settings():
                raise error
            # D-4: a server may have only one world, and refuse to create others.
            self._not_created = error
            return self._join("" if error is not None else message.create_world.world_name)
        if state is ClientState.JOINING:
            if error is not None:
                raise self._no_world(error)
            self.specs = message.join_world.specs
            # Other servers are asked for no property: they may not tolerate an extension. Their specs are enough
            # (D-24).
            if version is not None:
                self._unread += WORLD_PROPERTIES
                if self.request.names:
                    self._unread.append(_NAMES)
                if any(spec.name == "frames" for spec in self.specs.observations.values()):
                    self._unread.append("fps")
        else:
            self._read_property(message, error, took)
        if not self._unread:
            return None
        key = f"world.{self._unread[0]}"
        # The last question asks the server to hold each Step until there is a new frame.
        write = key == "world.wait"
        return Trigger.DESCRIBE, property_write(key, pack_tensor("new_frame")) if write else property_request(key)

    def _after_question(
        self, message: pb.EnvironmentResponse, error: RefusedError | None, version: str | None
    ) -> _Next:
        """Return the request after the answer to a question, or after the end of a world of lanes."""
        if self._question is None:
            return self._create()
        further = self._question.following(message, error, version, self.request.address.url)
        return self._decide(self._question.agreed) if further is None else (Trigger.ASK, further)

    def _no_world(self, error: RefusedError) -> RefusedError:
        """Return the error for a refused JoinWorld. If the server had no room for the user's own world, it says so."""
        full = self._not_created
        # The user did not ask for the default world, so that this one is full is not the reason.
        if full is None or {full.code, error.code} != {Code.RESOURCE_EXHAUSTED} or full.reason == error.reason:
            return error
        return RefusedError(
            full.url, f"{full.reason}. Nor is there room in its default world: {error.reason}", full.code
        )

    def _read_property(self, message: pb.EnvironmentResponse, error: RefusedError | None, took: float) -> None:
        key = self._unread.pop(0)
        # The shortest: a longer one may be caused by a busy server, which Steps in flight would not hide.
        self._round_trip = min(took, self._round_trip)
        if error is not None:
            # Older servers of this package do not have the first property of Steps in flight: they apply an action in
            # its turn, behind Steps that they hold. There each Step waits for its own answer.
            if key in _FAR:
                self._unread.clear()
            # They do not have the names of attributes either, and viewers may not read them.
            elif key != _NAMES:
                raise error
        elif key == "wait":
            self.properties["round_trip"] = self._round_trip
        else:
            url = self.request.address.url
            self.properties[key] = property_value(message, url, key in _ENCODED)
            if key == "metadata":  # every property of the values codec tells it
                self.properties["reads_columns"] = reads_columns(message, url)
        # `fps` comes after the others, so several round trips were measured by now. The server may hold Steps unless
        # the user has said what they wait for.
        may_wait = "wait" not in self.request.join_settings
        if key == "fps" and may_wait and _pays(self._round_trip, self.properties["fps"]):
            self._unread += _FAR


def _pays(round_trip: float, fps: float) -> bool:
    """True if the round trip is long enough that Steps in flight bring more frames than Steps one after the other."""
    return round_trip * fps > 0.5


# A server's property: the most lanes that are as good as worlds.
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
    """Return the request of one world for all slots; None: each slot, or each URL, has its own world.

    Args:
        asked: The keyword `lanes`: True or False decides; None: lanes if they differ only in speed.
        num_envs: The number of slots; None: not given.
        requests: The worlds that the URLs ask for.
        directory: True if a directory has the URLs.
        spares: True if there are spare worlds.
        waits_for_all: True if the caller waits for all slots in each step.

    Returns:
        For True a request for lanes, which the server may refuse; for None one with `lanes_if_alike`, so that the
        session asks the server first.

    Raises:
        SettingError: For True: there cannot be one world for all slots.
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
    # A spare world is no spare for lanes. A `vectorization_mode` in the URL says how each slot's own world is stepped.
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
    """The question to a server, before a world is made, whether so many lanes are as good as worlds.

    Args:
        count: The number of lanes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._identified = False
        self.agreed = False
        """True once the server has said so."""

    def first(self) -> pb.EnvironmentRequest:
        """Return the first request, whose answer shows whether the server is of this package.

        Other servers are asked for no property: they may not tolerate an extension. Leaving a world that was not joined
        has no effect, at any server (D-16).
        """
        return pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest())

    def following(
        self, message: pb.EnvironmentResponse, error: RefusedError | None, version: str | None, url: str
    ) -> pb.EnvironmentRequest | None:
        """Return the request that follows an answer; None: there are no more questions.

        Args:
            message: The answer.
            error: The error, if the answer is one.
            version: The version of a server of this package; None: another server.
            url: The server's URL, for errors.
        """
        if not self._identified:
            self._identified = True
            return None if version is None else property_request(_PROPERTY)
        # An older server of this package refuses, because it does not have the property.
        if error is None:
            try:
                most: Any = property_value(message, url, encoded=False)
                self.agreed = bool(most >= self._count)
            except (PeerError, TypeError, ValueError):
                pass  # no number: the server does not agree
        return None
