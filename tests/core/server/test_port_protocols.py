"""Protocols at a server's port, and observers, that other packages have: by name, behind the same token and limits."""

from __future__ import annotations

import http
import json
import os
import re
import socket
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge import (
    Auth,
    ConnectionHandler,
    HttpAnswer,
    HttpRequest,
    Limits,
    Observer,
    Port,
    PortProtocol,
    Route,
    Server,
    SessionRoute,
    errors,
    make_remote,
    serve_gym,
)
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.places import ROOT
from tests.preloaded import run as run_program
from tests.support import check_types

pytest.importorskip("websockets")

DEADLINE = 60.0
TIMEOUT = 20.0
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
WORLDS = EXAMPLES["bridge_worlds.py"]
EPISODES = EXAMPLES["bridge_print_episodes.py"]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay out a package as pip installs it, with entry points and modules, in a folder that Python searches."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(package: str, group: str, names: dict[str, str], **modules: str) -> None:
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{name} = {place}" for name, place in names.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[gymnasium_bridge.{group}]", *lines]), encoding="utf-8")

    return lay_out


@pytest.fixture
def worlds(install: Install) -> None:
    """The protocol of the page on plugins, installed."""
    install("bridge-worlds", "protocols", {"worlds": "bridge_worlds:PROTOCOL"}, bridge_worlds=WORLDS)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), TIMEOUT)


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes."""
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


def ask(server: Server, *sent: bytes) -> bytes:
    """Send bytes, piece by piece, and read until the server closes."""
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for data in sent:
            sock.sendall(data)
        return read_all(sock)


def ask_http(server: Server, request: str, *fields: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request; return the status and the body of the answer."""
    if body:
        fields = (*fields, f"Content-Length: {len(body)}")
    lines = [f"{request} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *fields, "", ""]
    head, _, rest = ask(server, "\r\n".join(lines).encode() + body).partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.01)


# By name


def test_the_protocol_of_the_page_on_plugins_answers_by_line_and_by_http_beside_grpc(worlds: None) -> None:
    with serve_gym("CartPole-v1", token="a-secret", protocols=["worlds"]) as server:
        assert ask(server, b"worlds a-secret\n") == b"0\n"
        assert ask(server, *(b"worlds a-secret\n"[i : i + 1] for i in range(16))) == b"0\n"
        with make_remote(server.url, token="a-secret") as env:
            env.reset(seed=0)
            assert ask(server, b"worlds a-secret\n") == b"1\n"
            status, body = ask_http(server, "GET /worlds?x=1", "Authorization: Bearer a-secret")
            assert (status, json.loads(body)) == (200, {"worlds": 1})
        assert ask_http(server, "HEAD /worlds", "Authorization: Bearer a-secret") == (200, b"")
        assert ask_http(server, "GET /other", "Authorization: Bearer a-secret")[0] == 404
        assert ask_http(server, "GET /", "Authorization: Bearer a-secret")[0] == 404
        # There is no page, and no WebSocket.
        assert server.web_url is None
        assert server.urls == [server.url]


def test_a_client_without_the_token_gets_nothing_by_any_protocol(worlds: None) -> None:
    with serve_gym("CartPole-v1", token="a-secret", protocols=["worlds"]) as server:
        for line in (b"worlds\n", b"worlds another\n", b"worlds \xff\n"):
            assert re.match(rb"error: (a token is required|the token is wrong)", ask(server, line))
        for fields in ([], ["Authorization: Bearer another"], ["Authorization: Basic a-secret"]):
            status, body = ask_http(server, "GET /worlds", *fields)
            assert (status, b"worlds" in body) == (401, False)


def test_a_page_of_another_site_gets_nothing_of_a_route(worlds: None) -> None:
    with serve_gym("CartPole-v1", protocols=["worlds"]) as server:
        assert ask_http(server, "GET /worlds")[0] == 200
        assert ask_http(server, "GET /worlds", "Origin: http://evil.example")[0] == 403
        assert ask_http(server, "GET /worlds", "Sec-Fetch-Site: cross-site")[0] == 403
        lines = ["GET /worlds HTTP/1.1", "Host: evil.example", "", ""]
        refused = ask(server, "\r\n".join(lines).encode())
        assert refused.startswith(b"HTTP/1.1 421 ")
        assert b"start it with web=Web(hosts='evil.example') (--web-hosts evil.example)" in refused


def test_a_protocol_that_nobody_names_is_not_loaded(install: Install) -> None:
    install("broken", "protocols", {"broken": "broken_protocol:PROTOCOL"}, broken_protocol="raise OSError('no')")
    install("watch", "observers", {"broken": "broken_observer:Observer"}, broken_observer="raise OSError('no')")
    with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
        env.reset(seed=0)
    assert not {"broken_protocol", "broken_observer"} & sys.modules.keys()


@pytest.mark.parametrize(("keyword", "group"), [("protocols", "protocols"), ("observers", "observers")])
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import module_that_is_not_there", "of the package broken cannot be loaded: ModuleNotFoundError"),
        ("raise SystemExit(3)", "of the package broken cannot be loaded: SystemExit: 3"),
        ("", "of the package broken cannot be loaded: AttributeError"),
        ("def THING(): return 7", "of the package broken cannot be loaded: SettingError: expected a bridge."),
    ],
    ids=["import", "exit", "nothing", "other"],
)
def test_one_that_cannot_be_used_is_told_by_name_and_others_work(
    install: Install, keyword: str, group: str, source: str, told: str
) -> None:
    install("broken", group, {"broken": "broken_thing:THING"}, broken_thing=source)
    install("bridge-worlds", "other", {"worlds": "bridge_worlds:PROTOCOL"}, bridge_worlds=WORLDS)
    given: Any = {keyword: ["broken"]}
    with pytest.raises(SettingError, match=re.escape(told)) as caught:
        serve_gym("CartPole-v1", **given)
    assert "broken" in str(caught.value)
    with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
        env.reset(seed=0)


def test_an_observer_that_fails_while_it_is_made_is_told_by_its_package(install: Install) -> None:
    install("fails", "observers", {"fails": "failing:make"}, failing="def make(): raise OSError('no disk')")
    with pytest.raises(SettingError, match="the observer fails of the package fails cannot be loaded: OSError: no d"):
        serve_gym("CartPole-v1", observers=["fails"])


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"protocols": ["nothing"]}, "no installed package has a protocol 'nothing' (installed: none)"),
        ({"observers": ["nothing"]}, "no installed package has an observer 'nothing' (installed: none)"),
        ({"protocols": "worlds"}, "expected protocols to be a list of names and bridge.PortProtocol objects"),
        ({"observers": "worlds"}, "expected observers to be a list of names and bridge.Observer objects"),
        ({"protocols": None}, "expected protocols to be a list of names"),
        ({"protocols": [7]}, "expected a bridge.PortProtocol, got 7"),
    ],
)
def test_names_of_nothing_are_refused(keywords: Any, told: str) -> None:
    with pytest.raises(SettingError, match=re.escape(told)):
        serve_gym("CartPole-v1", **keywords)


def test_an_observer_by_name_and_one_as_an_object_are_both_told(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("episodes", "observers", {"episodes": "bridge_episodes:EpisodePrinter"}, bridge_episodes=EPISODES)
    made: list[str] = []

    class Mine(Observer):
        def made(self, world: Any) -> None:
            made.append(world.name)

    with (
        serve_gym("CartPole-v1", observers=["episodes", Mine()]) as server,
        make_remote(server.url) as env,
    ):
        play_an_episode(env)
    assert len(made) == 1
    assert re.fullmatch(rf"{made[0]}: \d+ in \d+ steps\n", capsys.readouterr().out)


def play_an_episode(env: Any) -> None:
    env.reset(seed=0)
    env.action_space.seed(0)
    over = False
    while not over:
        over = bool(env.step(env.action_space.sample())[2])


def test_the_command_line_names_protocols_and_observers(install: Install, worlds: None) -> None:
    install("episodes", "observers", {"episodes": "bridge_episodes:EpisodePrinter"}, bridge_episodes=EPISODES)
    command = [sys.executable, "-m", "bridge", "serve", "CartPole-v1", "--exit-on-eof"]
    with subprocess.Popen(
        [*command, "--protocol", "worlds", "--protocol", "websocket", "--observer", "episodes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": sys.path[0]},
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        urls = next(lines).split(" served at ")[1].split()
        assert [url.partition("://")[0] for url in urls] == ["grpc", "ws"]
        with make_remote(urls[1]) as env:
            play_an_episode(env)
        assert any(re.fullmatch(r"world-\w+: \d+ in \d+ steps\n", line) for line in lines)
        with socket.create_connection(("127.0.0.1", int(urls[0].rpartition(":")[2])), TIMEOUT) as sock:
            sock.sendall(b"worlds\n")
            assert read_all(sock).rstrip() in (b"0", b"1")
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 0


@pytest.mark.slow
def test_servers_in_processes_find_protocols_by_name(worlds: None) -> None:
    with serve_gym("CartPole-v1", processes=2, protocols=["worlds"]) as server:
        for url in server.urls:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), TIMEOUT) as sock:
                sock.sendall(b"worlds\n")
                assert read_all(sock) == b"0\n"


# What can be told apart


def of_bytes(name: str, *first: bytes) -> PortProtocol:
    return PortProtocol(name=name, first_bytes=first, handler=ConnectionHandler)


def of_path(name: str, path: str, method: str = "GET") -> PortProtocol:
    return PortProtocol(name=name, routes=[Route(path=path, method=method, answer=lambda request, port: OK)])


OK = HttpAnswer(http.HTTPStatus.OK, b"fine\n")


@pytest.mark.parametrize(
    ("protocols", "web", "told"),
    [
        ([of_bytes("mine", b"PRI * HTTP/2")], False, "'gRPC' and 'mine' cannot be told apart"),
        ([of_bytes("mine", b"P")], False, "'gRPC' and 'mine' cannot be told apart"),
        ([of_bytes("mine", b"GET /x")], False, "'HTTP/1.1' and 'mine' cannot be told apart"),
        ([of_bytes("mine", b"ab"), of_bytes("other", b"abc")], False, "'mine' and 'other' cannot be told apart"),
        ([of_bytes("mine", b"ab"), of_bytes("mine", b"xy")], False, "two of the name 'mine'"),
        ([of_path("mine", "/x"), of_path("other", "/x")], False, "'mine' and 'other' have GET /x both"),
        ([of_path("mine", "/app.js")], True, "'page' and 'mine' have GET /app.js both"),
        ([of_path("mine", "x")], False, "a path that begins with a slash, got ('GET', 'x')"),
    ],
)
def test_protocols_that_cannot_be_told_apart_are_refused(protocols: list[PortProtocol], web: bool, told: str) -> None:
    with pytest.raises(SettingError, match=re.escape(told)):
        serve_gym("CartPole-v1", protocols=protocols, web=web)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "to have first_bytes with a handler, or routes"),
        ({"first_bytes": [b"x"]}, "to have first_bytes with a handler, or routes"),
        ({"first_bytes": b"x", "handler": ConnectionHandler}, "to be a list of bytes"),
        ({"first_bytes": [b""], "handler": ConnectionHandler}, "to be a list of bytes"),
        ({"first_bytes": [b"x" * 65], "handler": ConnectionHandler}, "at most 64 bytes"),
        ({"routes": ["/x"]}, "to be bridge.Route or bridge.SessionRoute objects"),
        ({"name": "", "routes": []}, "expected the name of a protocol to be a text"),
    ],
)
def test_a_protocol_that_is_none_is_refused(fields: Any, told: str) -> None:
    with pytest.raises(SettingError, match=re.escape(told)):
        PortProtocol(**{"name": "mine", **fields})


def test_first_bytes_in_capitals_are_told_from_http_and_from_grpc() -> None:
    class Shout(ConnectionHandler):
        def data_received(self, data: bytes) -> None:
            self.send(data.lower())
            self.close()

    protocols = [of_path("paths", "/fine"), PortProtocol(name="shout", first_bytes=[b"GO!", b"PLAY"], handler=Shout)]
    with serve_gym("CartPole-v1", protocols=protocols) as server, make_remote(server.url) as env:
        assert ask(server, b"GO!") == b"go!"
        assert ask(server, b"P", b"LAY") == b"play"
        assert ask_http(server, "GET /fine") == (200, b"fine\n")
        assert ask_http(server, "POST /fine")[0] in (400, 405)  # as the package websockets reads it
        env.reset(seed=0)


def test_protocols_need_our_own_transport() -> None:
    with pytest.raises(SettingError, match="with mine, got 'grpcio', which speaks gRPC alone"):
        serve_gym("CartPole-v1", protocols=[of_bytes("mine", b"x")], transport="grpcio")


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


# What begins and ends with a server


class Attached:
    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self) -> None:
        self.said.append("start")

    def stop(self) -> None:
        self.said.append("stop")


def test_what_is_attached_starts_and_stops_with_the_server() -> None:
    before, later, unstarted = Attached(), Attached(), Attached()
    server = serve_gym("CartPole-v1", start=False)
    server.attach(before)
    assert before.said == []
    server.start()
    server.attach(later)
    assert (before.said, later.said) == (["start"], ["start"])
    server.stop()
    server.stop()
    assert (before.said, later.said) == (["start", "stop"], ["start", "stop"])
    with serve_gym("CartPole-v1", start=False) as server:
        server.attach(unstarted)
    assert unstarted.said == ["stop"]


# Parts that an installation lacks, or that nobody asks for


def run(program: str) -> list[str]:
    done = run_program("-c", program, timeout=DEADLINE, bare=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


WITHOUT_WEB = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name == "bridge.web" or name.startswith("bridge.web."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
import bridge
from bridge import *
print("Web" in dir(bridge), "Limits" in dir(bridge))
with serve_gym("CartPole-v1", protocols=["websocket"]) as server, make_remote(server.urls[1]) as env:
    print(server.urls[1].split(":")[0], server.web_url, env.reset(seed=0)[0].shape)
for keywords in ({"web": True}, {"web": object()}):
    try:
        serve_gym("CartPole-v1", **keywords)
    except bridge.errors.SettingError as error:
        print(error)
"""


def test_websocket_works_in_an_installation_without_the_page() -> None:
    lacks = "this installation lacks bridge.web, which web= needs"
    assert run(WITHOUT_WEB) == ["False True", "ws None (4,)", lacks, lacks]


LAZY = """
import sys
from bridge import make_remote, serve_gym

def loaded():
    parts = {name.split(".")[1] for name in sys.modules if name.startswith("bridge.")}
    return sorted(parts & {"web", "recording", "perlert", "policies", "dial", "openenv"})

with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
    env.reset(seed=0)
    env.step(0)
    print(loaded())
    (world,) = server.worlds
    with make_remote(f"{server.url}?world={world}", role="spectator") as watcher:
        print(loaded(), watcher.reset()[0].shape)
    env.step(0)
"""


def test_a_server_that_nobody_watches_loads_nothing_for_it_and_who_comes_to_watch_can() -> None:
    assert run(LAZY) == ["[]", "['web'] (4,)"]


@pytest.mark.slow
def test_the_examples_of_the_page_on_plugins_pass_a_strict_type_checker(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("bridge_worlds.py", "bridge_print_episodes.py")]
    for file in files:
        file.write_text(EXAMPLES[file.name], encoding="utf-8")
    check_types(*files)


# What names the types of these are: everything else that a plug-in is handed has a name of its own in `bridge`.
NOT_NAMED = {
    "Connection": "handed on to `super().__init__`, where a handler has one of its own",
    "Timer": "what `call_later` returns; it has `cancel`",
    "Http2": "of gRPC alone",
    "Call": "`PortSession`, where gRPC has it too",
    "PartMaker": "what makes a part: a class of MessagePart",
}


@pytest.mark.parametrize("name", ["ConnectionHandler", "MessageHandler", "MessagePart", "SessionMessage", "Scheme"])
def test_what_a_plug_in_is_handed_has_a_public_type(name: str) -> None:
    found: set[str] = set()
    for kind in getattr(bridge, name).__mro__:
        for attribute, value in vars(kind).items() if kind.__module__.startswith("bridge.") else ():
            public = attribute == "__init__" or not attribute.startswith("_")
            for annotation in getattr(value, "__annotations__", {}).values() if public else ():
                found.update(re.findall(r"(?<![\w.])[A-Z]\w+", re.sub(r"\"[^\"]*\"", "", str(annotation))))
    ours = {each for each in found if not hasattr(typing, each) and not hasattr(errors, each)}
    assert ours - set(bridge.__all__) - set(NOT_NAMED) - {"None", "VectorEnv", "True", "False"} == set()


def test_the_examples_of_the_page_on_plugins_are_short() -> None:
    assert len(WORLDS.splitlines()) <= 80
