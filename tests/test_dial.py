"""Servers that dial out, and trainers that wait for them with `listen://`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import gymnasium
import h2.connection
import h2.events
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from bridge import TLS, Server, make_vec_remote, serve_gym
from bridge.dial import DialListener
from bridge.errors import AddressError, RemoteError, SettingError
from bridge.testing import CountingEnv, make_certificates
from tests.support import server_process, until

SERVE = """
import sys, bridge
server = bridge.serve_gym("CartPole-v1", dial=sys.argv[1], dial_name=sys.argv[2])
print(server.url, flush=True)
server.wait(grace=0.0)
"""


LISTEN = """
import sys
from bridge.dial import DialListener
listener = DialListener("listen://127.0.0.1:0", timeout=60.0)
print(listener.port, flush=True)
sys.stdin.readline()
print([endpoint.name for endpoint in listener.endpoints()], flush=True)
"""


@contextlib.contextmanager
def listening(**keywords: Any) -> Iterator[DialListener]:
    listener = DialListener("listen://127.0.0.1:0", **{"timeout": 30.0, **keywords})
    try:
        yield listener
    finally:
        listener.close()


def dialing(listener: DialListener, name: str, env: Any = "CartPole-v1", **keywords: Any) -> Server:
    return serve_gym(env, dial=f"grpc://127.0.0.1:{listener.port}", dial_name=name, **keywords)


def names(listener: DialListener) -> list[str]:
    return [endpoint.name for endpoint in listener.endpoints()]


def test_slots_on_servers_that_dial_in_are_the_local_environments_and_trainers_follow_each_other() -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    with listening() as listener, dialing(listener, "one"), dialing(listener, "two"):
        until(lambda: names(listener) == ["one", "two"])
        for seed in (1, 2):  # the second trainer gets the servers back that the first one has left
            envs = make_vec_remote(listener, num_envs=3, blocking=True)
            local.action_space.seed(seed)
            observations, _ = envs.reset(seed=seed)
            assert observations.tolist() == local.reset(seed=seed)[0].tolist()
            for _ in range(60):
                actions = local.action_space.sample()
                ours, theirs = envs.step(actions), local.step(actions)
                for one, other in zip(ours[:4], theirs[:4], strict=True):
                    assert one.tolist() == other.tolist()
            assert names(listener) == ["one", "two"]
            envs.close()
            until(lambda: names(listener) == ["one", "two"])


def test_the_processes_of_a_server_dial_each_by_itself() -> None:
    with listening() as listener, dialing(listener, "pc", processes=2) as servers:
        until(lambda: names(listener) == ["pc.0", "pc.1"])
        with pytest.raises(SettingError, match="give dial="):
            servers.dial("grpc://127.0.0.1:1")
        envs = make_vec_remote(listener, num_envs=2, blocking=True)
        envs.reset(seed=0)
        assert len(set(envs.env.urls)) == 2
        envs.close()


def test_a_url_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The server dials before anybody listens.
    with serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{port}"):
        envs = make_vec_remote(f"listen://127.0.0.1:{port}", num_envs=2, blocking=True)
        envs.reset(seed=0)
        assert envs.step(np.array([1, 1]))[1].tolist() == [1.0, 1.0]
        envs.close()


def test_a_trainer_may_begin_to_speak_in_the_same_segment_as_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        trainer.settimeout(30.0)
        with serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{trainer.getsockname()[1]}"):
            sock, _ = trainer.accept()
            with sock:
                sock.settimeout(30.0)
                asked = b""
                while not asked.endswith(b"\r\n\r\n"):
                    asked += sock.recv(4096)
                answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: dm_env_rpc.v1\r\n\r\n"
                speaking = h2.connection.H2Connection()
                speaking.initiate_connection()
                sock.sendall(answer + speaking.data_to_send())
                events: list[Any] = []
                while not any(isinstance(event, h2.events.SettingsAcknowledged) for event in events):
                    data = sock.recv(4096)
                    assert data
                    events += speaking.receive_data(data)


def test_with_tls_and_a_token_the_trainer_is_known_and_strangers_are_refused(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held = make_certificates(tmp_path)
    tls = TLS(certificate=held["server.pem"], key=held["server.key"])
    with listening(token="secret", tls=tls) as listener:
        url = f"grpcs://127.0.0.1:{listener.port}"
        with caplog.at_level(logging.WARNING):
            with serve_gym("CartPole-v1", dial=url, dial_ca=held["ca.pem"]):
                until(lambda: "a token is required" in caplog.text)
            with serve_gym("CartPole-v1", dial=f"{url}?token=wrong", dial_ca=held["ca.pem"]):
                until(lambda: "the token is wrong" in caplog.text)
            with serve_gym("CartPole-v1", dial=f"{url}?token=secret"):  # it knows no CA of the trainer
                until(lambda: "certificate verify failed" in caplog.text)
        assert "secret" not in caplog.text
        with serve_gym("CartPole-v1", dial=f"{url}?token=secret", dial_ca=held["ca.pem"]):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            envs.reset(seed=0)
            for _ in range(30):
                envs.step(envs.action_space.sample())
            envs.close()


def test_a_server_that_is_killed_loses_its_episodes_and_comes_back_under_its_name() -> None:
    with listening() as listener, dialing(listener, "stays"):
        with server_process(SERVE, f"grpc://127.0.0.1:{listener.port}", "goes") as (process, _):
            until(lambda: names(listener) == ["goes", "stays"])
            envs = make_vec_remote(listener, num_envs=4, blocking=True, connect_timeout=60.0)
            envs.reset(seed=1)
            assert sorted(url.partition(":")[2][2:].partition(":")[0] for url in envs.env.urls) == [
                "goes",
                "goes",
                "stays",
                "stays",
            ]
            away = np.array(["goes" in url for url in envs.env.urls])
            process.kill()
            process.wait(30)
            truncated = np.zeros(4, np.int64)
            for _ in range(5):
                _, _, _, truncations, _ = envs.step(np.ones(4, np.int64))
                truncated += truncations
            assert truncated.tolist() == away.astype(int).tolist()
            assert all("stays" in url for url in envs.env.urls)
        with server_process(SERVE, f"grpc://127.0.0.1:{listener.port}", "goes"):
            until(lambda: names(listener) == ["goes", "stays"])
            envs.close()


def test_strangers_are_refused_and_an_honest_server_keeps_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    with listening(token="secret") as listener, dialing(listener, "honest", token="secret"):
        envs = make_vec_remote(listener, num_envs=1, blocking=True)
        envs.reset(seed=0)
        place = ("127.0.0.1", listener.port)
        with contextlib.ExitStack() as stack:
            for number in range(100):  # silent ones, more than are kept
                stranger = stack.enter_context(socket.create_connection(place, 20.0))
                if number % 4 == 1:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    assert stranger.recv(100).startswith(b"HTTP/1.1 404")
                elif number % 4 == 2:
                    stranger.sendall(b"\xff" * 100_000)
                elif number % 4 == 3:
                    stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert envs.step(np.array([number % 2]))[0].shape == (1, 4)
            assert names(listener) == ["honest"]
        request = "GET /gymnasium-bridge/dial HTTP/1.1\r\nUpgrade: dm_env_rpc.v1\r\nName: {}\r\n{}\r\n"
        for name, more, status in (
            ("x", "", b"401"),
            ("x", "Authorization: Bearer wrong\r\n", b"401"),
            ("bad name", "Authorization: Bearer secret\r\n", b"400"),
            ("x" * 64, "Authorization: Bearer secret\r\n", b"400"),
            ("one", "Authorization: Bearer secret\r\n", b"101"),
        ):
            with socket.create_connection(place, 20.0) as stranger:
                stranger.sendall(request.format(name, more).encode())
                assert stranger.recv(100).split(b" ")[1] == status
        until(lambda: names(listener) == ["honest"])  # the last one was let in, and has hung up
        envs.close()


def test_a_stranger_with_a_request_of_a_hundred_fields_is_refused_and_the_listener_goes_on() -> None:
    with listening() as listener:
        for request in (b"GET / HTTP/1.1\r\n", b"GET /gymnasium-bridge/dial HTTP/1.1\r\nUpgrade: dm_env_rpc.v1\r\n"):
            with socket.create_connection(("127.0.0.1", listener.port), 20.0) as stranger:
                stranger.sendall(request + b"a: b\r\n" * 200 + b"\r\n")
                assert stranger.recv(100).startswith(b"HTTP/1.1 404")
        with dialing(listener, "honest"):
            until(lambda: names(listener) == ["honest"])


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the listener is suspended, which needs POSIX")
def test_a_stranger_that_speaks_while_it_goes_for_a_further_one_leaves_the_listener_as_it_is() -> None:
    with server_process(LISTEN) as (process, port), contextlib.ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), 20.0))

        strangers = [connected() for _ in range(65)]
        assert strangers[0].recv(1) == b""  # so all have been accepted: 64 are kept, and the next to go is the second
        os.kill(process.pid, signal.SIGSTOP)
        try:
            connected()
            strangers[1].sendall(b"x")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        with serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{port}", dial_name="honest"):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go on\n")
            assert process.stdout.readline() == "['honest']\n"


def test_a_trainer_whose_answer_has_a_hundred_fields_is_dialed_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        trainer.settimeout(30.0)
        with serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{trainer.getsockname()[1]}"):
            for _ in range(2):
                with trainer.accept()[0] as sock:
                    assert sock.recv(4096).startswith(b"GET ")
                    sock.sendall(b"HTTP/1.1 403 Forbidden\r\n" + b"a: b\r\n" * 200 + b"\r\n")


def test_what_dials_and_does_not_serve_is_avoided() -> None:
    request = b"GET /gymnasium-bridge/dial HTTP/1.1\r\nUpgrade: dm_env_rpc.v1\r\nName: a\r\n\r\n"
    with listening() as listener, dialing(listener, "honest"), socket.socket() as silent:
        silent.connect(("127.0.0.1", listener.port))
        silent.sendall(request)
        assert silent.recv(100).startswith(b"HTTP/1.1 101")
        until(lambda: names(listener) == ["a", "honest"])
        envs = make_vec_remote(listener, num_envs=2, blocking=True, connect_timeout=1.0, timeout=20.0)
        envs.reset(seed=0)
        assert ["honest" in url for url in envs.env.urls] == [True, True]
        envs.close()


def test_a_listener_that_comes_back_gets_the_servers_that_keep_dialing() -> None:
    with listening() as listener:
        port = listener.port
        server = dialing(listener, "one", lambda: CountingEnv(5))
        until(lambda: names(listener) == ["one"])
    with server:
        again = DialListener(f"listen://127.0.0.1:{port}", timeout=30.0)
        assert names(again) == ["one"]
        envs = make_vec_remote(again, num_envs=1, blocking=True)
        envs.reset()
        envs.close()
        again.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("listen://127.0.0.1", AddressError),
        ("listen://127.0.0.1:x", AddressError),
        ("listen://127.0.0.1:0/CartPole-v1", AddressError),
        ("listen://127.0.0.1:0?token=a", AddressError),
        ("listen://0.0.0.0:0", SettingError),
    ],
)
def test_a_url_that_nobody_can_listen_at_is_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="listen://"):
        DialListener(url)


def test_what_cannot_be_dialed_is_refused() -> None:
    with pytest.raises(AddressError, match="grpc://HOST:PORT"):
        serve_gym("CartPole-v1", dial="ws://localhost:1")
    with pytest.raises(AddressError, match="grpc://HOST:PORT"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1/CartPole-v1")
    with pytest.raises(SettingError, match="letters, digits"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1", dial_name="a b")
    with pytest.raises(SettingError, match="grpcio"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1", transport="grpcio")
    with listening(timeout=0.2) as listener, pytest.raises(SettingError, match="at least one endpoint"):
        make_vec_remote(listener, num_envs=1, timeout=5.0)
    with pytest.raises(RemoteError, match="has not dialed in"):
        make_vec_remote("dialed://nobody:77", timeout=5.0)
