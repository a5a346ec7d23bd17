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
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.server.session import TRANSITIONS, SessionEvent, SessionState
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.peers import HELLO, METHOD, SERVICE
from tests.support import until

# Sends what comes in hexadecimal lines; `ask` answers with what the server answers, `send` waits for nothing.
CLIENT = f"""
import grpc, queue, sys
requests = queue.SimpleQueue()
channel = grpc.insecure_channel(sys.argv[1])
metadata = [("{HELLO}", "1.0")] if sys.argv[2] == "ours" else None
call = channel.stream_stream("/{SERVICE}/{METHOD}")(iter(requests.get, None), metadata=metadata)
for line in sys.stdin:
    word, data = line.split()
    requests.put(bytes.fromhex(data))
    print(next(call).hex() if word == "ask" else "", flush=True)
"""


class Client:
    """A client in a process of its own, which does what it is told until it is killed."""

    def __init__(self, server: Server, kind: str = "another") -> None:
        command = [sys.executable, "-c", CLIENT, f"127.0.0.1:{server.port}", kind]
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
    with serve_gym(Gated) as server:
        yield server
        Gated.gate.set()


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def make(kind: str = "another") -> Client:
            client = Client(server, kind)
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


def lead(client: Client, state: SessionState) -> str:
    """Bring a client into a state; return its world."""
    world = client.create()
    if state is SessionState.UNJOINED:
        return world
    client.join(world)
    if state is SessionState.JOINED:
        return world
    assert client.step() == pb.RUNNING
    if state is SessionState.INTERRUPTED:
        client.ask(reset=pb.ResetRequest())
    if state is SessionState.TERMINATED:
        while client.step() == pb.RUNNING:
            pass
    return world


MORTAL = [state for state in SessionState if (state, SessionEvent.END) in TRANSITIONS]


@pytest.mark.parametrize("kind", ["ours", "another"])
@pytest.mark.parametrize("state", MORTAL, ids=lambda state: state.value)
def test_a_client_that_is_killed_leaves_what_it_should(
    server: Server, connect: Callable[..., Client], bystander: RemoteEnv, state: SessionState, kind: str
) -> None:
    client = connect(kind)
    world = lead(client, state)
    assert (server.connections, len(server.worlds)) == (2, 2)
    client.kill()
    until(lambda: server.connections == 1)
    if (
        state is SessionState.UNJOINED and kind == "another"
    ):  # not a client of this package: it was made for others to join
        assert world in server.worlds
        other = make_remote(f"{server.url}?world={world}")
        other.reset()
        other.close()
    else:
        assert world not in server.worlds


def test_a_client_that_is_killed_in_the_midst_of_a_step_takes_its_world_along(
    server: Server, connect: Callable[..., Client], bystander: RemoteEnv
) -> None:
    client = connect()
    world = lead(client, SessionState.RUNNING)
    for _ in range(2):
        assert client.step() == pb.RUNNING
    Gated.gate.clear()
    client.send(step=STEP)
    assert Gated.entered.wait(20)
    client.kill()
    assert world in server.worlds
    Gated.gate.set()
    until(lambda: server.connections == 1 and world not in server.worlds)


def test_a_client_that_is_killed_while_its_reset_world_waits_takes_the_order_back(
    server: Server, connect: Callable[..., Client], bystander: RemoteEnv
) -> None:
    player, caller = connect(), connect()
    world = lead(player, SessionState.RUNNING)
    caller.send(reset_world=pb.ResetWorldRequest(world_name=world))
    until(lambda: server.status()["requests"] == 1)
    caller.kill()
    until(lambda: server.connections == 2)
    assert player.step() == pb.RUNNING  # D-2: what failed has changed nothing
    player.kill()
    until(lambda: server.connections == 1 and world not in server.worlds)


def test_a_killed_client_is_not_waited_for_by_a_reset_world_and_its_world_stays_while_others_are_in(
    server: Server, connect: Callable[..., Client], bystander: RemoteEnv
) -> None:
    player, caller = connect(), connect()
    lead(player, SessionState.UNJOINED)
    player.join("")
    assert player.step() == pb.RUNNING
    caller.send(reset_world=pb.ResetWorldRequest())
    until(lambda: server.status()["requests"] == 1)
    player.kill()
    until(lambda: server.connections == 2)
    caller.ask(reset_world=pb.ResetWorldRequest())  # takes the answer of the first one
    assert "" in server.worlds
    caller.kill()
    until(lambda: server.connections == 1)
