"""Clients and servers over a bad network of real sockets: slow, stalled, half closed, cut, idle."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bridge import Limits, RemoteVectorEnv, Server, errors, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, Proxy
from bridge.wrappers import BlockingReset
from tests.inside import sign_of_life_after
from tests.support import until


class Way(NamedTuple):
    """A vector environment of two slots that plays through a proxy."""

    server: Server
    proxy: Proxy
    envs: RemoteVectorEnv


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def way(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    sign_of_life_after(monkeypatch, 0.4)
    with serve_gym(lambda: CountingEnv(1_000_000), limits=limits) as server, Proxy(server.port) as proxy:
        envs = make_vec_remote([f"grpc://127.0.0.1:{proxy.port}"] * 2, timeout=60.0)
        BlockingReset(envs).reset(seed=0)
        yield Way(server, proxy, envs)
        envs.close()


def step(envs: RemoteVectorEnv) -> Any:
    return envs.step(np.zeros(envs.num_envs, np.int64))


def lose_and_come_back(way: Way) -> None:
    """Both slots are lost once, counted, and come back; the server keeps nothing of what was before."""
    until(lambda: step(way.envs) and all(report.losses for report in way.envs.remotes()), 30)
    way.proxy.resume()
    until(lambda: step(way.envs) and all(report.state == "running" for report in way.envs.remotes()), 30)
    for report in way.envs.remotes():
        assert (report.losses, report.returns, report.episodes_lost) == (1, 1, 1)
        assert report.steps_asked == report.steps_received + report.steps_lost
        assert report.steps_lost <= 1
    until(lambda: (way.server.connections, len(way.server.worlds)) == (2, 2))


def test_a_slow_link_loses_nothing(way: Way) -> None:
    way.proxy.rate, way.proxy.delay = 20_000, 0.01
    for _ in range(5):
        _, _, _, truncated, _ = step(way.envs)
        assert not truncated.any()
    for report in way.envs.remotes():
        assert (report.losses, report.steps_asked, report.steps_received, report.steps_lost) == (0, 5, 5, 0)


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_half_closed_connection_is_found_counted_and_made_again(way: Way, end: str) -> None:
    step(way.envs)
    way.proxy.half_close(end)
    lose_and_come_back(way)


def test_a_half_open_connection_is_found_counted_and_made_again(way: Way) -> None:
    step(way.envs)
    way.proxy.stall()
    lose_and_come_back(way)


def test_a_connection_that_is_cut_in_the_midst_is_counted_and_made_again(way: Way) -> None:
    way.proxy.stall()
    way.envs.step_async(np.zeros(2, np.int64))
    way.proxy.cut()
    assert way.envs.step_wait()[3].tolist() == [True, True]
    assert [report.steps_lost for report in way.envs.remotes()] == [1, 1]
    lose_and_come_back(way)


def test_an_idle_connection_is_still_there_after_many_keepalives(way: Way) -> None:
    before = way.proxy.passed
    until(lambda: way.proxy.passed >= before + 5 * 34)  # a ping of HTTP/2 and its answer have 17 bytes each
    step(way.envs)
    assert [(report.losses, report.steps_received) for report in way.envs.remotes()] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("limits", [Limits(hello_timeout=0.2)], ids=["a short hello"])
def test_an_idle_connection_outlives_those_that_never_send_anything(way: Way) -> None:
    with socket.create_connection(("127.0.0.1", way.proxy.port), timeout=10) as silent:
        while silent.recv(4096):
            pass
    step(way.envs)
    assert [report.losses for report in way.envs.remotes()] == [0, 0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's table of sockets")
def test_both_ends_have_the_kernel_look_for_half_open_connections(way: Way) -> None:
    client, server = f":{way.proxy.port:04X}", f":{way.server.port:04X}"

    def timers() -> list[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [row[5][:2] for row in rows if row[3] == "01" and (row[2].endswith(client) or row[1].endswith(server))]

    until(lambda: timers() == ["02"] * 2)  # keepalive: the client's socket and the server's


def test_a_proxy_refuses_what_no_network_does() -> None:
    with Proxy(1) as proxy:
        for name, value in (("delay", -1.0), ("delay", float("inf")), ("rate", 0.0)):
            with pytest.raises(errors.SettingError, match=name):
                setattr(proxy, name, value)
        with pytest.raises(errors.SettingError, match="'client' or 'server'"):
            proxy.half_close("both")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as nobody:
            assert nobody.recv(1) == b""  # nobody listens where it leads
    proxy.close()


def test_a_proxy_passes_all_bytes_in_order_and_the_end_of_each_way() -> None:
    data = np.random.default_rng(0).bytes(300_000)
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()[1]) as proxy:
        proxy.rate, proxy.delay = 3e6, 0.01
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as one:
            other, _ = listener.accept()
            with other, other.makefile("rb") as read, one.makefile("rb") as back:
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
                assert read.read() == data
                other.sendall(b"and back")
                other.shutdown(socket.SHUT_WR)
                assert back.read() == b"and back"
        assert proxy.passed == len(data) + 8
        until(lambda: proxy.connections == 0)
