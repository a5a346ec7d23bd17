"""A PERLERT lobby as a world of dm_env_rpc, which a gateway serves.

A client registers, declares itself ready, and plays, all with Steps that return at once.

Each agent of the world is a client of the lobby with its own socket. Its actions are texts, as in PERLERT, because the
spaces are known only after it has taken a slot; the observation `lobby` tells a web page how to write them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.encoding.tensors import Array, Spec, unpack_tensor
from bridge.core.server.limits import CoreLimits
from bridge.core.server.registry import Registry
from bridge.core.server.session import Session
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.group import neutral_action
from bridge.core.worlds.scheduling import PendingResult, Runtime, Timer
from bridge.core.worlds.settings import refuse_unknown
from bridge.errors import BridgeError, Code, ConnectError, PacketError, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.perlert.address import PerlertAddress, parse_perlert_address
from bridge.perlert.client import PerlertClient, check_names
from bridge.perlert.player import PlayerState
from bridge.perlert.player_run import Stepped
from bridge.perlert.protocol.cipher import check_key
from bridge.perlert.protocol.codec import Space, TextCodec
from bridge.perlert.protocol.packet import Message, Start, check_label
from bridge.perlert.protocol.profile import parse_tag

__all__ = ["LobbyAgent", "LobbyServer", "LobbyWorld", "open_lobby", "resolved"]

# Seconds without an answer after which the lobby counts as lost; it is polled every second.
_SILENCE = 4.0
# Seconds after which polling of the lobby stops if no page shows it.
_UNSEEN = 10.0
_ROLES = ("player", "spectator")


def resolved(url: str) -> tuple[str, PerlertAddress]:
    """Parse a URL and resolve its host name; doing so later would block the event loop.

    Returns:
        The lobby's name for messages, and its IP address.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: The host has no address.
    """
    address = parse_perlert_address(url)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConnectError(url, f"the host {address.host!r} has no address: {error}") from error
    best = min(found, key=lambda item: item[0] != socket.AF_INET)
    host = f"[{address.host}]" if ":" in address.host else address.host
    name = f"{host}:{address.port}/{address.header}"
    return name, dataclasses.replace(address, host=str(best[4][0]), agent=None, tag=None)


class LobbyClient:
    """A client of the lobby, in an event loop.

    Args:
        address: The lobby's IP address and instance.
        key: The pre-shared key; None: none.
        runtime: Watches the socket.
        tag: The client's name.
        agent: The slot to take; None: none.

    Raises:
        SettingError: The name is invalid.
    """

    def __init__(
        self, address: PerlertAddress, key: Any, runtime: Runtime, *, tag: str = "", agent: str | None = None
    ) -> None:
        tag = tag or f"guest-{secrets.token_hex(2)}"
        self._client = PerlertClient(address, agent=agent or "", tag=tag, key=key, ready=False, is_person=True)
        self.me = self._client.player
        self._runtime = runtime
        self._timer: Timer | None = None
        self._codec: TextCodec | None = None
        self.said = ""
        """The last text message."""
        self.last: Stepped | None = None
        """The newest step of the current run, or of the last one; None: no step yet."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called whenever the state may have changed."""
        runtime.add_reader(self._client.port, self.turn)
        self.turn()

    def turn(self) -> None:
        """Read received datagrams, do what is due, and schedule the next call."""
        if self._client.port.closed:
            return
        self._client.pump()
        # The space arrives with the offer of a slot. Until the person acts, the action that does nothing is sent.
        if self._codec is None and self.space is not None:
            self._codec = TextCodec(self.space, named=False, decimals=None)
            self.me.action = self._codec.encode(neutral_action(self.space))
        while self.me.events:
            event = self.me.events.popleft()
            if isinstance(event, Message):
                self.said = event.text
            # The last run's message and final step do not belong to this run.
            elif isinstance(event, Start):
                self.last, self.said = None, ""
            elif isinstance(event, Stepped):
                self.last = event
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self.me.wake()
        if wake < math.inf:
            self._timer = self._runtime.scheduler.call_at(wake, self.turn)
        self.on_turn()

    @property
    def space(self) -> Space | None:
        """The action space; None: not received yet."""
        return self.me.offer.action_space if self.me.offer is not None else None

    def set_ready(self, ready: bool) -> None:
        """Change whether the client is ready for the next run."""
        self._client.port.send(self.me.set_ready(ready, self._runtime.scheduler.now()))
        self.turn()

    def act(self, text: str) -> None:
        """Set the action; raise PacketError if it is invalid."""
        if self.me.state not in (PlayerState.JOINING, PlayerState.PLAYING):
            return
        if self._codec is not None:
            self._codec.decode(text)
        self._client.port.send(self.me.act(text, self._runtime.scheduler.now()))

    def close(self) -> None:
        """Leave the slot and close the socket. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._client.port.closed:
            self._runtime.remove_reader(self._client.port)
            self._client.close()

    def describe(self) -> dict[str, Any]:
        """Return the lobby as this client sees it, as values for JSON."""
        me = self.me
        mine = me.key if me.state not in (PlayerState.ASKING, PlayerState.REGISTERING) else None
        slots = [
            {
                "key": slot.key,
                "kind": slot.kind,
                "open": slot.open,
                "ready": slot.ready,
                "name": "" if slot.open else parse_tag(slot.tag).name,
            }
            for slot in me.slots.values()
        ]
        return {
            "lobby": str(me.header),
            "state": me.state.value,
            "mine": mine,
            "slots": slots,
            "said": self.said,
            "waits": me.waits_for()
            if me.state in (PlayerState.ASKING, PlayerState.REGISTERING, PlayerState.WAITING)
            else "",
            "fps": me.offer.fps if me.offer is not None else None,
            "controls": None if self.space is None else _controls(self.space),
        }


def _controls(space: Any) -> object:
    """Return the mapping of keys to actions of a space, for the gateway's page."""
    from bridge.web.controls import controls_of_space

    return json.loads(controls_of_space(space))


class LobbyAgent(Agent):
    """A client in the lobby. Its Steps return at once, and its only episodes are the lobby's runs.

    Args:
        world: The agent's world.
        client: The client of the lobby.
        plays: True if it has requested a slot.
    """

    def __init__(self, world: LobbyWorld, client: LobbyClient, plays: bool) -> None:
        self._world = world
        self._client = client
        self._left = False
        self.actions = {1: Spec.text("action", ()), 2: Spec.number("ready", (), np.bool_)} if plays else {}
        self.observations = {
            1: Spec.text("lobby", ()),
            2: Spec.text("observation", ()),
            3: Spec.number("step", (), np.int64),
            4: Spec.number("return", (), np.float64),
            5: Spec.number("over", (), np.bool_),
        }

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Do nothing: runs begin when all clients are ready."""
        refuse_unknown(settings, (), "Reset")

    async def begin(self) -> int:
        """Begin a sequence with the current state of the lobby."""
        # The lobby decides when a run ends, so no ResetWorld waits for a Step of this agent.
        self._world.resets.end(self)
        return self._checked()

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Declare the client ready, or act."""
        state = self._checked()
        try:
            if 2 in actions:
                self._client.set_ready(bool(actions[2][()]))
            if 1 in actions and (text := str(actions[1][()])):
                self._client.act(text)
        except PacketError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad action: {error}") from error
        return state

    def _checked(self) -> int:
        if self._world.resets.closed:
            raise RequestError(Code.FAILED_PRECONDITION, "the lobby was left: join it anew")
        return pb.RUNNING

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return the current state of the lobby and the run."""
        client, last = self._client, self._client.last
        found: dict[int, Callable[[], Any]] = {
            1: lambda: np.array(json.dumps(client.describe()), object),
            2: lambda: np.array(last.observation if last else "", object),
            3: lambda: np.int64(last.step if last else -1),
            4: lambda: np.float64(last.ret if last else np.nan),
            5: lambda: np.bool_(last is not None and last.done),
        }
        return {uid: np.asarray(found[uid]()) for uid in uids}

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return self._world.properties()

    def leave(self) -> None:
        """Leave the slot and the lobby."""
        if not self._left:
            self._left = True
            self._client.close()
            self._world.forget(self)


class LobbyWorld(World):
    """A lobby as a world.

    Args:
        name: The world's name.
        runtime: Watches the sockets.
        make: Makes a client of the lobby, given its name and slot.
        title: The name of the instance.
    """

    def __init__(self, name: str, runtime: Runtime, make: Callable[..., LobbyClient], title: str) -> None:
        super().__init__(name, runtime.scheduler)
        self._make = make
        self._title = title
        self._agents: set[LobbyAgent] = set()

    def join(self, settings: Mapping[str, pb.Tensor]) -> LobbyAgent:
        """Add a client, which looks at the lobby or, with `role=player`, takes the slot `agent` as `name`.

        Raises:
            RequestError: INVALID_ARGUMENT: unknown settings, or an invalid name.
        """
        refuse_unknown(settings, ("role", "agent", "name"), "JoinWorld")
        try:
            given = {name: str(unpack_tensor(tensor, name)[()]) for name, tensor in settings.items()}
            role = given.get("role", "player")
            if role not in _ROLES or (role == "player") != ("agent" in given):
                raise SettingError(
                    "expected role=spectator, or role=player with the slot's key as the setting agent, got "
                    f"{', '.join(f'{name}={value!r:.40}' for name, value in given.items()) or 'no settings'}"
                )
            if role == "player":
                check_label(given["agent"], "key")
                check_names(given.get("name", ""))
            client = self._make(tag=given.get("name", ""), agent=given.get("agent"))
        except (TensorError, PacketError, SettingError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad JoinWorld settings: {error}") from error
        except (BridgeError, OSError) as error:
            raise RequestError(Code.UNAVAILABLE, f"the lobby cannot be reached: {error}") from error
        agent = LobbyAgent(self, client, role == "player")
        self._agents.add(agent)
        return agent

    def forget(self, agent: LobbyAgent) -> None:
        """Record that an agent has left."""
        self._agents.discard(agent)

    @property
    def agents(self) -> int:
        """The number of agents."""
        return len(self._agents)

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return PropertyTree(
            [
                Property("world.name", TEXT, "the world's name", lambda: self.name),
                Property("world.lobby", TEXT, "the instance of PERLERT", lambda: self._title),
            ]
        )

    async def close(self) -> None:
        """Leave the lobby with all agents."""
        for agent in tuple(self._agents):
            agent.leave()


def open_lobby(url: str, *, perlert_key: Any = None) -> Callable[[Runtime], LobbyServer]:
    """Return a function that makes the server for a lobby: `GatewayScheme.open` of `perlert://`.

    Args:
        url: `perlert://HOST:PORT/NAME:NUMBER`.
        perlert_key: The pre-shared key; None: none.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: The host has no address.
        SettingError: The key is too short, or the extra for encryption is not installed.
    """
    name, address = resolved(url)
    if perlert_key is not None:
        check_key(perlert_key)
    return lambda runtime: LobbyServer(name, address, perlert_key, runtime)


class LobbyServer:
    """A PERLERT lobby behind a gateway (`bridge.web.gateway.servers.PublishedServer`), as a server with one world.

    Args:
        name: The prefix of the world's name.
        address: The lobby's IP address and instance.
        key: The pre-shared key; None: none.
        runtime: Watches the sockets.
    """

    def __init__(self, name: str, address: PerlertAddress, key: Any, runtime: Runtime) -> None:
        self.name = name
        self.title = str(address.header)
        self.settled: PendingResult[None] = PendingResult()
        self._runtime = runtime
        self._make_client = partial(LobbyClient, address, key, runtime)
        self._hub = Registry(_LobbySource(self._make_client, self.title), CoreLimits(), runtime)
        self._client: LobbyClient | None = None
        self._asked_at = self._looked_at = 0.0

    def open(self, version: str, may_act: bool) -> Session:
        """Begin a session with the lobby's world."""
        return Session(self._hub, version, may_act=may_act)

    def creating(self, settings: Mapping[str, pb.Tensor]) -> list[pb.EnvironmentRequest]:
        """Return a CreateWorld request, which the server refuses."""
        return [pb.EnvironmentRequest(create_world=pb.CreateWorldRequest(settings=settings))]

    # Polling the lobby

    def look(self, now: float) -> None:
        """Poll the lobby while a page shows it."""
        self._looked_at = now
        if self._client is None:
            self._asked_at = now
            # A client without a slot: it receives the lobby, and nobody waits for it.
            self._client = self._make_client()
            self._client.on_turn = self._turned

    def changed(self) -> None:
        """Do nothing: the lobby sends its changes by itself."""

    def _turned(self) -> None:
        client = self._client
        if client is None:
            return
        if client.me.slots:
            self.settled.set_result(None)
        if self._runtime.scheduler.now() - self._looked_at > _UNSEEN:
            self._client = None
            client.close()

    @property
    def _problem(self) -> str:
        client = self._client
        if client is None:
            return f"{self.name} was not asked yet"
        if self._runtime.scheduler.now() - max(client.me.heard_at, self._asked_at) > _SILENCE or not client.me.slots:
            said = f", but said: {client.me.said}" if client.me.said else ""
            return f"the lobby {self.name} does not answer{said}"
        return ""

    def describe(self) -> dict[str, Any]:
        """Return the description of the server for the page."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": "perlert",
            "problem": self._problem,
            "realtime": True,
            "fps": None,
        }

    def worlds(self) -> list[dict[str, Any]]:
        """Return the lobby as a list of one world."""
        client = self._client
        if client is None or self._problem:
            return []
        seats = {slot.key: not slot.open for slot in client.me.slots.values()}
        world = {"name": "", "title": self.title, "kind": "perlert", "seats": seats}
        return [{**world, "viewers": 0, "fps": None, "lanes": None}]

    def close(self) -> None:
        """Stop polling."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _LobbySource:
    """Makes the one world of a lobby (`bridge.core.server.registry.WorldSource`)."""

    SETTINGS: Sequence[str] = ()
    fps: float | None = None
    traits: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, make_client: Callable[..., LobbyClient], title: str) -> None:
        self._make_client = make_client
        self.title = title
        self.env_ids: list[str] = []

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Make the world; its name must be empty."""
        if name:
            raise RequestError(Code.UNIMPLEMENTED, f"{self.title} is a lobby, in which no worlds are made: join it")
        return LobbyWorld(name, runtime, self._make_client, self.title)

    async def prepare(self, runtime: Runtime) -> None:
        """Do nothing: no world is made in advance."""

    async def close(self) -> None:
        """Do nothing: the worlds are closed by the server."""
