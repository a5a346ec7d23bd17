"""Protocols at a server's port, and observers, that other packages have: by name, behind the same token and limits.

The examples are those of docs/plugins.md.
"""

from __future__ import annotations

import http
import json
import os
import re
import socket
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge import ConnectionHandler, HttpAnswer, Observer, PortProtocol, Route, errors, make_remote, serve_gym
from bridge.errors import SettingError
from tests.core.server.plugged import DEADLINE, EPISODES, EXAMPLES, TIMEOUT, WORLDS, Install, ask, ask_http, read_all
from tests.preloaded import run as run_program
from tests.support import check_types

pytest.importorskip("websockets")


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
