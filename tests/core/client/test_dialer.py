"""How a socket is opened: names are looked up aside, and of several addresses the first that answers is taken."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, Proxy

NUMERIC = socket.AI_NUMERICHOST


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port of loopback that neither accepts nor refuses connections: its listener's queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Resolver:
    """Stands in for `socket.getaddrinfo`: each name has ports of loopback, and its look-ups can be held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[str, list[int]]) -> None:
        self.names = names
        self.entered, self.free = threading.Event(), threading.Event()
        self.free.set()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in self.names or kwargs.get("flags", 0) & NUMERIC:
            return self._real(host, port, *args, **kwargs)
        self.entered.set()
        assert self.free.wait(20.0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in self.names[host]]


def test_a_slow_resolver_does_not_delay_a_healthy_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_gym(lambda: CountingEnv(1_000_000)) as server:
        proxy = Proxy(server.port)
        resolver = Resolver(monkeypatch, {"slow.example": [proxy.port]})
        envs = make_vec_remote([server.url, f"grpc://slow.example:{proxy.port}"], timeout=20)
        envs.reset()
        actions = np.zeros(2, np.int64)
        deadline = time.monotonic() + 20.0
        while any(row is None for row in envs.step(actions)[0]):
            assert time.monotonic() < deadline
        resolver.entered.clear()
        resolver.free.clear()
        proxy.cut()
        while not resolver.entered.is_set():
            assert time.monotonic() < deadline
            envs.step(actions)
        assert envs.remotes()[1].state == "connecting"
        for _ in range(5):
            rows, *_ = envs.step(actions)
            assert rows[0] is not None
            assert rows[1] is None
        assert not resolver.free.is_set()
        resolver.free.set()
        while envs.step(actions)[0][1] is None:
            assert time.monotonic() < deadline
        envs.close()
        proxy.close()


def test_a_black_hole_as_the_first_address_does_not_use_up_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with black_hole() as hole, serve_gym("CartPole-v1") as server:
        Resolver(monkeypatch, {"two.example": [hole, server.port]})
        env = make_remote(f"grpc://two.example:{server.port}", timeout=5.0)
        assert env.reset(seed=0)[0].shape == (4,)
        env.close()


def test_an_address_that_refuses_is_followed_by_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.core.client.wire.dialer.ATTEMPT_DELAY", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = listener.getsockname()[1]
    with serve_gym("CartPole-v1") as server:
        Resolver(monkeypatch, {"two.example": [refusing, server.port], "none.example": [refusing, refusing]})
        env = make_remote(f"grpc://two.example:{server.port}", timeout=20.0)
        assert env.reset(seed=0)[0].shape == (4,)
        env.close()
        with pytest.raises(errors.ConnectError, match="Connection refused"):
            make_remote(f"grpc://none.example:{server.port}", timeout=20.0)


def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(
        errors.ConnectError, match=r"the host 'nobody\.invalid' is not known: .*\. Check how it is spelled"
    ):
        make_remote("grpc://nobody.invalid:1", timeout=20.0)


def test_a_process_without_a_file_left_tries_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()

    def refuse(*args: Any) -> Any:
        refused.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with serve_gym(lambda: CountingEnv(1_000_000)) as server:
        proxy = Proxy(server.port)
        Resolver(monkeypatch, {"name.example": [proxy.port]})
        envs = make_vec_remote([server.url, f"grpc://name.example:{proxy.port}"], timeout=20)
        envs.reset()
        deadline, actions = time.monotonic() + 20.0, np.zeros(2, np.int64)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", refuse)
            proxy.cut()
            while not refused.is_set():
                envs.step(actions)
                assert time.monotonic() < deadline
            assert envs.step(actions)[0][0] is not None
            with pytest.raises(errors.ConnectError, match="Too many open files"):
                make_remote(f"grpc://name.example:{proxy.port}")
        while any(row is None for row in envs.step(actions)[0]):
            assert time.monotonic() < deadline
        envs.close()
        proxy.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "name.example"])
def test_a_process_without_a_file_left_for_a_selector_tries_again_later(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    refused = threading.Event()

    def refuse() -> Any:
        refused.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with serve_gym(lambda: CountingEnv(1_000_000)) as server:
        proxy = Proxy(server.port)
        Resolver(monkeypatch, {"name.example": [proxy.port]})
        envs = make_vec_remote(f"grpc://{host}:{proxy.port}", num_envs=2, timeout=20)
        envs.reset()
        deadline, actions = time.monotonic() + 20.0, np.zeros(2, np.int64)
        with monkeypatch.context() as patch:
            patch.setattr(selectors, "DefaultSelector", refuse)
            proxy.cut()
            while not refused.is_set():
                envs.step(actions)
                assert time.monotonic() < deadline
        while any(row is None for row in envs.step(actions)[0]):
            assert time.monotonic() < deadline
        envs.close()
        proxy.close()


def test_closing_does_not_wait_for_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch, {"slow.example": [1]})
    resolver.free.clear()
    with pytest.raises(errors.RemoteTimeoutError):
        make_remote("grpc://slow.example:1", timeout=0.1)
    assert resolver.entered.is_set()
    resolver.free.set()


def test_a_refused_connection_to_another_machine_says_where_servers_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    Resolver(monkeypatch, {"far.example": [port]})
    with pytest.raises(errors.ConnectError, match=r"only with --host 0\.0\.0\.0, or :: for IPv6 too"):
        make_remote(f"grpc://far.example:{port}", timeout=20)
