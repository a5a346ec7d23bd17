"""The private objects behind the public ones of a server and a client: the only test module that names them.

A test asks here where no public interface shows what it must see or change. A rebuild of `bridge/core/client/` or
`bridge/core/server/` then changes this file, and not the tests.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bridge import ClientCredentials, Gate, Limits
from bridge.cli import program
from bridge.core.client.envs.vector_env import slots_of
from bridge.core.client.wire.connection import connect
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.session_states import StepAnswered
from bridge.core.server import connection as connection_module
from bridge.core.server import serving
from bridge.core.server.connection import Connection
from bridge.core.server.grpc_server import GrpcProtocol
from bridge.core.server.grpc_services import Services
from bridge.core.server.limits import Admission, FairShare, ProcessorAccount
from bridge.core.transport.address import parse_address


def new_poller() -> Any:
    """The queue of a client of its own, at which nothing arrives yet."""
    return Poller()


class Call:
    """One call of our client, which a test fills with messages of its own.

    Args:
        url: The server's URL.
        max_message_bytes: The longest answer that it takes.
        credentials: What is shown to the server.
        deliver: Makes of what comes what `get` returns, or None, which is kept from it.
        neighbour: A call with whose answers this one's are taken, and whose connection it may share.
        more: Further keywords of `connect`.
    """

    def __init__(
        self,
        url: str,
        max_message_bytes: int = 1 << 20,
        credentials: ClientCredentials | None = None,
        deliver: Callable[[Any], Any] | None = None,
        neighbour: Call | None = None,
        **more: Any,
    ) -> None:
        address = parse_address(url)
        if credentials is not None:
            address = dataclasses.replace(address, credentials=credentials)
        self.poller: Poller[Any] = neighbour.poller if neighbour is not None else Poller()
        put, made = self.poller.items.append, deliver or (lambda what: (self, what))
        self.call: Any = connect(address, self.poller, lambda what: put(made(what)), max_message_bytes, **more)
        self.send, self.finish, self.close = self.call.send, self.call.finish, self.call.close

    @property
    def connection(self) -> Any:
        """The socket's owner, which calls may share."""
        return self.call.connection

    def get(self, timeout: float) -> tuple[Call, Any]:
        """Wait for what comes next on this call or a neighbour; return whose it is, and an answer or its end.

        Raises:
            queue.Empty: Nothing came in time.
        """
        found: tuple[Call, Any] = self.poller.get(timeout)
        return found

    def receive(self, timeout: float = 20.0) -> Any:
        """Wait for this call's next answer, or the error that ends it."""
        return self.get(timeout)[1]


# Of a client


def pool_of(envs: Any) -> Any:
    """The object that drives the slots of a vector environment."""
    return slots_of(envs).pool


def stepper_of(envs: Any) -> Any:
    """The object that steps the slots of a vector environment."""
    return slots_of(envs).stepper


def remotes_of(envs: Any) -> list[Any]:
    """The remotes of a vector environment, one a world, in the order of their slots."""
    return [member.remote for member in pool_of(envs).members.filling]


def remote_of(env: Any) -> Any:
    """The remote of a `RemoteEnv`."""
    return env._remote


def hold_sockets(env: Any) -> None:
    """Have another thread take the lock around the sockets of an environment, and keep it to the end."""
    held = threading.Event()

    def hold(lock: Any) -> None:
        with lock:
            held.set()
            threading.Event().wait()

    poller = call_of(remotes_of(env)[0] if hasattr(env, "num_envs") else remote_of(env)).connection.poller
    threading.Thread(target=hold, args=(poller.lock,), daemon=True).start()
    assert held.wait(20.0)


def call_of(remote: Any) -> Any:
    """The call that carries a remote."""
    return remote._call


def protocol_of(remote: Any) -> Any:
    """The gRPC of the connection that carries a remote."""
    return call_of(remote).connection.protocol


def begin_step(env: Any, action: Any) -> None:
    """Send a Step of a `RemoteEnv`, and wait for nothing."""
    remote_of(env).step(action)


def finish_step(env: Any) -> Any:
    """Wait for the answer to `begin_step`; return it as it arrived."""
    return env._pool.wait(remote_of(env), StepAnswered, "to a step").message


def sign_of_life_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have clients ask a server for a sign of life that has been quiet for so long; a tenth of it is a look's pause."""
    monkeypatch.setattr("bridge.core.client.wire.keepalive.KEEPALIVE", seconds)


def look_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have clients that wait say so this often."""
    for module in ("pool", "joining"):
        monkeypatch.setattr(f"bridge.core.client.slots.{module}.LOOK", seconds)


def set_client_clock(monkeypatch: pytest.MonkeyPatch, monotonic: Callable[[], float]) -> None:
    """Have what waits in a client ask this for the time."""
    for module in ("pool", "vector_pool", "stepper"):
        monkeypatch.setattr(f"bridge.core.client.slots.{module}.time", SimpleNamespace(monotonic=monotonic))


def as_another_machine(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Have a module take every host for another machine: all of these tests run on loopback."""
    monkeypatch.setattr(f"bridge.{module}.is_loopback", lambda host: False)


# Of a server


def registry_of(server: Any) -> Any:
    """The worlds of a server in this process."""
    return server._registry


def connections_of(server: Any) -> list[Any]:
    """The connections of a server in this process, each with its socket's state and its protocol."""
    return list(server._connections.all.values())


def calls_of(server: Any) -> Any:
    """The calls of a server in this process."""
    return server._calls


def in_serving_thread(server: Any, function: Callable[[], Any]) -> None:
    """Have the thread of a server in this process call a function soon."""
    server._loop.scheduler.call_soon_threadsafe(function)


def objects_at(server: Any, *packages: str) -> Counter[type]:
    """As `objects_of`, asked in the thread of a server in this process: it may be making one of them elsewhere."""
    from tests.support import objects_of  # which imports this module

    found: list[Counter[type]] = []
    asked = threading.Event()

    def look() -> None:
        found.append(objects_of(*packages))
        asked.set()

    in_serving_thread(server, look)
    assert asked.wait(60.0), "the server's thread does nothing"
    return found[0]


def server_signs_of_life(
    monkeypatch: pytest.MonkeyPatch, every: float, quiet: float | None = None, patience: float | None = None
) -> None:
    """Have servers look every so many seconds for clients that have been quiet, and how long they wait for a sign."""
    monkeypatch.setattr("bridge.core.server.connections._KEEPALIVE", every)
    for name, seconds in (("QUIET", quiet), ("PATIENCE", patience)):
        if seconds is not None:
            monkeypatch.setattr(f"bridge.core.server.connection.{name}", seconds)


def look_at_sockets_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have servers answer requests for so long at most before they look at their sockets again."""
    _set_moment(monkeypatch, "core.server.calls", seconds)


def deputy_runs_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the deputies of servers run the loop once a call of an environment has lasted so long."""
    _set_moment(monkeypatch, "core.server.serving", seconds)


def _set_moment(monkeypatch: pytest.MonkeyPatch, module: str, seconds: float) -> None:
    monkeypatch.setattr(f"bridge.{module}.MOMENT", seconds)


def server_waits() -> tuple[float, float]:
    """The seconds after which a quiet client is asked for a sign of life, and those that it has for it."""
    return connection_module.QUIET, connection_module.PATIENCE


def set_websocket_clock(monkeypatch: pytest.MonkeyPatch, monotonic: Callable[[], float]) -> None:
    """Have what servers speak to browsers ask this for the time."""
    monkeypatch.setattr("bridge.core.server.http_protocol.time", SimpleNamespace(monotonic=monotonic))


def let_wait_at_websockets(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Have servers read no more of a WebSocket of which so many bytes wait."""
    monkeypatch.setattr("bridge.ConnectionHandler.max_waiting", size)


def charge_each_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have servers read again of a connection after so many seconds, whatever it has used."""

    def charge(account: ProcessorAccount, used: float, now: float, **more: object) -> float:
        account.until = now + seconds
        return seconds

    monkeypatch.setattr(ProcessorAccount, "charge", charge)


def read_soon(server: Any) -> None:
    """Have a server in this process read what it would read later."""
    for connection in connections_of(server):
        connection.account.until = 0.0


def linger(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have servers hear out for so long whom they have refused."""
    monkeypatch.setattr("bridge.core.server.connections._LINGER", seconds)


def list_recordings_again_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have servers read the folder of their recordings anew when a list of it is so old."""
    monkeypatch.setattr("bridge.recording.library._FRESH", seconds)


def limit_replays(monkeypatch: pytest.MonkeyPatch, most: int, lingers: float) -> None:
    """Have servers show so many recorded episodes at once, each for so many seconds after the last who looked."""
    monkeypatch.setattr("bridge.recording.replay_world.MOST_REPLAYS", most)
    monkeypatch.setattr("bridge.recording.replay_world.ReplayPacer.lingers", lingers)


def let_holds_lapse(monkeypatch: pytest.MonkeyPatch, after: float = -1.0) -> None:
    """Have the action of a person who has taken over hold for so many seconds; by default for no time."""
    monkeypatch.setattr("bridge.web.watching.takeovers.HOLD", after)


def server_connection(sock: socket.socket, limits: Limits) -> Any:
    """A server's end of a connection, without a server: its `protocol` is gRPC, and calls nobody."""
    owner: Any = SimpleNamespace(arrange=lambda connection: None)
    connection = Connection(owner, sock, "peer", None, Admission(limits), ProcessorAccount(FairShare(), 0.0))
    handler: Any = SimpleNamespace(calls=SimpleNamespace(receive=None, ready=None))
    connection.protocol = GrpcProtocol(connection, handler, limits, Gate(None), Services(lambda: True))
    return connection


def add_command(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    """Give the command `bridge` a sub-command for a test."""
    monkeypatch.setitem(program.COMMANDS, name, (module, "a command of a test"))


def lock_of_environments() -> Any:
    """The lock under which one server at a time calls environments."""
    return serving.environments_lock
