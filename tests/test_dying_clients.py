"""Client processes that are killed, one in every state of the session's table: their worlds go, all others go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bridge import RemoteEnv, Server, make_remote, serve_gym
from bridge.frames import Hello, pack_frame
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.session import TRANSITIONS, Event, State
from bridge.tensors import pack_tensor
from bridge.testing import CountingEnv
from bridge.wire import METHOD, SERVICE
from tests.support import until

# Sends what comes in hexadecimal lines; `ask` answers with what the server answers, `send` waits for nothing.
CLIENT = f"""
import sys
host, port, hello = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
if hello:
    import socket, struct
    sock = socket.create_connection((host, port))
    file = sock.makefile("rb")
    send = lambda data: sock.sendall(struct.pack(">I", len(data)) + data)
    take = lambda: file.read(struct.unpack(">I", file.read(4))[0])
    sock.sendall(hello)
    take()
else:
    import grpc, queue
    requests = queue.SimpleQueue()
    channel = grpc.insecure_channel(f"{{host}}:{{port}}")
    call = channel.stream_stream("/{SERVICE}/{METHOD}")(iter(requests.get, None))
    send, take = requests.put, lambda: next(call)
for line in sys.stdin:
    word, data = line.split()
    send(bytes.fromhex(data))
    print(take().hex() if word == "ask" else "", flush=True)
"""


class Client:
    """A client in a process of its own, which does what it is told until it is killed."""

    def __init__(self, server: Server, scheme: str) -> None:
        url = server.urls[1 if scheme == "tcp" else 0]
        port, hello = url.rpartition(":")[2], pack_frame(Hello().pack()).hex() if scheme == "tcp" else ""
        command = [sys.executable, "-c", CLIENT, "127.0.0.1", port, hello]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _order(self, word: str, **request: Any) -> bytes:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{word} {pb.EnvironmentRequest(**request).SerializeToString().hex()}\n")
        stdin.flush()
        return bytes.fromhex(stdout.readline())

    def send(self, **request: Any) -> None:
        self._order("send", **request)

    def ask(self, **request: Any) -> Any:
        answer = pb.EnvironmentResponse.FromString(self._order("ask", **request))
        kind = answer.WhichOneof("payload")
        assert kind in request, answer
        return getattr(answer, kind)

    def create(self) -> str:
        return str(self.ask(create_world=pb.CreateWorldRequest()).world_name)

    def join(self, world: str) -> None:
        self.ask(join_world=pb.JoinWorldRequest(world_name=world))

    def step(self) -> int:
        return int(self.ask(step=STEP).state)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


STEP = pb.StepRequest(actions={1: pack_tensor(0)}, requested_observations=[1])


class Gated(CountingEnv):
    """Its third step of an episode waits for the test, where the test says so."""

    gate = threading.Event()
    entered = threading.Event()

    def step(self, action: Any) -> Any:
        if self.steps == 2 and not self.gate.is_set():
            self.entered.set()
            assert self.gate.wait(30)
        return super().step(action)


@pytest.fixture
def server() -> Iterator[Server]:
    Gated.gate.set()
    Gated.entered.clear()
    with serve_gym(Gated, tcp_port=0) as server:
        yield server
        Gated.gate.set()


@pytest.fixture
def connect(server: Server, scheme: str) -> Iterator[Callable[[], Client]]:
    with ExitStack() as stack:

        def make() -> Client:
            client = Client(server, scheme)
            stack.callback(client.kill)
            return client

        yield make


@pytest.fixture
def bystander(server: Server) -> Iterator[RemoteEnv]:
    """Plays in a world of its own, whatever happens beside it."""
    env = make_remote(server.url)
    env.reset()
    assert env.step(0)[0].tolist() == [1, 1]
    yield env
    assert env.step(0)[0].tolist() == [1, 2]
    env.close()
    until(lambda: server.connections == 0)


def lead(client: Client, state: State) -> str:
    """Bring a client into a state; return its world."""
    world = client.create()
    if state is State.UNJOINED:
        return world
    client.join(world)
    if state is State.JOINED:
        return world
    assert client.step() == pb.RUNNING
    if state is State.INTERRUPTED:
        client.ask(reset=pb.ResetRequest())
    if state is State.TERMINATED:
        while client.step() == pb.RUNNING:
            pass
    return world


BOTH = pytest.mark.parametrize("scheme", ["grpc", "tcp"])
MORTAL = [state for state in State if (state, Event.END) in TRANSITIONS]


@BOTH
@pytest.mark.parametrize("state", MORTAL, ids=lambda state: state.value)
def test_a_client_that_is_killed_leaves_what_it_should(
    server: Server, connect: Callable[[], Client], bystander: RemoteEnv, state: State
) -> None:
    client = connect()
    world = lead(client, state)
    assert (server.connections, len(server.worlds)) == (2, 2)
    client.kill()
    until(lambda: server.connections == 1)
    if state is State.UNJOINED:  # it was made for others to join
        assert world in server.worlds
        other = make_remote(f"{server.url}?world={world}")
        other.reset()
        other.close()
    else:
        assert world not in server.worlds


@BOTH
def test_a_client_that_is_killed_in_the_midst_of_a_step_takes_its_world_along(
    server: Server, connect: Callable[[], Client], bystander: RemoteEnv
) -> None:
    client = connect()
    world = lead(client, State.RUNNING)
    for _ in range(2):
        assert client.step() == pb.RUNNING
    Gated.gate.clear()
    client.send(step=STEP)
    assert Gated.entered.wait(20)
    client.kill()
    assert world in server.worlds
    Gated.gate.set()
    until(lambda: server.connections == 1 and world not in server.worlds)


@BOTH
def test_a_client_that_is_killed_while_its_reset_world_waits_takes_the_order_back(
    server: Server, connect: Callable[[], Client], bystander: RemoteEnv
) -> None:
    player, caller = connect(), connect()
    world = lead(player, State.RUNNING)
    book = server._registry.find_world(world).resets
    caller.send(reset_world=pb.ResetWorldRequest(world_name=world))
    until(lambda: bool(book._orders))
    caller.kill()
    until(lambda: server.connections == 2)
    assert player.step() == pb.RUNNING  # D-2: what failed has changed nothing
    player.kill()
    until(lambda: server.connections == 1 and world not in server.worlds)


@BOTH
def test_a_killed_client_is_not_waited_for_by_a_reset_world_and_its_world_stays_while_others_are_in(
    server: Server, connect: Callable[[], Client], bystander: RemoteEnv
) -> None:
    player, caller = connect(), connect()
    lead(player, State.UNJOINED)
    player.join("")
    assert player.step() == pb.RUNNING
    book = server._registry.find_world("").resets
    caller.send(reset_world=pb.ResetWorldRequest())
    until(lambda: bool(book._orders))
    player.kill()
    until(lambda: server.connections == 2)
    caller.ask(reset_world=pb.ResetWorldRequest())  # takes the answer of the first one
    assert "" in server.worlds
    caller.kill()
    until(lambda: server.connections == 1)
