"""TLS: one end without a socket, both ends over sockets, and strangers, who can do nothing to the others."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge import TLS, Limits, make_remote, make_vec_remote, serve_gym
from bridge.core.transport.credentials import TOKEN_VARIABLE, ClientCredentials
from bridge.core.transport.frames import PREFACE
from bridge.core.transport.tls import Tls, client_context, server_context
from bridge.errors import Code, ConnectError, ConnectionLostError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, make_certificates
from bridge.wrappers import BlockingReset
from tests import side_by_side
from tests.inside import Call
from tests.large_frames import step_large_frames
from tests.support import LargeArrays, until


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def tls(certs: dict[str, Path]) -> dict[str, Any]:
    """A server's keywords."""
    return {"tls": TLS(certs["server.pem"], certs["server.key"])}


@pytest.fixture
def both(certs: dict[str, Path]) -> tuple[Tls, Tls]:
    """A client's end and a server's."""
    held = ClientCredentials(tls_ca=certs["ca.pem"].read_bytes())
    server = server_context(certs["server.pem"].read_bytes(), certs["server.key"].read_bytes(), None)
    return Tls(client_context(held), "localhost"), Tls(server)


# One end


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_the_stream_comes_out_of_any_cut_of_the_wire(both: tuple[Tls, Tls], most: int) -> None:
    client, server = both
    rng = random.Random(most)
    said = rng.randbytes(3_000 if most < 100 else 200_000)
    heard = b""
    client.receive(b"")
    wire = {client: client.send(), server: b""}
    spoken = False
    while any(wire.values()):
        for end, other in ((client, server), (server, client)):
            piece, wire[end] = wire[end][:most], wire[end][most:]
            plain = other.receive(piece)
            heard += plain if other is server else b""
            wire[other] += other.send()
        if client.ready and not spoken:
            spoken = True
            wire[client] += client.send([said[:1000], b"", memoryview(said)[1000:]])
    assert heard == said
    assert server.ready
    assert not server.has_output


def test_what_was_changed_on_its_way_is_an_error(both: tuple[Tls, Tls]) -> None:
    client, server = both
    client.receive(b"")
    while not (client.ready and server.ready):
        server.receive(client.send())
        client.receive(server.send())
    wire = bytearray(client.send([b"left"]))
    wire[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        server.receive(bytes(wire))
    assert server.has_output


# Both ends over sockets


def test_remote_equals_local(tls: dict[str, Any], certs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(make: Any) -> Any:
        return lambda url, **keywords: make(url, tls=TLS(ca=certs["ca.pem"]), **keywords)

    @contextmanager
    def serve(function: Any, **kwargs: Any) -> Iterator[Any]:
        with serve_gym(function, **tls, **kwargs) as server:
            yield SimpleNamespace(url=server.url)

    monkeypatch.setattr(side_by_side, "serve_gym", serve)
    for make in (make_remote, make_vec_remote):
        monkeypatch.setattr(side_by_side, make.__name__, connected(make))
    side_by_side.compare_one(side_by_side.ZOO["CartPole"][0], 100)
    side_by_side.compare_many(side_by_side.ZOO["CartPole"][0], 3, 1, 30)


def test_large_frames_go_both_ways(tls: dict[str, Any], certs: dict[str, Path]) -> None:
    with serve_gym(LargeArrays, **tls) as server:
        step_large_frames(server.url, tls=TLS(ca=certs["ca.pem"]))
        until(lambda: server.connections == 0)


def test_a_connection_with_a_thread_of_its_own_speaks_it_too(tls: dict[str, Any], certs: dict[str, Path]) -> None:
    with serve_gym(lambda: CountingEnv(10**6), fps=200.0, **tls) as server:
        env = make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)
        env.reset(seed=0)
        for _ in range(20):
            env.step(0)
        env.close()
        until(lambda: server.connections == 0)


@pytest.mark.parametrize("certificate", ["server", "client"])
def test_the_servers_end_is_told_and_reset_connects_again(
    certificate: str, tls: dict[str, Any], certs: dict[str, Path]
) -> None:
    given: dict[str, Any] = {"tls": TLS(ca=certs["ca.pem"]), "timeout": 20}
    if certificate == "client":
        tls["tls"] = TLS(certs["server.pem"], certs["server.key"], certs["ca.pem"])
        given["tls"] = TLS(certs["client.pem"], certs["client.key"], ca=certs["ca.pem"])
    server = serve_gym("CartPole-v1", **tls)
    env = make_remote(server.url, **given)
    env.reset(seed=0)
    server.stop()
    with pytest.raises(ConnectionLostError, match=r"ended the stream|was lost"):
        env.step(0)
    tls["port"] = server.port
    with serve_gym("CartPole-v1", **tls):
        env.reset(seed=0)
        env.step(0)
        env.close()


@pytest.mark.slow
def test_several_processes_speak_it(tls: dict[str, Any], certs: dict[str, Path]) -> None:
    with serve_gym("CartPole-v1", processes=2, token="a-token", **tls) as server:
        urls = server.urls
        assert all(url.startswith("grpcs://") for url in urls)
        envs = BlockingReset(make_vec_remote(urls, num_envs=4, token="a-token", tls=TLS(ca=certs["ca.pem"])))
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        envs.close()


# Strangers


def hello_record(certs: dict[str, Path]) -> bytes:
    """The first thing that a client says."""
    client = Tls(client_context(ClientCredentials(tls_ca=certs["ca.pem"].read_bytes())), "localhost")
    client.receive(b"")
    return client.send()


@pytest.mark.parametrize("said", ["nothing", "half a handshake", "plaintext", "garbage", "HTTP", "a handshake alone"])
def test_a_stranger_at_the_port_holds_up_nobody_and_is_gone_by_the_deadline(
    said: str,
    tls: dict[str, Any],
    certs: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = hello_record(certs)
    words = {
        "nothing": b"",
        "half a handshake": first[: len(first) // 2],
        "plaintext": PREFACE + b"what-nobody-should-read",
        "garbage": random.Random(1).randbytes(70_000),
        "HTTP": b"GET / HTTP/1.1\r\n\r\n",
        "a handshake alone": first,
    }[said]
    limits = Limits(hello_timeout=1.0)
    with caplog.at_level(logging.DEBUG), serve_gym("CartPole-v1", limits=limits, **tls) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, 10.0) as stranger:
            stranger.sendall(words)
            env = make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)  # while the stranger is there
            env.reset(seed=0)
            env.step(0)
            with socket.create_connection(address, 10.0) as late:
                late.sendall(words)
                try:
                    while late.recv(1 << 16):
                        pass
                except ConnectionResetError:
                    pass
            env.step(0)
            assert server.connections == 1
            env.close()
        assert "refused ipv4:127.0.0.1:" in caplog.text
        assert said not in ("nothing", "half a handshake") or "no TLS handshake within 1 s" in caplog.text
        assert "what-nobody-should-read" not in caplog.text


def test_of_many_strangers_the_oldest_make_room(
    tls: dict[str, Any], certs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_connections=3), **tls) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        strangers = [stack.enter_context(socket.create_connection(address, 10.0)) for _ in range(260)]
        assert [stranger.recv(1) for stranger in strangers[:4]] == [b""] * 4
        env = make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)
        env.reset(seed=0)
        env.close()
    assert caplog.text.count("256 others have no call either") == 5


def test_a_client_whose_server_is_silent_waits_no_longer_than_its_timeout(certs: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        make_remote(f"grpcs://127.0.0.1:{silent.getsockname()[1]}", tls=TLS(ca=certs["ca.pem"]), timeout=0.2)


def test_what_is_sent_before_the_handshake_is_done_goes_after_it_also_where_it_was_all(
    tls: dict[str, Any], certs: dict[str, Path]
) -> None:
    got: list[Any] = []
    with serve_gym("CartPole-v1", **tls) as server:
        credentials = ClientCredentials.of(tls=TLS(ca=certs["ca.pem"]))
        connection = Call(server.url, credentials=credentials, deliver=got.append)
        for _ in range(3):
            connection.send(b"\xff")  # no request: answered by an error
        connection.finish()

        def answered() -> bool:
            with contextlib.suppress(queue.Empty):  # nothing is put into the poller itself
                connection.get(0.01)
            return len(got) == 3

        until(answered)
        assert all(pb.EnvironmentResponse.FromString(answer).error.code == Code.INVALID_ARGUMENT for answer in got)
        connection.close(5.0)
        until(lambda: server.connections == 0)


_ALERT = b"\x15\x03\x01\x00\x02\x02\x28"
_HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("grpc", b"", "closed the connection: does it speak TLS.*grpcs://"),
        ("grpc", _HTTP, "no gRPC server: an HTTP server is there.*Another program answers there"),
        ("grpc", b"<!DOCTYPE HTML>", "no gRPC server: expected HTTP/2's settings.*Another program answers there"),
        ("grpc", _ALERT, "no gRPC server: the port speaks TLS. Use grpcs://"),
        ("grpcs", b"", "closed the connection: perhaps it asks for a client's certificate"),
        ("grpcs", _ALERT, "alert.*closed the connection: perhaps it asks for a client's certificate"),
        ("grpcs", _HTTP, "speaks no TLS: use grpc://"),
    ],
)
def test_whatever_answers_a_client_is_told_with_what_to_do(
    scheme: str, answer: bytes, said: str, certs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1)
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass

        thread = threading.Thread(target=respond)
        thread.start()
        extra: dict[str, Any] = {"tls": TLS(ca=certs["ca.pem"])} if scheme == "grpcs" else {}
        with pytest.raises(ConnectError, match=said) as caught:
            make_remote(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", timeout=20, **extra)
        sentences = caught.value.reason.split(". ")
        assert len(set(sentences)) == len(sentences)
        thread.join(10.0)
        assert not thread.is_alive()
