"""Protocols at a server's port that have sessions with its worlds, and routes of HTTP: their token, limits and ends."""

from __future__ import annotations

import http
import time
from typing import Any

import pytest

from bridge import (
    Auth,
    ConnectionHandler,
    HttpAnswer,
    HttpRequest,
    Limits,
    Port,
    PortProtocol,
    Route,
    Server,
    SessionRoute,
    make_remote,
    serve_gym,
)
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.core.server.plugged import TIMEOUT, ask, ask_http, connect, read_all, wait_for

pytest.importorskip("websockets")

OK = HttpAnswer(http.HTTPStatus.OK, b"fine\n")


# Sessions, and limits


class Packets(ConnectionHandler):
    """Requests of dm_env_rpc as they are, each after its length in four bytes; before them a token of eight bytes."""

    data = b""
    call: Any = None

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.call is None:
            if len(self.data) < 16:
                return
            self.call = self.open(self.data[8:16].decode())
            self.data = self.data[16:]
        while len(self.data) >= 4 and len(self.data) >= (end := 4 + int.from_bytes(self.data[:4], "big")):
            self.request(self.call, self.data[4:end])
            self.data = self.data[end:]

    def answer(self, call: Any, parts: list[Any], size: int) -> bool:
        self.send(size.to_bytes(4, "big"))
        return super().answer(call, parts, size)

    def refuse(self, error: RequestError) -> None:
        self.send(f"{error.code.name}: {error.message}".encode())


PACKETS = PortProtocol(name="packets", first_bytes=[b"packets:"], handler=Packets)


class Player:
    """A client of `Packets`."""

    def __init__(self, server: Server, token: bytes = b"a-secret") -> None:
        self.sock = connect(server)
        self.sock.sendall(b"packets:" + token)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, **request: Any) -> None:
        data = pb.EnvironmentRequest(**request).SerializeToString()
        self.sock.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self) -> pb.EnvironmentResponse:
        return pb.EnvironmentResponse.FromString(self.exactly(int.from_bytes(self.exactly(4), "big")))

    def exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = self.sock.recv(size - len(found))
            assert data, "the server has closed"
            found += data
        return found


def test_a_handler_has_sessions_with_the_servers_worlds() -> None:
    with serve_gym("CartPole-v1", token="a-secret", protocols=[PACKETS]) as server, Player(server) as player:
        player.send(create_world=pb.CreateWorldRequest())
        name = player.receive().create_world.world_name
        assert name in server.worlds
        player.send(join_world=pb.JoinWorldRequest(world_name=name))
        specs = player.receive().join_world.specs
        assert "observation" in {spec.name for spec in specs.observations.values()}
        for _ in range(20):  # together: they are answered in their order
            action = pb.Tensor(int64s=pb.Tensor.Int64Array(array=[0]))
            player.send(step=pb.StepRequest(requested_observations=[1], actions={1: action}))
        assert [player.receive().WhichOneof("payload") for _ in range(20)] == ["step"] * 20
        assert server.connections == 1
        player.sock.close()
        wait_for(lambda: server.connections == 0 and not server.worlds)


def test_a_session_needs_the_token_and_counts_for_max_connections() -> None:
    with serve_gym("CartPole-v1", token="a-secret", protocols=[PACKETS], limits=Limits(max_connections=1)) as server:
        assert ask(server, b"packets:", b"another!").startswith(b"UNAUTHENTICATED: ")
        with Player(server) as player:
            player.send(create_world=pb.CreateWorldRequest())
            player.receive()
            # Operators get in, who may read properties and nothing else.
            with Player(server) as other:
                other.send(create_world=pb.CreateWorldRequest())
                assert b"RESOURCE_EXHAUSTED: this server has max_connections=1" in read_all(other.sock)


def test_a_server_that_drains_waits_for_the_session_of_a_handler() -> None:
    with serve_gym("CartPole-v1", token="a-secret", protocols=[PACKETS]) as server, Player(server) as player:
        player.send(create_world=pb.CreateWorldRequest())
        name = player.receive().create_world.world_name
        player.send(join_world=pb.JoinWorldRequest(world_name=name))
        player.receive()
        server.drain(TIMEOUT)
        wait_for(lambda: server.draining)
        player.send(step=pb.StepRequest())
        assert player.receive().WhichOneof("payload") == "step"
        assert ask(server, b"packets:", b"a-secret").startswith(b"UNAVAILABLE: ")
        player.sock.close()
        wait_for(lambda: server.ended)


class Silent(ConnectionHandler):
    """Drops what comes."""

    def data_received(self, data: bytes) -> None:
        pass


@pytest.mark.slow
def test_who_floods_a_handler_is_charged_and_closed_and_others_play_on() -> None:
    protocol = PortProtocol(name="silent", first_bytes=[b"silent"], handler=Silent)
    with (
        serve_gym("CartPole-v1", protocols=[protocol], limits=Limits(hello_timeout=1.0)) as server,
        make_remote(server.url) as env,
        connect(server) as flooder,
    ):
        env.reset(seed=0)
        flooder.setblocking(False)
        before = server.status()["charged_stranger"]
        flooder.sendall(b"silent")
        closed = False
        deadline = time.monotonic() + TIMEOUT
        while not closed:
            assert time.monotonic() < deadline, "it was not closed"
            try:
                flooder.send(b"x" * 65536)
            except BlockingIOError:
                pass  # it is not read for now
            except OSError:
                closed = True
            if env.step(0)[2]:
                env.reset(seed=0)
        assert server.status()["charged_stranger"] > before


def test_a_line_without_an_end_is_refused_at_its_bound(worlds: None) -> None:
    with serve_gym("CartPole-v1", protocols=["worlds"]) as server:
        assert ask(server, b"worlds" + b"x" * 2000).startswith(b"error: expected a line of at most 1000 bytes")


@pytest.mark.faulty
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit], ids=["error", "exit"])
@pytest.mark.parametrize("method", ["__init__", "data_received", "answer", "finish", "refuse"])
def test_a_handler_that_fails_is_cut_and_nobody_else(
    caplog: pytest.LogCaptureFixture, method: str, kind: type[BaseException]
) -> None:
    def fail(*arguments: object) -> None:
        raise kind("a fault")

    class Works(ConnectionHandler):
        def data_received(self, data: bytes) -> None:
            if method == "refuse":
                raise RequestError(Code.INVALID_ARGUMENT, "refused")
            session = self.open(None)
            if method == "finish":
                self.close()
            else:
                self.request(session, b"")

    failing: Any = type("Failing", (Works,), {method: fail})
    protocols = [PortProtocol(name="failing", first_bytes=[b"fail"], handler=failing)]
    with serve_gym("CartPole-v1", protocols=protocols) as server, make_remote(server.url) as env:
        env.reset(seed=0)
        assert ask(server, b"fail") == b""
        env.step(0)
        with make_remote(server.url) as other:
            other.reset(seed=0)
    assert kind.__name__ in caplog.text


@pytest.mark.faulty
@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_a_handler_that_raises_what_ends_a_thread_does_not_end_the_thread_that_serves(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    class Failing(ConnectionHandler):
        def data_received(self, data: bytes) -> None:
            raise kind("a fault")

    protocols = [PortProtocol(name="failing", first_bytes=[b"fail"], handler=Failing)]
    with serve_gym("CartPole-v1", protocols=protocols) as server, make_remote(server.url) as env:
        env.reset(seed=0)
        with connect(server) as sock:
            sock.sendall(b"fail")
            wait_for(lambda: kind.__name__ in caplog.text)
            env.step(0)


def test_a_handler_speaks_by_itself_later_and_not_after_its_connection_ended() -> None:
    called: list[str] = []

    class Later(ConnectionHandler):
        def data_received(self, data: bytes) -> None:
            self.call_later(0.01, self.speak_up)

        def speak_up(self) -> None:
            called.append(self.peer)
            self.send(b"later")
            self.close()
            self.call_later(0.0, self.speak_up)

    protocols = [PortProtocol(name="later", first_bytes=[b"later"], handler=Later)]
    with serve_gym("CartPole-v1", protocols=protocols) as server:
        assert ask(server, b"later") == b"later"
        wait_for(lambda: server.status()["sockets"] == 0)
    assert len(called) >= 1


# Routes


def routes_of(*routes: Route | SessionRoute) -> list[PortProtocol]:
    return [PortProtocol(name="mine", routes=routes)]


def test_a_route_takes_a_body_of_at_most_max_message_bytes() -> None:
    def answer(request: HttpRequest, port: Port) -> HttpAnswer:
        return HttpAnswer(OK.status, f"{request.method} {request.query} {len(request.body)}".encode())

    protocols = routes_of(Route(path="/put", method="PUT", answer=answer))
    limits = Limits(max_message_bytes=100_000)
    with serve_gym("CartPole-v1", token="a-secret", protocols=protocols, limits=limits) as server:
        token = "Authorization: Bearer a-secret"
        assert ask_http(server, "PUT /put?a=b", token, body=b"x" * 100_000) == (200, b"PUT a=b 100000")
        assert ask_http(server, "PUT /put", token, body=b"x" * 100_001)[0] == 413
        assert ask_http(server, "PUT /put", body=b"x")[0] == 401


def test_a_route_that_fails_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(request: HttpRequest, port: Port) -> HttpAnswer:
        raise RequestError(Code.NOT_FOUND, f"there is no {request.field('What')}")

    def fail(request: HttpRequest, port: Port) -> HttpAnswer:
        raise ZeroDivisionError("a fault")

    nothing: Any = lambda request, port: None  # noqa: E731
    protocols = routes_of(
        Route(path="/refuse", answer=refuse), Route(path="/fail", answer=fail), Route(path="/none", answer=nothing)
    )
    with serve_gym("CartPole-v1", protocols=protocols) as server:
        assert ask_http(server, "GET /refuse", "What: cheese") == (404, b"there is no cheese\n")
        assert ask_http(server, "GET /fail") == (500, b"the server failed\n")
        assert ask_http(server, "GET /none") == (500, b"the server failed\n")
    assert "ZeroDivisionError" in caplog.text


def test_a_viewer_asks_only_for_what_is_for_viewers() -> None:
    answer = lambda request, port: OK  # noqa: E731
    protocols = routes_of(
        Route(path="/all", answer=answer, for_viewers=True), Route(path="/few", answer=answer, method="POST")
    )
    auth = Auth(watch_token="of-viewers")
    with serve_gym("CartPole-v1", token="a-secret", auth=auth, protocols=protocols) as server:
        viewer, other = "Authorization: Bearer of-viewers", "Authorization: bearer a-secret"
        assert ask_http(server, "GET /all", viewer)[0] == 200
        assert ask_http(server, "POST /few", viewer)[0] == 403
        assert ask_http(server, "POST /few", other)[0] == 200


def test_what_follows_a_body_is_no_part_of_it() -> None:
    bodies: list[bytes] = []

    def answer(request: HttpRequest, port: Port) -> HttpAnswer:
        bodies.append(request.body)
        return OK

    with serve_gym("CartPole-v1", protocols=routes_of(Route(path="/x", method="POST", answer=answer))) as server:
        head = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
        assert ask(server, head, b"bo", b"dy and more").startswith(b"HTTP/1.1 200 ")
    assert bodies == [b"body"]


def test_a_public_route_needs_no_token_and_may_have_fields_of_its_own() -> None:
    answer = HttpAnswer(OK.status, b"open", fields={"X-Mine": "yes", "Cache-Control": "max-age=9"})
    protocols = routes_of(Route(path="/open", public=True, answer=lambda request, port: answer))
    with serve_gym("CartPole-v1", token="a-secret", protocols=protocols) as server:
        found = ask(server, b"GET /open HTTP/1.1\r\nHost: localhost\r\nOrigin: http://other.example\r\n\r\n")
    assert b"\r\nX-Mine: yes\r\n" in found
    assert found.count(b"Cache-Control") == 1
    assert found.endswith(b"\r\n\r\nopen")


def counting(request: HttpRequest, session: Any) -> Any:
    """Count messages; each makes a world by the session, `end` ends it, `refuse` is refused."""
    count = 0

    async def answer(message: bytes) -> bytes | HttpAnswer | None:
        nonlocal count
        count += 1
        if message == b"end":
            return None
        if message == b"refuse":
            raise RequestError(Code.INVALID_ARGUMENT, "not this")
        request = pb.EnvironmentRequest(create_world=pb.CreateWorldRequest())
        parts = await session.handle(request.SerializeToString())
        made = pb.EnvironmentResponse.FromString(b"".join(parts)).create_world.world_name
        return f"{count} {message.decode()} {made[:6]}".encode()

    return answer


def open_websocket(server: Server, path: str, token: str | None) -> Any:
    from websockets.sync.client import connect as connect_websocket

    fields = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"ws://127.0.0.1:{server.port}{path}"
    return connect_websocket(url, additional_headers=fields, open_timeout=TIMEOUT, compression=None)


def test_a_session_route_over_websocket_answers_message_by_message_behind_the_token() -> None:
    from websockets.exceptions import ConnectionClosed

    protocols = routes_of(SessionRoute(path="/play", converse=counting, websocket=True, texts=True))
    with serve_gym("CartPole-v1", token="a-secret", protocols=protocols) as server:
        with open_websocket(server, "/play", "a-secret") as websocket:
            for number in (1, 2):
                websocket.send("hello")
                assert websocket.recv(TIMEOUT) == f"{number} hello world-"
            assert server.connections == 1
            websocket.send("refuse")
            assert websocket.recv(TIMEOUT) == "not this"
            websocket.send("end")
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(TIMEOUT)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1000
        for token in (None, "another"):
            with open_websocket(server, "/play", token) as websocket, pytest.raises(ConnectionClosed) as closed:
                websocket.recv(TIMEOUT)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4000 + Code.UNAUTHENTICATED
        wait_for(lambda: server.connections == 0)


def test_a_session_route_for_one_request_answers_its_body_behind_the_token() -> None:
    protocols = routes_of(SessionRoute(path="/play", method="POST", converse=counting))
    with serve_gym("CartPole-v1", token="a-secret", protocols=protocols) as server:
        token = "Authorization: Bearer a-secret"
        assert ask_http(server, "POST /play", token, body=b"hello") == (200, b"1 hello world-")
        assert ask_http(server, "POST /play", token, body=b"refuse") == (400, b"not this\n")
        assert ask_http(server, "POST /play", token, body=b"end") == (200, b"")
        assert ask_http(server, "POST /play", body=b"hello")[0] == 401
        assert ask_http(server, "POST /play", token, "Origin: http://evil.example", body=b"hello")[0] == 403
        wait_for(lambda: server.connections == 0)


def test_a_session_route_without_words_of_its_own_takes_dm_env_rpc() -> None:
    protocols = routes_of(SessionRoute(path="/rpc", method="POST", converse=None))
    with serve_gym("CartPole-v1", protocols=protocols) as server:
        request = pb.EnvironmentRequest(create_world=pb.CreateWorldRequest())
        status, body = ask_http(server, "POST /rpc", body=request.SerializeToString())
        assert status == 200
        assert pb.EnvironmentResponse.FromString(body).create_world.world_name.startswith("world-")
