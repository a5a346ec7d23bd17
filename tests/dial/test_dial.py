"""Servers that dial out, and trainers that wait for them with `listen://`."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import h2.connection
import h2.events
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from bridge import TLS, Server, make_vec_remote, serve_gym
from bridge.cli import main
from bridge.core.transport.credentials import TOKEN_VARIABLE
from bridge.dial import DialListener
from bridge.errors import AddressError, ConnectError, RemoteError, SettingError
from bridge.testing import CountingEnv, make_certificates
from tests.connect_proxy import ConnectProxy
from tests.inside import as_another_machine
from tests.support import server_process, until
from tests.websocket_tools import KEY

SERVE = """
import sys, bridge
server = bridge.serve_gym("CartPole-v1", dial=sys.argv[1], dial_name=sys.argv[2])
print(server.url, flush=True)
server.wait(grace=0.0)
"""


LISTEN = """
import sys
from bridge.cli import main
from bridge.dial import DialListener
listener = DialListener("listen://127.0.0.1:0", timeout=60.0)
print(listener.port, flush=True)
sys.stdin.readline()
print([endpoint.name for endpoint in listener.endpoints()], flush=True)
"""

# An address that leads nowhere: only a proxy knows what it stands for. Loopback is never reached through one.
FAR = "192.0.2.1"


@contextlib.contextmanager
def listening(**keywords: Any) -> Iterator[DialListener]:
    listener = DialListener("listen://127.0.0.1:0", **{"timeout": 30.0, **keywords})
    try:
        yield listener
    finally:
        listener.close()


def dialing(
    listener: DialListener,
    name: str,
    env: Any = "CartPole-v1",
    scheme: str = "grpc",
    host: str = "127.0.0.1",
    **keywords: Any,
) -> Server:
    return serve_gym(env, dial=f"{scheme}://{host}:{listener.port}", dial_name=name, **keywords)


def names(listener: DialListener) -> list[str]:
    return [endpoint.name for endpoint in listener.endpoints()]


@pytest.mark.parametrize("scheme", ["grpc", "ws"])
def test_slots_on_servers_that_dial_in_are_the_local_environments_and_trainers_follow_each_other(scheme: str) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    with listening() as listener, dialing(listener, "one", scheme=scheme), dialing(listener, "two", scheme=scheme):
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


@pytest.mark.slow
def test_the_processes_of_a_server_dial_each_by_itself() -> None:
    with listening() as listener, dialing(listener, "pc", processes=2) as servers:
        until(lambda: names(listener) == ["pc.0", "pc.1"])
        with pytest.raises(SettingError, match="give dial="):
            servers.dial("grpc://127.0.0.1:1")
        envs = make_vec_remote(listener, num_envs=2, blocking=True)
        envs.reset(seed=0)
        assert len(set(envs.env.urls)) == 2
        envs.close()


def test_all_slots_of_a_server_that_has_dialed_go_over_its_one_connection() -> None:
    with listening() as listener, dialing(listener, "one", lambda: CountingEnv(5)):
        envs = make_vec_remote(listener, num_envs=130, blocking=True)
        envs.reset(seed=0)
        assert envs.report()["slots/running"] == 130
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
        messages = [record.getMessage() for record in caplog.records]
        peers = [text.partition(": ")[0] for text in messages if text.startswith("refused ")]
        assert len(peers) == len(set(peers)) > 0, "the trainer logs a refusal once"
        with serve_gym("CartPole-v1", dial=f"{url}?token=secret", dial_ca=held["ca.pem"]):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            envs.reset(seed=0)
            for _ in range(30):
                envs.step(envs.action_space.sample())
            envs.close()


def test_the_environments_token_is_not_dialed_in_the_clear_nor_one_that_was_made_for_the_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(token="secret") as listener:
        url = f"grpc://127.0.0.1:{listener.port}"
        with pytest.warns(RuntimeWarning, match="without TLS"), serve_gym("CartPole-v1", host="0.0.0.0", dial=url):
            until(lambda: "a token is required" in caplog.text)
        assert "the token is wrong" not in caplog.text
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        with serve_gym("CartPole-v1", dial=url, dial_name="near"):
            until(lambda: names(listener) == ["near"])
        as_another_machine(monkeypatch, "core.transport.address")
        caplog.clear()
        with serve_gym("CartPole-v1", dial=url):
            until(lambda: f"{TOKEN_VARIABLE} is not sent unencrypted to another machine" in caplog.text)
        with (
            pytest.warns(RuntimeWarning, match="the token travels unencrypted"),
            serve_gym("CartPole-v1", dial=f"{url}?token=secret", dial_name="told"),
        ):
            until(lambda: names(listener) == ["told"])


def test_a_websocket_carries_one_session_and_a_further_one_waits_for_the_next() -> None:
    with listening() as listener, dialing(listener, "one", scheme="ws") as server:
        envs = make_vec_remote(listener, num_envs=16, blocking=True)
        envs.reset(seed=0)
        for _ in range(30):
            assert not envs.step(envs.action_space.sample())[3].any()
        assert server.status()["connections"] == 16
        envs.close()
        until(lambda: server.status()["connections"] == 0)


def test_a_socket_that_a_trainer_has_taken_is_not_closed_for_a_further_one(caplog: pytest.LogCaptureFixture) -> None:
    armed, taken = threading.Event(), list[Any]()

    def take(frame: Any, event: str, argument: Any) -> None:
        """Act as a trainer's thread: take all sockets the moment that the listener's thread releases its lock."""
        if armed.is_set() and event == "return" and frame.f_code is threading.Condition.__exit__.__code__:
            armed.clear()
            taken.extend(iter(lambda: listener._port.take("page"), None))

    with caplog.at_level(logging.INFO), contextlib.ExitStack() as stack:
        threading.setprofile(take)
        try:
            listener = stack.enter_context(listening())
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
        url = f"ws://127.0.0.1:{listener.port}/gymnasium-bridge/dial?name=page"
        for number in (1, 2, 3):
            if number == 3:
                armed.set()
            stack.enter_context(connect(url, subprotocols=[Subprotocol("dm_env_rpc.v1")]))
            until(lambda: caplog.text.count("page dialed in from") == number)  # noqa: B023 - asked at once
        stack.callback(lambda: [dialed.sock.close() for dialed in taken])
        assert len(taken) == 3
        assert all(dialed.sock.fileno() >= 0 for dialed in taken)


def test_websockets_with_tls_and_a_token_let_servers_in_and_others_are_told_why(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held = make_certificates(tmp_path)
    tls = TLS(certificate=held["server.pem"], key=held["server.key"])
    with listening(token="secret", tls=tls) as listener:
        url = f"wss://127.0.0.1:{listener.port}"
        with (
            caplog.at_level(logging.WARNING),
            serve_gym("CartPole-v1", dial=f"{url}?token=wrong", dial_ca=held["ca.pem"]),
        ):
            until(lambda: "it closed the WebSocket with 4016: the token is wrong" in caplog.text)
        with serve_gym("CartPole-v1", dial=f"{url}?token=secret", dial_ca=held["ca.pem"]):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            envs.reset(seed=0)
            for _ in range(30):
                envs.step(envs.action_space.sample())
            envs.close()


def test_a_page_of_another_site_needs_a_token_and_a_request_that_is_none_is_refused() -> None:
    path = "gymnasium-bridge/dial?name=page"
    with listening() as listener, listening(token="secret") as guarded:

        def code(port: int, *more: str, name: str = "page", **keywords: Any) -> int:
            """Return the code that a WebSocket is closed with at once; 0: it stays open."""
            url = f"ws://127.0.0.1:{port}/{path.replace('=page', f'={name}')}"
            names = [Subprotocol(text) for text in ("dm_env_rpc.v1", *more)]
            # Nobody has taken what is dialled, so nobody reads that it is closed: the default is 10 s.
            with connect(url, subprotocols=names, close_timeout=0.2, **keywords) as socket:
                with contextlib.suppress(TimeoutError):
                    socket.recv(timeout=0.5)
                    raise AssertionError("something came before anything was asked")
                return 0

        def refused(port: int, *more: str, **keywords: Any) -> int:
            with pytest.raises(ConnectionClosed) as caught:
                code(port, *more, **keywords)
            assert caught.value.rcvd is not None
            return caught.value.rcvd.code

        assert refused(listener.port, origin=Origin("http://elsewhere.example")) == 4007
        assert refused(listener.port, origin=Origin("null")) == 4007
        assert refused(listener.port, name="a%20b") == 4003
        assert code(listener.port, origin=Origin("http://localhost:8000")) == 0
        token = "bridge.token.c2VjcmV0"  # in base64url without padding
        assert refused(guarded.port, origin=Origin("http://elsewhere.example")) == 4016
        assert code(guarded.port, token, origin=Origin("http://elsewhere.example")) == 0
        path = "elsewhere"
        with pytest.raises(InvalidStatus):
            code(listener.port)


def test_a_server_dials_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def relay(proxy: socket.socket) -> None:
        near, _ = proxy.accept()
        with near:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += near.recv(4096)
            asked.append(head)
            _, _, port = head.split(b" ")[1].decode().partition(":")
            with socket.create_connection(("127.0.0.1", int(port)), 30.0) as far:
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                pump(near, far)
                back.join()

    def pump(come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(65536):
                go.sendall(data)
            go.shutdown(socket.SHUT_WR)

    with listening() as listener, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:pass%20word@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        thread = threading.Thread(target=relay, args=(proxy,))
        thread.start()
        with dialing(listener, "one", host=FAR):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            envs.reset(seed=0)
            assert envs.step(np.array([1, 1]))[1].tolist() == [1.0, 1.0]
            envs.close()
        thread.join(30)
        credentials = base64.b64encode(b"me:pass word").decode()
        assert asked[0].startswith(f"CONNECT {FAR}:{listener.port} HTTP/1.1\r\n".encode())
        assert f"Proxy-Authorization: Basic {credentials}\r\n".encode() in asked[0]


def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as listener, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        with caplog.at_level(logging.WARNING), dialing(listener, "one", host=FAR):
            with proxy.accept()[0] as sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            until(lambda: "answered 'HTTP/1.1 403 Forbidden'" in caplog.text)


def test_a_server_whose_proxy_has_no_readable_url_tells_it_and_goes_on_dialing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:none")
    monkeypatch.setenv("no_proxy", "")
    with listening() as listener, caplog.at_level(logging.WARNING), dialing(listener, "one", host=FAR):
        until(lambda: "'none'" in caplog.text)
        with ConnectProxy() as proxy:
            monkeypatch.setenv("http_proxy", proxy.url)
            assert names(listener) == ["one"]


def test_a_server_stops_soon_while_its_trainer_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        server = serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{trainer.getsockname()[1]}")
        with trainer.accept()[0] as silent:
            assert silent.recv(4096).startswith(b"GET ")
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            stopping.join(10.0)
            assert not stopping.is_alive()
        stopping.join()
    until(lambda: all(thread.name != "bridge-dialing" for thread in threading.enumerate()))


@pytest.mark.slow
def test_a_name_that_two_servers_have_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> bool:
        return any("the name twin is in use already" in message for message in caplog.messages)

    with listening() as listener, dialing(listener, "twin"), dialing(listener, "other"):
        until(lambda: names(listener) == ["other", "twin"])
        envs = make_vec_remote(listener, num_envs=2, blocking=True)
        envs.reset(seed=1)
        assert not told()
        with dialing(listener, "twin"):
            until(told)
        envs.close()
    # Also where no trainer has taken either of them.
    caplog.clear()
    with listening() as listener, dialing(listener, "twin"), dialing(listener, "twin"):
        until(told)


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


def test_a_token_that_is_no_text_of_base64_is_a_wrong_one_and_the_listener_goes_on() -> None:
    offer = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: dm_env_rpc.v1, bridge.token.\xfc\r\n\r\n"
    head = f"GET /gymnasium-bridge/dial?name=x HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: {KEY}\r\n{offer}"
    with listening(token="secret") as listener:
        with socket.create_connection(("127.0.0.1", listener.port), 20.0) as stranger:
            stranger.sendall(head.encode("latin-1"))
            with stranger.makefile("rb") as answer:
                assert b"a token is required" in answer.read()
        with dialing(listener, "honest", token="secret"):
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


def test_what_a_trainer_answers_obeys_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        trainer.settimeout(30.0)
        with serve_gym("CartPole-v1", dial=f"grpc://127.0.0.1:{trainer.getsockname()[1]}"):
            with trainer.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 403 \x1b[2J\r\n\r\n\x1b]0;title\x07not you")
            until(lambda: "not you" in caplog.text)
    assert all(character.isprintable() or character == "\n" for character in caplog.text)


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


def test_a_listener_stays_with_its_process() -> None:
    with listening() as listener, dialing(listener, "one"):
        until(lambda: names(listener) == ["one"])
        with pytest.raises(TypeError, match="make one there"):
            pickle.dumps(listener)
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    found = listener.endpoints()
                    listener.close()
                    os._exit(0 if found == [] else 1)
                os._exit(2)
            assert os.waitpid(child, 0)[1] == 0
        envs = make_vec_remote(listener, num_envs=1, blocking=True)
        envs.reset(seed=0)
        envs.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("listen://127.0.0.1", AddressError),
        ("listen://127.0.0.1:x", AddressError),
        ("listen://[::1", AddressError),
        ("listen://127.0.0.1:0/CartPole-v1", AddressError),
        ("listen://127.0.0.1:0?token=a", AddressError),
        ("listen://0.0.0.0:0", SettingError),
    ],
)
def test_a_url_that_nobody_can_listen_at_is_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="listen://"):
        DialListener(url)


@pytest.mark.parametrize("scheme", ["grpc", "ws"])
def test_info_and_bench_listen_for_a_server(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve_gym("CartPole-v1", dial=f"{scheme}://127.0.0.1:{port}", dial_name="one", token="a"):
        url = f"listen://127.0.0.1:{port}"
        assert main(["info", url, "--token", "a"]) == 0
        said = capsys.readouterr().out
        assert "CartPole-v1, a single environment" in said
        assert f'envs = make_vec_remote("{url}", num_envs=1, blocking=True, token=…)' in said
        assert main(["bench", url, "--token", "a", "--num-envs", "2", "--seconds", "0.1"]) == 0
        assert f"{url}: 2 environments" in capsys.readouterr().out
        assert main(["check", url, "--token", "a", "--only", "D-1,D-9"]) == (0 if scheme == "ws" else 2)


def test_the_help_of_check_says_which_servers_that_dial_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "listen://HOST:PORT, which waits --timeout seconds for a server that dials by WebSocket, without TLS" in said
    assert "gymnasium-bridge check listen://" in said


def test_info_says_that_nobody_has_dialed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "listen://127.0.0.1:0", "--timeout", "0.1"]) == 1
    assert "no server has dialed in within 0.1 s" in capsys.readouterr().err


def test_what_cannot_be_dialed_is_refused() -> None:
    with pytest.raises(AddressError, match="grpc://HOST:PORT"):
        serve_gym("CartPole-v1", dial="unix:///tmp/socket")
    with pytest.raises(AddressError, match="grpc://HOST:PORT"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1/CartPole-v1")
    with pytest.raises(SettingError, match="letters, digits"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1", dial_name="a b")
    with pytest.raises(SettingError, match="grpcio"):
        serve_gym("CartPole-v1", dial="grpc://localhost:1", transport="grpcio")
    with listening(timeout=0.2) as listener, pytest.raises(ConnectError, match=r"within 0\.2 s"):
        make_vec_remote(listener, num_envs=1, timeout=5.0)
    with pytest.raises(RemoteError, match="has not dialed in"):
        make_vec_remote("dialed://nobody:77", timeout=5.0)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_vector_to_which_nobody_dials_says_so_as_the_command_does(
    blocking: bool, num_envs: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):  # it was another error by chance
        with pytest.raises(ConnectError, match=r"no server has dialed in within 0\.2 s: is it started with `--dial`\?"):
            make_vec_remote("listen://127.0.0.1:0", timeout=0.2, num_envs=num_envs, blocking=blocking)
    assert main(["info", "listen://127.0.0.1:0", "--timeout", "0.2"]) == 1
    assert "no server has dialed in within 0.2 s: is it started with `--dial`?" in capsys.readouterr().err


@pytest.mark.parametrize("own", [0.1, 0.2, 30.0])
def test_of_a_listener_and_its_vector_the_shorter_timeout_says_that_nobody_dials(own: float) -> None:
    with listening(timeout=own) as listener, pytest.raises(ConnectError, match=rf"within {min(own, 0.2)} s: is it"):
        make_vec_remote(listener, num_envs=2, timeout=0.2)
