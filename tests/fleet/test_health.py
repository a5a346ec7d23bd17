"""`gymnasium-bridge health`: a health check of gRPC without the library, against our servers and grpcio's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import hpack
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bridge import TLS, Limits, make_remote, serve_gym
from bridge.cli import main
from bridge.errors import Code, ConnectError, ConnectionLostError, RefusedError, RemoteTimeoutError
from bridge.fleet.health import NOT_SERVING, SERVING, check_health
from bridge.testing import make_certificates
from tests.inside import parse_address
from tests.support import until

SERVING_STATUS = health_pb2.HealthCheckResponse.SERVING


def check(url: str, timeout: float = 20.0, *, verify: bool = True) -> str:
    return check_health(parse_address(url), timeout, verify=verify)


def test_a_server_that_serves_says_so_without_a_token(tmp_path: Path) -> None:
    with serve_gym("CartPole-v1", token="secret", unix_path=str(tmp_path / "socket")) as server:
        assert [check(url) for url in server.urls] == [SERVING, SERVING]


def test_the_health_service_of_grpcio_is_understood() -> None:
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        url = f"grpc://127.0.0.1:{port}"
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert check(url) == NOT_SERVING
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert check(url) == SERVING
    finally:
        server.stop(0).wait(20.0)


def test_a_grpc_server_without_the_service_is_told_what_installs_it() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(RefusedError, match=r"no health service.*pip install -e '\.\[ops\]'"):
            check(f"grpc://127.0.0.1:{port}")
    finally:
        server.stop(0).wait(20.0)


def test_nobody_is_a_connect_error_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConnectError, match="refused"):
            check(url)
        assert main(["health", url]) == 1
    assert "refused" in capsys.readouterr().err


@contextmanager
def peer(data: bytes | None) -> Iterator[str]:
    """Listen, and answer what the first client sends by these bytes and the end of the connection; None: never."""

    def answer() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.recv(65536)
            if data is None:
                ended.wait(20.0)
            else:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):  # closing on unread bytes would reset the connection, and take the answer away
                    pass

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            thread.join(20.0)


def test_a_peer_that_is_silent_goes_or_speaks_another_protocol_is_an_error() -> None:
    with peer(None) as url, pytest.raises(RemoteTimeoutError, match=r"within 0\.2 s"):
        check(url, 0.2)
    with peer(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, pytest.raises(ConnectError, match="no gRPC server"):
        check(url)
    with (
        peer(bytes.fromhex("000000040000000000")) as url,
        pytest.raises(ConnectionLostError, match="without an answer"),
    ):
        check(url)


def test_a_page_of_a_proxy_is_told_by_its_http_status() -> None:
    fields = hpack.Encoder().encode([(b":status", b"502"), (b"content-type", b"text/html")])
    headers = len(fields).to_bytes(3, "big") + bytes([1, 4, 0, 0, 0, 1]) + fields  # the end of headers
    body = len(b"<html>").to_bytes(3, "big") + bytes([0, 1, 0, 0, 0, 1]) + b"<html>"
    with (
        peer(bytes.fromhex("000000040000000000") + headers + body) as url,
        pytest.raises(ConnectError, match="the answer has the HTTP status 502"),
    ):
        check(url)


def test_a_status_that_is_no_number_of_ascii_is_a_refusal() -> None:
    fields = hpack.Encoder().encode([(b":status", b"200"), (b"grpc-status", "²".encode("latin-1"))])
    headers = len(fields).to_bytes(3, "big") + bytes([1, 5, 0, 0, 0, 1]) + fields  # the end of headers and of stream 1
    with peer(bytes.fromhex("000000040000000000") + headers) as url, pytest.raises(RefusedError) as caught:
        check(url)
    assert caught.value.code == Code.UNKNOWN


def test_tls_is_verified_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = make_certificates(tmp_path)
    keywords: Any = {"tls": TLS(held["server.pem"], held["server.key"])}
    with serve_gym("CartPole-v1", token="secret", **keywords) as server:
        with pytest.raises(ConnectError, match="certificate"):
            check(server.url)
        assert check(server.url, verify=False) == SERVING
        assert main(["health", server.url, "--tls-ca", str(held["ca.pem"])]) == 0
        assert main(["health", server.url, "--no-verify"]) == 0
        assert capsys.readouterr().out == "SERVING\nSERVING\n"
        assert main(["health", server.url, "--tls-ca", str(held["ca.pem"]), "--tls-server-name", "another.name"]) == 1
        assert "another.name" in capsys.readouterr().err


def test_a_server_that_drains_says_that_it_takes_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
        env.reset(seed=0)
        server.drain(60.0)
        until(lambda: server.draining)
        assert main(["health", server.url]) == 1
        assert capsys.readouterr().out == "NOT_SERVING\n"
        env.step(0)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("limit", ["max_connections", "max_worlds"])
def test_a_full_server_is_neither_dead_nor_free(
    limit: str, transport: Literal["http2", "grpcio"], capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_gym("CartPole-v1", limits=Limits(**{limit: 1}), transport=transport) as server:
        assert main(["health", server.url, "--room"]) == 0
        assert capsys.readouterr().out == "SERVING\n"
        with make_remote(server.url):
            assert main(["health", server.url]) == 0
            assert capsys.readouterr().out == "SERVING, full: it takes no further client\n"
            assert main(["health", server.url, "--room"]) == 1


def test_certificates_without_tls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = make_certificates(tmp_path)
    assert main(["health", "grpc://127.0.0.1:1", "--tls-ca", str(held["ca.pem"])]) == 2
    assert "write grpcs://" in capsys.readouterr().err


def test_a_unix_socket_is_refused_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    assert main(["health", "unix:///socket"]) == 2
    assert "no Unix sockets" in capsys.readouterr().err


def test_a_watch_takes_one_request() -> None:
    """Who need not show a token could otherwise keep the server busy with requests that cost nothing to send."""
    with serve_gym("CartPole-v1", token="secret") as server:
        with grpc.insecure_channel(server.url.removeprefix("grpc://")) as channel:
            watch = channel.stream_stream("/grpc.health.v1.Health/Watch")  # bytes as they are
            answers = watch(iter([b"", b"", b""]), timeout=60)
            assert next(answers) == health_pb2.HealthCheckResponse(status=SERVING_STATUS).SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                next(answers)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected one request" in caught.value.details()
