"""Proxies that `http_proxy` and its like name: what goes through them, what does not, and what errors say of them."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bridge import Server, Web, make_remote, make_vec_remote, serve_gym
from bridge.core.transport.http_proxies import HttpProxy, find_proxy
from bridge.dial import DialListener
from bridge.errors import ConnectError, SettingError
from bridge.policies import RemotePolicy, serve_policy
from bridge.testing import CountingEnv, check_server
from tests.connect_proxy import ConnectProxy
from tests.support import until

VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy")
FAR = "server.example"
NEAR = "this-machine.example"


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine know one name of its own, and not that of the server behind the proxy; forget the proxies."""
    known = socket.getaddrinfo

    def look_up(host: Any, *arguments: Any, **keywords: Any) -> Any:
        if host == FAR:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1" if host == NEAR else host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in (*VARIABLES, "no_proxy", "no_grpc_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def set_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, url)


@pytest.fixture
def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def served(host: str, **keywords: Any) -> Server:
    """A server at an address of this machine, which the page's requests may call by any of the names here."""
    names = [FAR, NEAR, "listed.example"]
    web = Web(hosts=names) if keywords.get("openenv") else keywords.pop("web", False)
    return serve_gym(CountingEnv, host=host if host[0].isdigit() else "127.0.0.1", web=web, **keywords)


def play_openenv(host: str) -> None:
    with served(host, openenv=True) as server:
        env = make_remote(f"openenv://{host}:{server.port}", timeout=20.0)
        env.reset(seed=0)
        assert env.step(1)[1] == 1.0
        env.close()


def play_openenv_slots(host: str) -> None:
    with served(host, openenv=True) as server:
        envs = make_vec_remote(f"openenv://{host}:{server.port}", num_envs=2, timeout=20.0, blocking=True)
        envs.reset(seed=0)
        assert envs.step(np.array([1, 1]))[1].tolist() == [1.0, 1.0]
        envs.close()


def play_grpcio(host: str) -> None:
    with served(host) as server:
        env = make_remote(f"grpc://{host}:{server.port}", transport="grpcio", timeout=20.0)
        env.reset(seed=0)
        assert env.step(1)[1] == 1.0
        env.close()


def play_dialed(host: str, scheme: str = "grpc") -> None:
    listening = DialListener(f"listen://{host if host[0].isdigit() else '127.0.0.1'}:0", timeout=20.0)
    with (
        contextlib.closing(listening) as listener,
        serve_gym(CountingEnv, dial=f"{scheme}://{host}:{listener.port}"),
    ):
        envs = make_vec_remote(listener, num_envs=1, timeout=20.0, blocking=True)
        envs.reset(seed=0)
        assert envs.step(np.array([1]))[1].tolist() == [1.0]
        envs.close()


def play_dialed_by_websocket(host: str) -> None:
    play_dialed(host, "ws")


def ask_a_policy(host: str) -> None:
    at = host if host[0].isdigit() else "127.0.0.1"
    with (
        serve_policy(lambda observations: observations, host=at) as server,
        RemotePolicy(f"ws://{host}:{server.url.rpartition(':')[2]}", timeout=20.0, reconnect=0.0) as policy,
    ):
        assert policy(np.ones(1)).tolist() == [1.0]


def check_a_server(host: str) -> None:
    with served(host) as server:
        assert check_server(f"grpc://{host}:{server.port}", only=["D-8"]).ok


def play_by_default(host: str) -> None:
    with served(host, web=True) as server:
        for scheme in ("grpc", "ws"):
            env = make_remote(f"{scheme}://{host}:{server.port}", timeout=20.0)
            env.reset(seed=0)
            env.close()


PROXIED: list[Callable[[str], None]] = [
    play_openenv,
    play_openenv_slots,
    play_grpcio,
    play_dialed,
    play_dialed_by_websocket,
    check_a_server,
]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10"])
@pytest.mark.parametrize("play", [*PROXIED, ask_a_policy, play_by_default])
def test_loopback_is_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, play: Callable[[str], None], host: str
) -> None:
    set_proxy(monkeypatch, f"http://127.0.0.1:{closed_port}")
    play(host)


@pytest.mark.parametrize("play", [play_openenv, play_dialed, play_dialed_by_websocket])
def test_a_name_of_this_machine_is_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, play: Callable[[str], None]
) -> None:
    set_proxy(monkeypatch, f"http://127.0.0.1:{closed_port}")
    play(NEAR)


@pytest.mark.parametrize("play", PROXIED)
@pytest.mark.parametrize("user", [None, "me:pass word"])
def test_another_machine_is_reached_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, play: Callable[[str], None], user: str | None
) -> None:
    with ConnectProxy(user) as proxy:
        set_proxy(monkeypatch, proxy.url)
        play(FAR)
        assert any(line.startswith(f"CONNECT {FAR}:") for line in proxy.asked)


def connects() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "openenv", lambda: make_remote(f"openenv://{FAR}:8000", timeout=10.0)
    yield "grpcio", lambda: make_remote(f"grpc://{FAR}:8000", transport="grpcio", timeout=10.0)
    yield "check", lambda: check_server(f"grpc://{FAR}:8000", timeout=10.0)


@pytest.mark.parametrize(("way", "connect"), list(connects()), ids=lambda value: value if type(value) is str else "")
def test_an_error_names_the_proxy_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, way: str, connect: Callable[[], Any]
) -> None:
    set_proxy(monkeypatch, f"http://me:secret@127.0.0.1:{closed_port}")
    with pytest.raises(ConnectError, match=rf"the proxy 127\.0\.0\.1:{closed_port} of \w+_proxy") as raised:
        connect()
    assert "no_proxy" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("way", "connect"), list(connects()), ids=lambda value: value if type(value) is str else "")
def test_an_error_names_the_proxy_that_refuses(
    monkeypatch: pytest.MonkeyPatch, way: str, connect: Callable[[], Any]
) -> None:
    with ConnectProxy(answer="HTTP/1.1 403 Forbidden") as proxy:
        set_proxy(monkeypatch, proxy.url)
        with pytest.raises(ConnectError, match=rf"the proxy 127\.0\.0\.1:{proxy.port} of \w+_proxy"):
            connect()


def test_the_session_of_openenv_names_the_proxy_that_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many proxies pass GET on, and no CONNECT to such a port."""
    with served("localhost", openenv=True) as server:
        with ConnectProxy() as proxy:
            set_proxy(monkeypatch, proxy.url)
            env = make_remote(f"openenv://{FAR}:{server.port}", timeout=0.5)
        with ConnectProxy(answer="HTTP/1.1 405 Method Not Allowed") as refusing:
            set_proxy(monkeypatch, refusing.url)
            with pytest.raises(
                ConnectError, match=rf"answered 'HTTP/1\.1 405 .*the proxy 127\.0\.0\.1:{refusing.port}"
            ):
                env.reset()


def test_a_server_that_dials_says_which_proxy_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    set_proxy(monkeypatch, f"http://127.0.0.1:{closed_port}")
    with caplog.at_level(logging.WARNING), serve_gym(CountingEnv, dial=f"grpc://{FAR}:50051"):
        until(lambda: f"the proxy 127.0.0.1:{closed_port} of http_proxy" in caplog.text)


@pytest.mark.parametrize("url", ["socks5://127.0.0.1:1080", "https://127.0.0.1:3128", "http://:none", "http://"])
def test_what_is_no_url_of_an_http_proxy_is_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    set_proxy(monkeypatch, url)
    with pytest.raises(SettingError, match="http_proxy"):
        make_remote(f"openenv://{FAR}:8000", timeout=10.0)
    with pytest.raises(SettingError, match="grpc_proxy"):
        make_remote(f"grpc://{FAR}:8000", transport="grpcio", timeout=10.0)
    play_openenv("localhost")


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize("play", [play_openenv, play_dialed])
def test_what_no_proxy_names_is_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, play: Callable[[str], None], variable: str
) -> None:
    """The name resolves to this machine only after it was decided: so it is no loopback here."""
    set_proxy(monkeypatch, f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv(variable, "elsewhere.example, 127.0.0.0/8, .example")
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **keywords: known("127.0.0.1", *more, **keywords))
    play("listed.example")


@pytest.mark.parametrize(
    ("host", "exceptions", "through"),
    [
        ("server.example", "", True),
        ("server.example", "server.example", False),
        ("server.example", "example", False),
        ("server.example", ".example", False),
        ("server.example", "*", False),
        ("server.example", "server.example:8000", False),
        ("server.example", "server.example:9000", True),
        ("server.example", "other.example", True),
        ("192.0.2.7", "", True),
        ("192.0.2.7", "192.0.2.7", False),
        ("192.0.2.7", "10.0.0.0/8, 192.0.2.0/24", False),
        ("192.0.2.7", "192.0.3.0/24", True),
        ("2001:db8::7", "", True),
        ("2001:db8::7", "[2001:db8::7]", False),
        ("2001:db8::7", "2001:db8::/32", False),
        ("::1", "", False),
        ("::ffff:127.0.0.1", "", False),
        ("127.255.0.1", "", False),
        ("0.0.0.0", "", False),
        ("world.localhost", "", False),
        (NEAR, "", False),
    ],
)
@pytest.mark.parametrize("capitals", [False, True])
def test_which_servers_are_reached_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str, exceptions: str, through: bool, capitals: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY" if capitals else "http_proxy", "http://me:it@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY" if capitals else "no_proxy", exceptions)
    expected = HttpProxy("proxy.example", 3128, "http_proxy", "me:it") if through else None
    assert find_proxy(host, 8000, ["http"]) == expected
    assert find_proxy(host, 8000, ["https"]) is None
