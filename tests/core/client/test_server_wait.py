"""Clients that start before their servers: what is waited for, how long, and what is raised at once."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import (
    TLS,
    DnsDirectory,
    Endpoint,
    Limits,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.cli import main
from bridge.errors import (
    AddressError,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    RemoteError,
    RemoteTimeoutError,
    SettingError,
)
from bridge.perlert import serve_perlert
from bridge.policies import RemotePolicy, serve_policy
from bridge.testing import CountingEnv, make_certificates
from tests.parallel_envs import Relay
from tests.support import free_port, until

PATIENCE = 60.0


@contextlib.contextmanager
def started_later(caplog: pytest.LogCaptureFixture, serve: Callable[[], Any], line: str = "waiting") -> Iterator[None]:
    """Start a server once the log says that a client waits; stop it at the end."""
    servers: list[Any] = []

    def start() -> None:
        until(lambda: line in caplog.text, PATIENCE)
        servers.append(serve())

    thread = threading.Thread(target=start)
    with caplog.at_level(logging.WARNING):
        thread.start()
        try:
            yield
        finally:
            thread.join(PATIENCE)
            for server in servers:
                server.stop()


def serve(port: int, **keywords: Any) -> Callable[[], Any]:
    return lambda: serve_gym(lambda: CountingEnv(9), port=port, **keywords)


@pytest.mark.parametrize("way", ["http2", "grpcio", "ws", "openenv"])
def test_an_environment_waits_for_its_server(caplog: pytest.LogCaptureFixture, way: str) -> None:
    port = free_port()
    scheme = "grpc" if way in ("http2", "grpcio") else way
    keywords: Any = {"transport": way} if scheme == "grpc" else {}
    with started_later(caplog, serve(port, web=True, openenv=True)):
        env = make_remote(f"{scheme}://127.0.0.1:{port}", wait_for_server=PATIENCE, **keywords)
        env.reset(seed=0)
        assert env.step(1)[1] == 1.0
        env.close()


def test_an_environment_waits_for_its_unix_socket(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with started_later(caplog, serve(0, unix_path=str(path))):
        env = make_remote(f"unix://{path}", wait_for_server=PATIENCE)
        env.reset(seed=0)
        env.close()


@pytest.mark.parametrize("way", ["http2", "grpcio", "ws", "openenv"])
@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_vector_waits_for_its_server(caplog: pytest.LogCaptureFixture, way: str, num_envs: int | None) -> None:
    port = free_port()
    scheme = "grpc" if way in ("http2", "grpcio") else way
    keywords: Any = {"transport": way} if scheme == "grpc" else {}
    with started_later(caplog, serve(port, web=True, openenv=True)):
        url = f"{scheme}://127.0.0.1:{port}"
        envs = make_vec_remote(url, num_envs=num_envs, wait_for_server=PATIENCE, blocking=True, **keywords)
        envs.reset(seed=0)
        assert envs.num_envs == (num_envs or 1)
        envs.close()


def test_a_world_of_agents_waits_for_its_server(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with started_later(caplog, lambda: serve_parallel(Relay, port=port)):
        env = make_parallel_remote(f"grpc://127.0.0.1:{port}", wait_for_server=PATIENCE)
        env.reset(seed=0)
        env.close()


def test_a_policy_waits_for_its_server(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with (
        started_later(caplog, lambda: serve_policy(lambda seen: seen, port=port), "trying again"),
        RemotePolicy(f"ws://127.0.0.1:{port}", reconnect=0.0, wait_for_server=PATIENCE) as policy,
    ):
        assert policy(np.ones(1)).tolist() == [1.0]


def test_a_player_of_perlert_waits_for_its_server() -> None:
    port = free_port()
    servers: list[Any] = []
    thread = threading.Timer(1.0, lambda: servers.append(serve_perlert(CountingEnv, name="count", port=port)))
    thread.start()
    try:
        make_remote(f"perlert://127.0.0.1:{port}/count:0", timeout=0.3, wait_for_server=PATIENCE).close()
    finally:
        thread.join()
        for server in servers:
            server.stop()


def test_a_reset_waits_for_a_server_that_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym(lambda: CountingEnv(9)) as server:
        env = make_remote(server.url, wait_for_server=PATIENCE)
        env.reset(seed=0)
        port = server.port
    with pytest.raises(ConnectionLostError):
        env.step(1)
    with started_later(caplog, serve(port)):
        env.reset(seed=0)
        assert env.step(1)[1] == 1.0
        env.close()


def test_a_name_that_is_not_known_yet_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = socket.getaddrinfo
    found = threading.Event()

    def look_up(host: Any, *arguments: Any, **keywords: Any) -> Any:
        if host != "envs.example":
            return known(host, *arguments, **keywords)
        if not found.is_set():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with serve_gym(lambda: CountingEnv(9)) as server:
        directory = DnsDirectory(f"grpc+dns://envs.example:{server.port}", look_up)
        for url in (f"grpc://envs.example:{server.port}", directory):
            found.clear()
            caplog.clear()
            thread = threading.Thread(target=lambda: (until(lambda: "waiting" in caplog.text, 30.0), found.set()))
            with caplog.at_level(logging.WARNING):
                thread.start()
                envs = make_vec_remote(url, num_envs=2, wait_for_server=PATIENCE, blocking=True)
                thread.join()
            envs.reset(seed=0)
            envs.close()


@pytest.mark.parametrize("first", [True, False])
def test_of_a_list_it_is_enough_that_one_answers(caplog: pytest.LogCaptureFixture, first: bool) -> None:
    up, away = free_port(), f"grpc://127.0.0.1:{free_port()}"
    urls = [f"grpc://127.0.0.1:{up}", away]
    with started_later(caplog, serve(up)):
        envs = make_vec_remote(urls if first else urls[::-1], wait_for_server=PATIENCE, blocking=True)
        assert envs.env.urls == (urls[0],) * 2
        assert f"{away} does not answer: {urls[0]} stands in for it" in caplog.text
        envs.reset(seed=0)
        envs.close()


def test_of_a_list_slots_go_home_once_their_server_is_up() -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, contextlib.ExitStack() as stack:
        port = free_port()
        home = f"grpc://127.0.0.1:{port}"
        envs = make_vec_remote([one.url, home], wait_for_server=PATIENCE, blocking=True)
        envs.reset(seed=0)
        assert envs.env.urls == (one.url, one.url)
        stack.enter_context(serve(port)())
        until(lambda: not envs.step(np.zeros(2, np.int64))[3].any() and envs.env.urls == (one.url, home), PATIENCE)
        envs.close()


class Listed:
    """A directory of URLs."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(url) for url in self.urls]


@pytest.mark.parametrize("num_envs", [None, 5])
def test_of_a_directory_it_is_enough_that_one_answers(caplog: pytest.LogCaptureFixture, num_envs: int | None) -> None:
    port = free_port()
    directory = Listed(f"grpc://127.0.0.1:{free_port()}", f"grpc://127.0.0.1:{port}")
    with started_later(caplog, serve(port)):
        envs = make_vec_remote(directory, num_envs=num_envs, timeout=5.0, wait_for_server=PATIENCE, blocking=True)
        assert set(envs.env.urls) == {directory.urls[1]}
        envs.reset(seed=0)
        envs.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_is_not_there_or_empty_is_waited_for(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, there: bool
) -> None:
    file = tmp_path / "urls.txt"
    if there:
        file.write_text("# none yet\n")

    def start() -> Any:
        server = serve(0)()
        file.write_text(server.url)
        return server

    with started_later(caplog, start):
        envs = make_vec_remote(f"file://{file}", num_envs=2, wait_for_server=PATIENCE, blocking=True)
        envs.reset(seed=0)
        envs.close()


def test_a_directory_is_named_by_its_url_and_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/none"
    with pytest.raises(SettingError) as told:
        make_vec_remote(url, num_envs=1)
    assert str(told.value) == f"the directory {url} cannot be read: No such file or directory"
    with pytest.raises(RemoteError) as waited:
        make_vec_remote(url, num_envs=1, wait_for_server=0.5)
    assert str(waited.value).count(url) == 1
    assert "cannot be read: No such file or directory" in str(waited.value)
    named = DnsDirectory("grpc+dns://nowhere.invalid:1")
    with pytest.raises(SettingError, match=r"^the directory grpc\+dns://nowhere\.invalid:1 cannot be read: [^\[]"):
        make_vec_remote(named, num_envs=1)
    assert "FileDirectory" not in caplog.text


def test_a_number_of_numpy_is_not_shown_as_the_one_that_was_expected() -> None:
    with pytest.raises(SettingError, match=r"got 8 of the type numpy\.int64; give int\(8\)$"):
        make_vec_remote("grpc://127.0.0.1:1", num_envs=np.int64(8))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"got True$"):
        make_vec_remote("grpc://127.0.0.1:1", num_envs=True)


def test_a_listener_waits_longer_than_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with started_later(caplog, serve(0, dial=f"grpc://127.0.0.1:{port}")):
        url = f"listen://127.0.0.1:{port}"
        envs = make_vec_remote(url, num_envs=2, timeout=1.0, wait_for_server=PATIENCE, blocking=True)
        envs.close()


# The end of the wait

AWAY: list[Callable[[int, float], Any]] = [
    lambda port, wait: make_remote(f"grpc://127.0.0.1:{port}", wait_for_server=wait),
    lambda port, wait: make_remote(f"grpc://127.0.0.1:{port}", wait_for_server=wait, transport="grpcio"),
    lambda port, wait: make_remote(f"ws://127.0.0.1:{port}", wait_for_server=wait),
    lambda port, wait: make_remote(f"openenv://127.0.0.1:{port}", wait_for_server=wait),
    lambda port, wait: make_vec_remote(f"grpc://127.0.0.1:{port}", num_envs=2, wait_for_server=wait),
    lambda port, wait: make_vec_remote([f"grpc://127.0.0.1:{port}"] * 2, wait_for_server=wait),
    lambda port, wait: make_vec_remote(Listed(f"grpc://127.0.0.1:{port}"), num_envs=2, wait_for_server=wait),
    lambda port, wait: make_vec_remote(f"openenv://127.0.0.1:{port}", num_envs=2, wait_for_server=wait),
    lambda port, wait: make_parallel_remote(f"grpc://127.0.0.1:{port}", wait_for_server=wait),
]


@pytest.mark.parametrize("connect", AWAY)
def test_the_error_at_the_end_has_the_last_reason_and_how_long_was_waited(connect: Any) -> None:
    with pytest.raises(ConnectError, match=r"[Rr]efused.*waited 0\.5 s for it: wait_for_server"):
        connect(free_port(), 0.5)


@pytest.mark.parametrize("connect", AWAY)
def test_without_the_keyword_nobody_waits(connect: Any) -> None:
    with pytest.raises(RemoteError) as raised:
        connect(free_port(), 0)
    assert "waited" not in str(raised.value)


# What is raised at once: each would wait for an hour otherwise

HOUR = 3600.0


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("make", [make_remote, make_vec_remote, make_parallel_remote])
def test_a_wrong_token_raises_at_once(make: Any, transport: str) -> None:
    with serve_gym(CountingEnv, token="right") as server, pytest.raises(RefusedError, match="UNAUTHENTICATED"):
        make(server.url, token="wrong", wait_for_server=HOUR, transport=transport)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_tls_that_fails_raises_at_once(make: Any, transport: str, tmp_path: Path) -> None:
    mine, other = make_certificates(tmp_path / "mine"), make_certificates(tmp_path / "other")
    secure = TLS(certificate=mine["server.pem"], key=mine["server.key"])
    with serve_gym(CountingEnv, tls=secure) as server:
        with pytest.raises(RemoteError):
            make(server.url, tls=TLS(ca=other["ca.pem"]), wait_for_server=HOUR, transport=transport)
        with pytest.raises(RemoteError):
            make(server.url.replace("grpcs", "grpc"), wait_for_server=HOUR, transport=transport)
    with serve_gym(CountingEnv) as plain, pytest.raises(RemoteError):
        make(f"grpcs://127.0.0.1:{plain.port}", tls=TLS(ca=mine["ca.pem"]), wait_for_server=HOUR, transport=transport)


def test_tls_of_a_policy_that_fails_raises_at_once(tmp_path: Path) -> None:
    mine, other = make_certificates(tmp_path / "mine"), make_certificates(tmp_path / "other")
    secure = TLS(certificate=mine["server.pem"], key=mine["server.key"])
    with (
        serve_policy(lambda seen: seen, tls=secure) as server,
        RemotePolicy(server.url, tls=TLS(ca=other["ca.pem"]), reconnect=HOUR, wait_for_server=HOUR) as policy,
        pytest.raises(RemoteError, match=r"(?i)certificate"),
    ):
        policy(np.ones(1))


@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_a_full_server_raises_at_once(make: Any) -> None:
    with serve_gym(CountingEnv, limits=Limits(max_connections=1)) as server:
        env = make_remote(server.url)
        with pytest.raises(RefusedError, match="RESOURCE_EXHAUSTED"):
            make(server.url, wait_for_server=HOUR)
        env.close()


def test_a_bad_url_and_an_unknown_environment_raise_at_once(tmp_path: Path) -> None:
    with pytest.raises(AddressError):
        make_remote("http://127.0.0.1:1", wait_for_server=HOUR)
    (tmp_path / "urls.txt").write_text("grpc://127.0.0.1\n")
    with pytest.raises(SettingError, match="names no port"):
        make_vec_remote(f"file://{tmp_path}/urls.txt", num_envs=2, wait_for_server=HOUR)
    with serve_gym("CartPole-v1") as server, pytest.raises(RefusedError):
        make_remote(f"{server.url}/Other-v0", wait_for_server=HOUR)


def test_a_server_that_is_silent_is_waited_for_as_long_as_timeout_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RemoteTimeoutError):
        make_remote(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5, wait_for_server=HOUR)


def test_of_a_directory_what_no_waiting_mends_is_raised_and_not_who_is_away() -> None:
    away = f"grpc://127.0.0.1:{free_port()}"
    with serve_gym(CountingEnv, token="right") as server, pytest.raises(RefusedError, match="UNAUTHENTICATED"):
        make_vec_remote(Listed(server.url, away), num_envs=2, token="wrong", wait_for_server=HOUR)


# The keyword

BAD = [-1.0, float("nan"), float("inf"), "5", True, None]


@pytest.mark.parametrize("seconds", BAD)
def test_what_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    for make in (
        lambda: make_remote("grpc://127.0.0.1:1", wait_for_server=seconds),
        lambda: make_vec_remote("grpc://127.0.0.1:1", wait_for_server=seconds),
        lambda: make_parallel_remote("grpc://127.0.0.1:1", wait_for_server=seconds),
        lambda: RemotePolicy("ws://127.0.0.1:1", wait_for_server=seconds),
    ):
        with pytest.raises(SettingError, match="wait_for_server"):
            make()


def test_gymnasium_makes_it_with_the_keyword_and_the_spec_carries_it(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with started_later(caplog, serve(port)):
        env = gymnasium.make("bridge:bridge/Remote-v0", url=f"grpc://127.0.0.1:{port}", wait_for_server=PATIENCE)
        env.reset(seed=0)
        assert env.spec is not None
        assert env.unwrapped.spec is not None
        assert env.unwrapped.spec.kwargs["wait_for_server"] == PATIENCE
        again = gymnasium.make(env.unwrapped.spec)
        again.reset(seed=0)
        copy = pickle.loads(pickle.dumps(env.unwrapped))
        copy.reset(seed=0)
        for each in (copy, again, env):
            each.close()
        vector = gymnasium.make_vec("bridge:bridge/Remote-v0", urls=[f"grpc://127.0.0.1:{port}"], wait_for_server=7.0)
        assert vector.unwrapped.spec is not None
        assert vector.unwrapped.spec.kwargs["wait_for_server"] == 7.0
        gymnasium.make_vec(vector.unwrapped.spec).close()
        vector.close()


@pytest.mark.parametrize("command", [["info"], ["bench", "--seconds", "0.1"], ["evaluate", "--episodes", "2"]])
def test_a_command_waits_for_its_server(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    port = free_port()
    name, *rest = command
    with serve_policy(lambda seen: np.zeros(len(seen), np.int64)) as policy, started_later(caplog, serve(port)):
        rest += ["--policy", policy.url] if name == "evaluate" else []
        assert main([name, f"grpc://127.0.0.1:{port}", *rest, "--wait-for-server", "60"]) == 0
    assert main(["info", f"grpc://127.0.0.1:{free_port()}"]) == 1
    assert "no connection" in capsys.readouterr().err
