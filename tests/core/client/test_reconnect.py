"""Remotes that go and come back: what is told, what is counted, who takes over, when it is tried again."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bridge import errors, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, Proxy
from bridge.wrappers import BlockingReset
from tests.inside import protocol_of, remotes_of, sign_of_life_after
from tests.support import server_process, until

SERVE_AT = """
import sys
import bridge, bridge.testing
server = bridge.serve_gym(lambda: bridge.testing.CountingEnv(1_000_000), port=int(sys.argv[1]))
print(server.url, flush=True)
server.wait(grace=0.0)
"""


def long() -> CountingEnv:
    """Its episodes end by nothing but failures."""
    return CountingEnv(1_000_000)


def zeros(envs: Any) -> Any:
    return np.zeros(envs.num_envs, np.int64)


def step_until(envs: Any, condition: Any, deadline: float = 30.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, envs.remotes()
        envs.step(zeros(envs))


def add_up(envs: Any) -> None:
    """Every step that was asked for was received, or is counted as lost."""
    for report in envs.remotes():
        assert report.steps_asked == report.steps_received + report.steps_lost, report


def test_a_server_that_restarts_on_its_port_is_joined_again_and_its_absence_counted() -> None:
    with serve_gym(long) as steady, server_process(SERVE_AT, "0") as (process, url):
        envs = make_vec_remote([steady.url, url], timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=1)
        blocking.step(zeros(envs))
        assert [report.state for report in envs.remotes()] == ["running", "running"]
        process.kill()
        process.wait(10)
        step_until(envs, lambda: envs.remotes()[1].losses == 1)
        truncations = 0
        for _ in range(3):
            _, _, _, truncated, infos = envs.step(zeros(envs))
            truncations += int(truncated[1])
        away = envs.remotes()[1]
        assert away.state in ("lost", "connecting")
        assert away.away is not None
        assert away.away > 0
        assert url in str(away.reason)
        assert infos["seconds_away"][1] > 0
        assert infos["seconds_away"][0] == 0
        assert away.episodes_lost == 1
        with server_process(SERVE_AT, url.rpartition(":")[2]):
            step_until(envs, lambda: envs.remotes()[1].state == "running")
            back = envs.remotes()[1]
            assert (back.away, back.losses, back.returns) == (None, 1, 1)
            assert back.seconds_away > 0
            assert "seconds_away" not in envs.step(zeros(envs))[4]
            add_up(envs)
            envs.close()


def test_a_spare_takes_over_and_the_lost_remote_becomes_the_spare() -> None:
    with (
        serve_gym(long) as one,
        serve_gym(long) as spare,
        server_process(SERVE_AT, "0") as (process, url),
    ):
        envs = make_vec_remote([one.url, url], spares=[spare.url], timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=1)
        step_until(envs, lambda: envs.remotes()[2].state == "spare")
        assert [report.slots for report in envs.remotes()] == [(0,), (1,), ()]
        process.kill()
        process.wait(10)
        ended: list[bool] = []
        step_until(envs, lambda: ended.append(envs.step(zeros(envs))[3][1]) or any(ended))
        step_until(envs, lambda: envs.remotes()[1].url == spare.url and envs.remotes()[1].state == "running", 10)
        assert envs.urls == (one.url, spare.url)
        last = envs.remotes()[2]
        assert (last.url, last.slots) == (url, ())
        assert last.state in ("lost", "connecting")
        assert last.episodes_lost == 1
        with server_process(SERVE_AT, url.rpartition(":")[2]):
            step_until(envs, lambda: envs.remotes()[2].state == "spare")
            add_up(envs)
            envs.close()


def test_slots_that_go_from_one_server_to_another_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym(long) as spare, server_process(SERVE_AT, "0") as (process, url):
        envs = make_vec_remote(url, num_envs=3, spares=[spare.url] * 3, timeout=20)
        BlockingReset(envs).reset(seed=1)
        step_until(envs, lambda: [report.state for report in envs.remotes()[3:]] == ["spare"] * 3)
        process.kill()
        process.wait(10)
        step_until(
            envs, lambda: all((each.url, each.state) == (spare.url, "running") for each in envs.remotes()[:3]), 20
        )
        envs.close()
    said = [record.getMessage() for record in caplog.records if "takes over" in record.getMessage()]
    assert said == [f"{spare.url} takes over the slots of {url}"]


def test_urls_beyond_num_envs_are_spares_and_are_told_of() -> None:
    with serve_gym(long) as one, serve_gym(long) as two:
        envs = make_vec_remote([one.url, two.url], num_envs=1)
        assert envs.num_envs == 1
        BlockingReset(envs).reset()
        step_until(envs, lambda: len(two.worlds) == 1 and envs.remotes()[1].state == "spare")
        envs.close()
        assert (one.connections, two.connections) == (0, 0)


def test_a_directory_takes_no_spares_and_says_where_they_go(tmp_path: Path) -> None:
    urls = tmp_path / "urls.txt"
    urls.write_text("grpc://127.0.0.1:1\n")
    with pytest.raises(errors.SettingError, match="add these URLs to the directory"):
        make_vec_remote(urls.as_uri(), num_envs=2, spares=["grpc://127.0.0.1:2"])


def test_a_spare_of_another_environment_is_not_used_and_says_why() -> None:
    with serve_gym(long) as one, serve_gym("Acrobot-v1") as other:
        envs = make_vec_remote(one.url, spares=other.url)
        BlockingReset(envs).reset()
        step_until(envs, lambda: "it is no spare" in str(envs.remotes()[1].reason))
        envs.close()


def test_a_spare_that_is_not_there_holds_nobody_up() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"grpc://127.0.0.1:{probe.getsockname()[1]}"
    with serve_gym(long) as one:
        envs = make_vec_remote(one.url, spares=[nobody])
        BlockingReset(envs).reset()
        step_until(envs, lambda: envs.remotes()[1].state == "lost")
        assert envs.remotes()[0].losses == 0
        envs.close()


@pytest.fixture
def proxied() -> Iterator[tuple[Any, Proxy]]:
    with serve_gym(long) as server, Proxy(server.port) as proxy:
        yield server, proxy


def test_a_connection_that_is_cut_is_made_again(proxied: tuple[Any, Proxy]) -> None:
    _, proxy = proxied
    envs = make_vec_remote(f"grpc://127.0.0.1:{proxy.port}", timeout=20)
    BlockingReset(envs).reset(seed=0)
    proxy.cut()
    step_until(envs, lambda: envs.remotes()[0].losses == 1)
    step_until(envs, lambda: envs.remotes()[0].state == "running")
    add_up(envs)
    envs.close()


def test_a_lost_connection_is_made_again_between_calls(
    proxied: tuple[Any, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_of_life_after(monkeypatch, 1.0)  # the thread looks after a tenth of it
    _, proxy = proxied
    envs = make_vec_remote(f"grpc://127.0.0.1:{proxy.port}", timeout=20)
    blocking = BlockingReset(envs)
    blocking.reset(seed=0)
    blocking.step(zeros(envs))
    proxy.cut()
    # No method is called that looks at a socket: the optimizer may run here.
    until(lambda: envs.remotes()[0].losses == 1)
    until(lambda: envs.remotes()[0].state == "resetting")
    _, _, _, truncated, infos = blocking.step(zeros(envs))
    assert truncated.tolist() == [True]
    assert str(proxy.port) in str(infos["error"][0])
    assert not blocking.step(zeros(envs))[3].any()
    assert (envs.remotes()[0].state, envs.remotes()[0].episodes_lost) == ("running", 1)
    add_up(envs)
    envs.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "bridge-keepalive"])


def test_a_half_open_connection_is_found_by_keepalive(
    proxied: tuple[Any, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_of_life_after(monkeypatch, 0.5)
    _, proxy = proxied
    envs = make_vec_remote(f"grpc://127.0.0.1:{proxy.port}", timeout=300)
    BlockingReset(envs).reset(seed=0)
    proxy.stall()
    envs.step_async(zeros(envs))
    envs.step_wait()  # long before its timeout of 300 s
    report = envs.remotes()[0]
    assert report.losses == 1
    assert report.steps_lost == 1
    assert "keepalive" in str(report.reason) or "ping" in str(report.reason)
    proxy.cut()
    proxy.resume()
    step_until(envs, lambda: envs.remotes()[0].state == "running")
    envs.close()


def test_a_server_that_stands_still_is_lost_after_the_timeout_and_comes_back() -> None:
    with server_process(SERVE_AT, "0") as (process, url):
        envs = make_vec_remote(url, timeout=1.0)
        BlockingReset(envs).reset(seed=0)
        process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
            truncated = envs.step(zeros(envs))[3]
            assert truncated.tolist() == [True]
            assert "no answer to a step within 1 s" in str(envs.remotes()[0].reason)
        finally:
            process.send_signal(signal.SIGCONT)
        step_until(envs, lambda: envs.remotes()[0].state == "running")
        add_up(envs)
        envs.close()


def test_a_step_that_is_refused_is_counted_as_lost() -> None:
    class Sometimes(CountingEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("no")

    with serve_gym(lambda: Sometimes(5)) as server:
        envs = make_vec_remote(server.url, timeout=20)
        BlockingReset(envs).reset()
        _, _, _, truncated, _ = envs.step(zeros(envs))
        assert truncated.tolist() == [True]
        report = envs.remotes()[0]
        assert (report.steps_asked, report.steps_received, report.steps_lost) == (1, 0, 1)
        assert report.episodes_lost == 1
        envs.close()


def test_a_reset_gives_up_the_step_that_is_under_way_and_counts_it() -> None:
    with serve_gym(long) as server:
        envs = make_vec_remote(server.url, num_envs=2)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        for _ in range(4):
            blocking.step(zeros(envs))
        blocking.reset(seed=1)
        add_up(envs)
        assert sum(report.steps_received for report in envs.remotes()) == 8
        envs.close()
    with pytest.raises(errors.ClosedError):
        envs.step(zeros(envs))


def test_close_waits_for_all_hung_servers_together() -> None:
    with serve_gym(long) as server:
        proxies = [Proxy(server.port) for _ in range(8)]
        envs = make_vec_remote([f"grpc://127.0.0.1:{proxy.port}" for proxy in proxies], timeout=20)
        for proxy in proxies:
            proxy.stall()
        start = time.monotonic()
        envs.close()
        assert time.monotonic() - start < 12.0  # each by itself takes 2 s
        for proxy in proxies:
            proxy.close()


def test_a_pickled_copy_has_spares_of_its_own() -> None:
    import pickle

    with serve_gym(long) as one, serve_gym(long) as two:
        envs = make_vec_remote(one.url, spares=[two.url])
        copy = pickle.loads(pickle.dumps(envs))
        for each in (envs, copy):
            BlockingReset(each).reset()
            step_until(each, lambda each=each: each.remotes()[1].state == "spare")
        assert (one.connections, two.connections) == (2, 2)
        copy.close()
        envs.close()


def test_only_servers_of_ours_are_asked_often_for_a_sign() -> None:
    from tests.public_server import PublicServer

    with PublicServer() as foreign, serve_gym(long) as server:
        quiet = []
        for port in (foreign.port, server.port):
            envs = make_vec_remote(f"grpc://127.0.0.1:{port}", timeout=20)
            quiet.append(protocol_of(remotes_of(envs)[0]).keepalive_interval)
            envs.close()
    assert quiet == [310.0, 20.0]
