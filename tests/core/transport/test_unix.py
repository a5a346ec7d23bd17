"""gRPC over Unix sockets."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1 import tensor_utils

from bridge import Limits, make_remote, make_vec_remote, serve_gym
from bridge.errors import (
    Code,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    SettingError,
)
from bridge.wrappers import BlockingReset
from tests import side_by_side
from tests.large_frames import step_large_frames
from tests.peers import PublicClient
from tests.support import TAXI, LargeArrays, read_property, sampled, until

pytestmark = [
    pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


# The same environments


@pytest.fixture
def over_unix(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Let the tests of fidelity serve over a Unix socket."""

    @contextmanager
    def serve(function: Any, **kwargs: Any) -> Iterator[Any]:
        with serve_gym(function, unix_path=path, **kwargs) as server:
            yield SimpleNamespace(url=server.urls[1])
            until(lambda: server.connections == 0)
            assert server.worlds in ([], [""])

    monkeypatch.setattr(side_by_side, "serve_gym", serve)


@pytest.mark.parametrize("name", sampled(["CartPole", "Taxi", "Blackjack", "Pong", "MiniGrid"], 5))
@pytest.mark.usefixtures("over_unix")
def test_remote_equals_local(name: str) -> None:
    side_by_side.compare_briefly(name)


def test_large_frames_go_both_ways(path: str) -> None:
    with serve_gym(LargeArrays, unix_path=path) as server:
        step_large_frames(server.urls[1])


def test_tcp_and_unix_sockets_mix_in_one_vector(path: str) -> None:
    function = side_by_side.ZOO["Taxi"][0]
    reference = gymnasium.vector.SyncVectorEnv([function] * 3)
    with serve_gym(function) as far, serve_gym(function, unix_path=path) as near:
        envs = BlockingReset(make_vec_remote([far.url, *near.urls]))
        reference.action_space.seed(1)
        side_by_side.assert_identical(envs.reset(seed=3), reference.reset(seed=3))
        for _ in range(100):
            actions = reference.action_space.sample()
            side_by_side.assert_identical(envs.step(actions), reference.step(actions))
        envs.close()
    reference.close()


def test_the_public_client_plays_over_the_socket(path: str) -> None:
    function = side_by_side.ZOO["CartPole"][0]
    local = function()
    with serve_gym(function, unix_path=path) as server:
        client = PublicClient(server, f"unix://{path}")
        client.join()
        client.send(public.ResetRequest(settings={"seed": tensor_utils.pack_tensor(5)}))
        first, _ = local.reset(seed=5)
        _, found = client.step("observation")
        assert np.array_equal(found["observation"], first)
        for count in range(8):
            _, found = client.step("observation", "reward", action=count % 2)
            observation, reward, *_ = local.step(count % 2)
            assert np.array_equal(found["observation"], observation)
            assert found["reward"] == reward
        client.close()
        until(lambda: server.connections == 0)
    local.close()


def test_calls_renders_and_attributes_work(path: str) -> None:
    with serve_gym("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}, unix_path=path) as server:
        env = make_remote(server.urls[1])
        env.reset(seed=0)
        assert env.render().shape == (400, 600, 3)
        env.set_attr("gravity", 1.5)
        assert env.get_attr("gravity") == 1.5
        assert env.server_version is not None
        env.close()


def test_the_property_tells_where_the_socket_is(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        assert read_property(server.urls[1], "server.unix_path") == path


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


# Refusals


def test_one_connection_too_many_is_refused_by_the_limits_name(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, limits=Limits(max_connections=2)) as server:
        first = make_remote(server.urls[1])
        second = make_remote(server.url)  # the limit counts both sockets together
        for url in server.urls:
            with pytest.raises(RefusedError, match="max_connections=2") as caught:
                make_remote(url)
            assert caught.value.code == Code.RESOURCE_EXHAUSTED
        first.close()
        until(lambda: server.connections == 1)
        make_remote(server.urls[1]).close()
        second.close()


def test_a_token_is_asked_for(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path, token="right-token") as server:
        for token in (None, "wrong-token"):
            with pytest.raises(RefusedError, match="token") as caught:
                make_remote(server.urls[1], token=token)
            assert caught.value.code == Code.UNAUTHENTICATED
        make_remote(server.urls[1], token="right-token").close()
        assert server.worlds == []


def test_a_response_beyond_the_limit_is_an_error_and_the_stream_goes_on(path: str) -> None:
    with serve_gym(LargeArrays, unix_path=path, limits=Limits(max_message_bytes=600_000)) as server:
        env = make_remote(server.urls[1], timeout=10.0)
        for _ in range(2):
            with pytest.raises(RefusedError, match="max_message_bytes=600000"):
                env.reset(seed=0)
        with pytest.raises(SettingError, match="larger than max_message_bytes=1000"):
            make_remote(server.urls[1], max_message_bytes=1000, env_kwargs={"a": "b" * 2000})
        env.close()


# Lives of connections


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


def test_stop_gives_open_connections_their_grace(path: str) -> None:
    server = serve_gym("CartPole-v1", unix_path=path)
    env = make_remote(server.urls[1])
    env.reset(seed=0)
    stopper = threading.Thread(target=server.stop, args=(20.0,))
    stopper.start()
    until(lambda: server.draining)
    with pytest.raises(ConnectError, match="stopping and takes no new worlds"):
        make_remote(server.urls[1])
    env.step(0)
    env.close()
    stopper.join(10.0)
    assert not stopper.is_alive()
    assert not os.path.exists(path)


def test_an_environment_over_a_socket_can_be_made_from_its_spec(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        env = make_remote(server.urls[1])
        spec = pickle.loads(pickle.dumps(env.spec))
        assert spec.kwargs["url"] == server.urls[1]
        env.close()


def test_a_path_with_a_space_and_an_environment_id_in_the_query_are_found(tmp_path: Path) -> None:
    with serve_gym(["CartPole-v1", TAXI], unix_path=str(tmp_path / "a b")) as server:
        env = make_remote(f"{server.urls[1]}?env_id={TAXI}")
        assert env.observation_space == gymnasium.spaces.Discrete(500)
        env.close()


def test_nobody_there_is_told_at_once(path: str) -> None:
    with pytest.raises(ConnectError, match=r"no connection: .*Is the server running there"):
        make_remote(f"unix://{path}", timeout=10.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses")
def test_a_client_waits_while_the_servers_queue_is_full(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    connect_ex = socket.socket.connect_ex

    def observed(sock: socket.socket, target: Any) -> int:
        number = connect_ex(sock, target)
        if number == errno.EAGAIN:
            full.set()
        return number

    monkeypatch.setattr(socket.socket, "connect_ex", observed, raising=False)
    with serve_gym("CartPole-v1", unix_path=f"{path}2") as server, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with ThreadPoolExecutor(1) as thread, socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            connecting = thread.submit(make_remote, f"unix://{path}", timeout=20)
            assert full.wait(20)
            os.replace(f"{path}2", path)
            env = connecting.result(20)
        assert env.reset(seed=0)[0].shape == (4,)
        env.close()
        until(lambda: server.connections == 0)


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


def test_a_copy_connects_by_itself_over_the_same_socket(path: str) -> None:
    with serve_gym("CartPole-v1", unix_path=path) as server:
        env = make_remote(server.urls[1])
        other = pickle.loads(pickle.dumps(env))
        assert np.array_equal(other.reset(seed=3)[0], env.reset(seed=3)[0])
        assert other.url == server.urls[1]
        other.close()
        env.close()
