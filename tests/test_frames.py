"""The local transport: messages as frames over Unix and TCP sockets, with the same session behind them."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import local, make_remote, make_vec_remote, serve_gym
from bridge.client.connect import connect
from bridge.client.inbox import Inbox
from bridge.errors import (
    AddressError,
    Code,
    ConnectError,
    ConnectionLostError,
    PeerError,
    RefusedError,
    RequestError,
    SettingError,
)
from bridge.frames import HEADER, MAX_HELLO_BYTES, FrameReader, Hello, RefusedFrame, pack_frame
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset
from tests import test_fidelity
from tests.support import SmallNumbers, until

pytestmark = [
    pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Frames(gymnasium.Env[Any, Any]):
    """Gives large observations, and takes large actions."""

    observation_space = gymnasium.spaces.Box(0, 255, (700, 1000), np.uint8)
    action_space = gymnasium.spaces.Box(0, 255, (700, 1000), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros((700, 1000), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action + np.uint8(1), float(action.sum(dtype=np.int64)), False, False, {}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


# Frames


@pytest.mark.parametrize("size", [0, 1, 300, 200_000])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 16])
def test_frames_come_out_of_any_cut_of_the_stream(size: int, chunk: int) -> None:
    payloads = [b"hello", os.urandom(size), b"", b"end"]
    stream = b"".join(map(pack_frame, payloads))
    if size * 1.0 / chunk > 50_000:
        stream, payloads = b"".join(map(pack_frame, payloads[::2])), payloads[::2]
    reader = FrameReader(1 << 20)
    found: list[bytes | bytearray] = []
    position = 0
    while position < len(stream):
        space = reader.space
        if space is None:
            found += reader.feed(stream[position : position + chunk])
            position += chunk
        else:
            count = min(len(space), chunk)
            space[:count] = stream[position : position + count]
            found += reader.filled(count)
            position += count
    assert [bytes(frame) for frame in found] == payloads
    assert not reader.partial


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken() -> None:
    reader = FrameReader(1000)
    with pytest.raises(RequestError, match=f"hello of at most {MAX_HELLO_BYTES} bytes") as caught:
        reader.feed(HEADER.pack(MAX_HELLO_BYTES + 1))
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    reader = FrameReader(1000)
    assert reader.feed(pack_frame(b"hello") + pack_frame(b"x" * 1000)) == [b"hello", b"x" * 1000]
    with pytest.raises(RequestError, match="1001 bytes is larger than max_message_bytes=1000"):
        reader.feed(HEADER.pack(1001))


@pytest.mark.parametrize("chunk", [7_001, 1 << 16])
def test_a_large_frame_that_is_not_admitted_is_dropped_and_its_place_is_kept(chunk: int) -> None:
    asked: list[int] = []

    def admit(size: int) -> None:
        asked.append(size)
        if size == 200_000:
            raise RequestError(Code.RESOURCE_EXHAUSTED, "no room")

    stream = b"".join(map(pack_frame, [b"hello", b"a" * 200_000, b"b", b"c" * 100_000, b"d" * 200_000]))
    reader = FrameReader(1 << 20, admit=admit)
    found: list[bytes | bytearray] = []
    for position in range(0, len(stream), chunk):
        data = stream[position : position + chunk]
        while (space := reader.space) is not None and data:
            assert len(space) <= 100_000
            count = min(len(space), len(data))
            space[:count] = data[:count]
            found += reader.filled(count)
            data = data[count:]
        found += reader.feed(data)
    assert [bytes(frame) for frame in found] == [b"hello", b"", b"b", b"c" * 100_000, b""]
    assert [frame.error.message for frame in found if isinstance(frame, RefusedFrame)] == ["no room"] * 2
    assert asked == [200_000, 100_000, 200_000]
    assert not reader.partial


def test_a_hello_comes_back_as_it_was() -> None:
    for hello in (Hello(), Hello(token="t"), Hello(server="id"), Hello(code=8, message="full")):
        assert Hello.unpack(hello.pack()) == hello


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"gymnasium-bridge": 3}',
        b"[" * 9000,
        b"1",
        b'{"gymnasium-bridge": "1", "token": 0}',
    ],
)
def test_what_is_no_hello_is_told(payload: bytes) -> None:
    with pytest.raises(RequestError, match="expected a hello") as caught:
        Hello.unpack(payload)
    assert caught.value.code is Code.INVALID_ARGUMENT


# The same environments


@pytest.fixture(params=["unix", "tcp", "grpc that finds the Unix socket"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Let the tests of fidelity serve over another transport."""
    kind: str = request.param

    @contextmanager
    def serve(function: Any, **kwargs: Any) -> Iterator[Any]:
        extra: dict[str, Any] = {"tcp_port": 0} if kind == "tcp" else {"unix_path": str(tmp_path / "s")}
        with serve_gym(function, **extra, **kwargs) as server:
            yield SimpleNamespace(url=server.url if kind.startswith("grpc") else server.urls[1])
            until(lambda: server.connections == 0)
            assert server.worlds in ([], [""])

    monkeypatch.setattr(test_fidelity, "serve_gym", serve)
    return kind


@pytest.mark.parametrize("name", ["CartPole", "Taxi", "Blackjack", "Pong", "MiniGrid"])
def test_remote_equals_local(name: str, transport: str) -> None:
    function, steps, vector_steps = test_fidelity.ZOO[name]
    slow = name == "Pong"
    test_fidelity.compare_one(function, min(steps, 40 if slow else 150))
    test_fidelity.compare_many(function, 3, 1, min(vector_steps, 8 if slow else 25))
    test_fidelity.compare_many(function, 4, 2, min(vector_steps, 8 if slow else 25))


@pytest.mark.parametrize("name", EVERY_SPACE)
def test_every_space_arrives_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def serve(function: Any, **kwargs: Any) -> Iterator[Any]:
        with serve_gym(function, unix_path=str(tmp_path / "s"), **kwargs) as server:
            yield SimpleNamespace(url=server.urls[1])

    monkeypatch.setattr(test_fidelity, "serve_gym", serve)
    actions = None if name in ("dict_empty", "tuple_empty", "tuple_of_empty_ones") else EVERY_SPACE[name]()
    test_fidelity.compare_one(lambda: SpaceEnv(EVERY_SPACE[name](), actions), 12)
    test_fidelity.compare_many(lambda: SmallNumbers(SpaceEnv(EVERY_SPACE[name](), actions)), 2, 2, 8)


def step_large_frames(url: str, **keywords: Any) -> None:
    envs = BlockingReset(make_vec_remote(url, num_envs=3, **keywords))
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 255, (3, 700, 1000), np.uint8)
    for _ in range(3):
        observations, rewards, *_ = envs.step(actions)
        assert np.array_equal(observations, actions + np.uint8(1))
        assert rewards.tolist() == actions.sum((1, 2), dtype=np.int64).tolist()
    envs.close()


@pytest.mark.parametrize("kind", [1, 2])
def test_large_frames_go_both_ways(kind: int, path: str) -> None:
    with serve_gym(Frames, unix_path=path, tcp_port=0) as server:
        step_large_frames(server.urls[kind])


def test_grpc_and_sockets_mix_in_one_vector(path: str) -> None:
    function = test_fidelity.ZOO["Taxi"][0]
    reference = gymnasium.vector.SyncVectorEnv([function] * 3)
    with serve_gym(function) as far, serve_gym(function, unix_path=path, tcp_port=0) as near:
        envs = BlockingReset(make_vec_remote([far.url, *near.urls[1:]]))
        reference.action_space.seed(1)
        test_fidelity.assert_identical(envs.reset(seed=3), reference.reset(seed=3))
        for _ in range(100):
            actions = reference.action_space.sample()
            test_fidelity.assert_identical(envs.step(actions), reference.step(actions))
        envs.close()
    reference.close()


def test_a_client_of_sockets_alone_has_no_thread(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, tcp_port=0) as server:
        before = set(threading.enumerate())
        envs = make_vec_remote(server.urls[1:], num_envs=8)
        assert set(threading.enumerate()) == before
        envs.close()


def test_calls_renders_and_attributes_work(path: str) -> None:
    with serve_gym("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}, unix_path=path) as server:
        env = make_remote(server.urls[1])
        env.reset(seed=0)
        assert env.render().shape == (400, 600, 3)
        env.set_attr("gravity", 1.5)
        assert env.get_attr("gravity") == 1.5
        assert env.server_version is not None
        env.close()


# Finding the socket


def test_a_client_on_the_same_machine_takes_the_socket_unless_told_otherwise(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        assert server.urls == [server.url, f"unix://{path}"]
        for transport, kind in ((None, "FrameDialect"), ("grpc", "GrpcDialect")):
            env = make_remote(server.url, transport=transport)
            assert type(env._remote._connection.link.dialect).__name__ == kind
            assert env.url == server.url
            env.reset(seed=0)
            env.close()
        with pytest.raises(SettingError, match="expected transport to be None or 'grpc'"):
            make_remote(server.url, transport="pigeon")


def test_without_a_socket_it_is_grpc() -> None:
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        assert type(env._remote._connection.link.dialect).__name__ == "GrpcDialect"
        env.close()


def test_the_property_tells_where_the_socket_is(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        tree = server._registry.properties()
        assert tree.read("server.unix_path").strings.array[0] == path


def test_a_note_whose_socket_is_dead_or_whose_server_is_another_is_not_followed(path: str, tmp_path: Path) -> None:
    with serve_gym("CartPole-v1") as server:
        stale = local.publish(server.port, str(tmp_path / "nobody"), "id")
        assert stale is not None
        env = make_remote(server.url)  # gRPC, as the socket is not there
        env.close()
        stale.withdraw()
        with serve_gym("CartPole-v1", unix_path=path):
            wrong = local.publish(server.port, path, "the id of another server")
            assert wrong is not None
            with pytest.raises(ConnectError, match="another server answers"):
                make_remote(server.url)
            wrong.withdraw()


def test_notes_are_found_only_on_this_machine_and_go_with_the_server(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        offer = local.find("127.0.0.1", server.port)
        assert offer is not None
        assert stat.S_IMODE(os.stat(os.path.dirname(offer.note)).st_mode) == 0o700
        assert local.find("192.0.2.1", server.port) is None
    assert local.find("127.0.0.1", server.port) is None
    assert not os.path.exists(offer.note)


# Socket files


def test_the_socket_is_its_users_own_and_goes_with_the_server(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)


def test_the_socket_of_a_killed_server_is_replaced(path: str) -> None:
    script = (
        "import sys, bridge; server = bridge.serve_gym('CartPole-v1', unix_path=sys.argv[1]);"
        "print('up', flush=True); server.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with pytest.raises(SettingError, match="a server listens there"):
            serve_gym("CartPole-v1", unix_path=path)
        process.kill()
    assert os.path.exists(path)
    with serve_gym("CartPole-v1", unix_path=path) as server:
        make_remote(server.urls[1]).close()


def test_a_file_that_is_no_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("precious")
    with pytest.raises(SettingError, match="cannot listen on unix_path"):
        serve_gym("CartPole-v1", unix_path=path)
    assert Path(path).read_text() == "precious"
    with pytest.raises(SettingError, match="cannot listen on unix_path"):
        serve_gym("CartPole-v1", unix_path=f"{path}/no/folder")
    with pytest.raises(SettingError, match="about 100 bytes"):
        serve_gym("CartPole-v1", unix_path=path + "x" * 200)


def test_a_port_in_use_is_told() -> None:
    with serve_gym("CartPole-v1", tcp_port=0) as server:
        port = int(server.urls[1].rpartition(":")[2])
        with pytest.raises(SettingError, match=f"cannot listen on tcp_port={port}"):
            serve_gym("CartPole-v1", tcp_port=port)
    with pytest.raises(SettingError, match="expected tcp_port"):
        serve_gym("CartPole-v1", tcp_port=-1)


# Refusals and garbage


def hello_of(sock: socket.socket) -> Hello:
    return Hello.unpack(frame_of(sock))


def frame_of(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < 4 or len(data) < 4 + HEADER.unpack(data[:4])[0]:
        part = sock.recv(1 if len(data) < 4 else 4 + HEADER.unpack(data[:4])[0] - len(data))
        assert part, f"the stream ended after {data!r}"
        data += part
    return data[4:]


@contextmanager
def raw(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10.0)
        sock.connect(path)
        yield sock


def test_one_connection_too_many_is_refused_by_the_limits_name(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, max_connections=2) as server:
        first = make_remote(server.urls[1])
        second = make_remote(server.url, transport="grpc")  # the limit is of all transports together
        for url in server.urls:
            with pytest.raises(RefusedError, match="max_connections=2") as caught:
                make_remote(url, transport="grpc")
            assert caught.value.code == Code.RESOURCE_EXHAUSTED
        first.close()
        until(lambda: server.connections == 1)
        make_remote(server.urls[1]).close()
        second.close()


def test_a_token_is_asked_for_on_every_transport(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, tcp_port=0, token="right-token") as server:
        for url in server.urls[1:]:
            for token in (None, "wrong-token"):
                with pytest.raises(RefusedError, match="token") as caught:
                    make_remote(url, token=token)
                assert caught.value.code == Code.UNAUTHENTICATED
            make_remote(url, token="right-token").close()
        assert server.worlds == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\0\0\0\0",
        pack_frame(b"no hello"),
        HEADER.pack(MAX_HELLO_BYTES + 1),
    ],
)
def test_garbage_ends_its_own_connection_and_no_other(garbage: bytes, path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        env = make_remote(server.urls[1])
        env.reset(seed=0)
        with raw(path) as sock:
            sock.sendall(garbage)
            hello = hello_of(sock)
            assert hello.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
            assert "expected a hello" in hello.message
            assert sock.recv(1) == b""
        env.step(0)
        assert server.connections == 1
        env.close()


def test_a_message_of_garbage_is_answered_and_the_stream_goes_on(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, max_message_bytes=5000), raw(path) as sock:
        sock.sendall(pack_frame(Hello().pack()) + pack_frame(b"\xff\xff\xff"))
        assert hello_of(sock).server
        answer = pb.EnvironmentResponse.FromString(frame_of(sock))
        assert answer.error.code == Code.INVALID_ARGUMENT
        sock.sendall(pack_frame(pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()).SerializeToString()))
        assert pb.EnvironmentResponse.FromString(frame_of(sock)).create_world.world_name
        sock.sendall(HEADER.pack(5001))  # from here on nothing can be read
        answer = pb.EnvironmentResponse.FromString(frame_of(sock))
        assert answer.error.code == Code.RESOURCE_EXHAUSTED
        assert "max_message_bytes=5000" in answer.error.message
        assert sock.recv(1) == b""


def test_a_response_beyond_the_limit_is_an_error_and_the_stream_goes_on(path: str) -> None:
    with serve_gym(Frames, unix_path=path, max_message_bytes=600_000) as server:
        env = make_remote(server.urls[1], timeout=10.0)
        for _ in range(2):
            with pytest.raises(RefusedError, match="max_message_bytes=600000"):
                env.reset(seed=0)
        with pytest.raises(SettingError, match="larger than max_message_bytes=1000"):
            make_remote(server.urls[1], max_message_bytes=1000, env_kwargs={"a": "b" * 2000})
        env.close()


def test_half_a_frame_and_a_silent_client_hold_up_nobody(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server, raw(path) as silent, raw(path) as half:
        half.sendall(pack_frame(Hello().pack()) + b"\0\0\1")
        env = make_remote(server.urls[1])
        env.reset(seed=0)
        env.step(0)
        env.close()
        assert silent.fileno() >= 0


def test_a_client_that_does_not_read_holds_up_nobody(path: str) -> None:
    with serve_gym(Frames, unix_path=path) as server, raw(path) as greedy:
        wish = pb.EnvironmentRequest(create_world=pb.CreateWorldRequest())
        greedy.sendall(pack_frame(Hello().pack()) + pack_frame(wish.SerializeToString()))
        hello_of(greedy)
        name = pb.EnvironmentResponse.FromString(frame_of(greedy)).create_world.world_name
        join = pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=name))
        step = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[1]))
        reset = pb.EnvironmentRequest(reset=pb.ResetRequest())
        greedy.sendall(b"".join(pack_frame(request.SerializeToString()) for request in [join, *[step, reset] * 50]))
        env = make_remote(server.urls[1])
        env.reset(seed=0)
        env.close()
        kinds = [pb.EnvironmentResponse.FromString(frame_of(greedy)).WhichOneof("payload") for _ in range(101)]
        assert kinds == ["join_world", *["step", "reset"] * 50]


# Lives of connections


def test_a_world_goes_with_a_client_that_is_killed(path: str) -> None:
    script = (
        "import sys, bridge; e = bridge.make_remote(sys.argv[1]); e.reset(); print('up', flush=True); sys.stdin.read()"
    )
    with serve_gym("CartPole-v1", unix_path=path) as server:
        arguments = [sys.executable, "-c", script, server.urls[1]]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert len(server.worlds) == 1
            process.kill()
        until(lambda: server.connections == 0 and not server.worlds)


def test_a_lost_server_is_told_and_reset_connects_again(path: str) -> None:
    server = serve_gym("CartPole-v1", unix_path=path)
    env = make_remote(server.urls[1], timeout=10.0)
    env.reset(seed=0)
    server.stop()
    with pytest.raises(ConnectionLostError, match=r"ended the stream|was lost"):
        env.step(0)
    with pytest.raises(ConnectError, match="no connection"):
        env.reset()
    with serve_gym("CartPole-v1", unix_path=path):
        env.reset(seed=0)
        env.step(0)
        env.close()


@pytest.mark.parametrize("url", ["unix:///nobody/is/here", "tcp://127.0.0.1:1"])
def test_nobody_there_is_told_at_once(url: str) -> None:
    with pytest.raises(ConnectError, match=r"no connection: .*Is the server running there"):
        make_remote(url, timeout=10.0)


def test_a_grpc_port_is_told_apart() -> None:
    with serve_gym("CartPole-v1") as server, pytest.raises((ConnectError, PeerError, ConnectionLostError)):
        make_remote(f"tcp://127.0.0.1:{server.port}", timeout=10.0)


def test_stop_gives_open_connections_their_grace(path: str) -> None:
    server = serve_gym("CartPole-v1", unix_path=path)
    env = make_remote(server.urls[1])
    env.reset(seed=0)
    stopper = threading.Thread(target=server.stop, args=(20.0,))
    stopper.start()
    until(lambda: not os.path.exists(path))
    env.step(0)
    env.close()
    stopper.join(10.0)
    assert not stopper.is_alive()


def test_an_agent_that_may_wait_holds_up_no_other_connection(path: str) -> None:
    """A session whose agent waits gets a thread of its own, so the others are served meanwhile."""
    from bridge.worlds.gym import GymAgent

    gate, entered = threading.Event(), threading.Event()
    apply = GymAgent.apply

    class Waiting(GymAgent):
        may_wait = True

        def apply(self, action: Any) -> int:
            entered.set()
            assert gate.wait(20.0)
            return apply(self, action)

    from bridge.worlds import gym as module

    with pytest.MonkeyPatch.context() as patch, serve_gym("CartPole-v1", unix_path=path) as server:
        patch.setattr(module, "GymAgent", Waiting)
        slow = BlockingReset(make_vec_remote(server.urls[1]))
        patch.undo()
        slow.reset(seed=0)
        slow.send(np.array([0]))
        assert entered.wait(10.0)
        fast = make_remote(server.urls[1])
        fast.reset(seed=0)
        fast.step(1)
        fast.close()
        gate.set()
        assert slow.recv(at_least=1)[0].tolist() == [0]
        slow.close()
        until(lambda: server.connections == 0)


def test_an_environment_over_a_socket_can_be_made_from_its_spec(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        env = make_remote(server.urls[1])
        spec = pickle.loads(pickle.dumps(env.spec))
        assert spec.kwargs["url"] == server.urls[1]
        env.close()


# Addresses


def test_a_unix_url_names_path_environment_and_settings(tmp_path: Path) -> None:
    from bridge.address import parse_address

    address = parse_address("unix:///run/my%20env?env_id=ALE/Pong-v5&num_envs=8")
    assert (address.path, address.env_id, address.settings) == ("/run/my env", "ALE/Pong-v5", (("num_envs", "8"),))
    assert parse_address("unix:///run/s?world=w").world == "w"
    assert parse_address("tcp://h:5/CartPole-v1").env_id == "CartPole-v1"
    for url in ("unix://run/s", "unix:///", "unix:s", "tcp://h", "tcp://:5"):
        with pytest.raises(AddressError):
            parse_address(url)
    with serve_gym(["CartPole-v1", "Taxi-v4"], unix_path=str(tmp_path / "a b")) as server:
        env = make_remote(f"{server.urls[1]}?env_id=Taxi-v4")
        assert env.observation_space == gymnasium.spaces.Discrete(500)
        env.close()


# The inbox


def test_an_inbox_gives_what_comes_at_its_sockets_and_then_what_is_there() -> None:
    inbox: Inbox[str] = Inbox()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox.watch(ours, 1, lambda events: inbox.put(ours.recv(10).decode()))
        with pytest.raises(queue.Empty):
            inbox.get(0.0)
        timer = threading.Timer(0.05, theirs.send, [b"by socket"])
        timer.start()
        assert inbox.get(10.0) == "by socket"
        timer.join()
        inbox.forget(ours)
        inbox.put("without sockets")
        assert inbox.get(1.0) == "without sockets"


def test_sending_to_a_server_that_reads_nothing_is_no_deadlock(path: str) -> None:
    """What the socket does not take is kept, and goes on its way while answers are waited for."""
    from bridge.address import parse_address

    got: list[Any] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        inbox: Inbox[Any] = Inbox()
        connection = connect(parse_address(f"unix://{path}"), inbox, got.append, 1 << 26)
        server, _ = listener.accept()
        with server:
            server.sendall(pack_frame(Hello(server="x").pack()) + pack_frame(b"y" * 3_000_000)[: 1 << 17])
            reader = threading.Thread(target=lambda: [frame_of(server) for _ in range(2)])
            timer = threading.Timer(0.1, reader.start)
            timer.start()
            connection.send(b"z" * 8_000_000)
            timer.join()
            reader.join(10.0)
            assert not reader.is_alive()
            connection.close(0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_connects_anew_and_leaves_the_parents_sockets_alone(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        envs = BlockingReset(make_vec_remote(server.urls[1], num_envs=2))
        first, _ = envs.reset(seed=0)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = int(not np.array_equal(envs.reset(seed=0)[0], first))
                envs.step(np.array([0, 1]))
                envs.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for _ in range(3):
            envs.step(np.array([0, 1]))
        envs.close()


def test_a_copy_connects_by_itself_over_the_same_transport(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        env = make_remote(server.url)
        other = pickle.loads(pickle.dumps(env))
        assert np.array_equal(other.reset(seed=3)[0], env.reset(seed=3)[0])
        assert type(other._remote._connection.link.dialect).__name__ == "FrameDialect"
        other.close()
        env.close()
