"""A server that drains: it tells its clients, takes no further ones, and ends once the last of them has left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge import Limits, errors, make_remote, serve_gym
from bridge.core.encoding.properties import read_encoded
from bridge.testing import CountingEnv, Inspector, ServerProcess
from tests.places import ROOT
from tests.preloaded import Program
from tests.support import sampled, until

pytestmark = pytest.mark.slow

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TRANSPORTS = pytest.mark.parametrize("transport", ["http2", "grpcio"])


def long() -> CountingEnv:
    return CountingEnv(1_000_000)


def is_told(env: Any) -> bool:
    """True if a client has heard that its server drains; a step takes what has come."""
    env.step(0)
    return bool(env.draining)


@TRANSPORTS
def test_a_client_is_told_and_goes_on_and_the_server_ends_once_it_has_left(transport: Any) -> None:
    with serve_gym(long, limits=Limits(drain_timeout=600.0), transport=transport) as server:
        env = make_remote(server.url, timeout=20)
        env.reset()
        assert not is_told(env)
        assert not server.draining
        server.drain()
        until(lambda: is_told(env))
        assert server.draining
        env.reset()  # also a further episode
        assert env.step(0)[1] == 1.0
        assert not server.ended
        env.close()
        until(lambda: server.ended)
        server.wait()


def test_who_comes_while_it_drains_is_not_told_to_look_for_the_server() -> None:
    with serve_gym(long, limits=Limits(drain_timeout=600.0)) as server:
        env = make_remote(server.url, timeout=20)
        env.reset()
        server.drain()
        until(lambda: is_told(env))
        with pytest.raises(errors.RemoteError, match="is stopping") as caught:
            make_remote(server.url, timeout=20)
        assert "no connection" not in str(caught.value)
        assert "Is the server running" not in str(caught.value)
        assert caught.value.unavailable, "wait_for_server waits for the next one"
        env.close()


def test_who_comes_while_it_drains_is_refused_and_may_ask_for_health() -> None:
    with serve_gym(long, limits=Limits(drain_timeout=600.0)) as server:
        env = make_remote(server.url, timeout=20)
        env.reset()
        server.drain()
        until(lambda: server.draining)
        with pytest.raises(errors.ConnectError, match="this server is stopping and takes no new worlds"):
            make_remote(server.url, timeout=20)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status == NOT_SERVING
            assert next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)).status == NOT_SERVING
        env.step(0)
        env.close()
        until(lambda: server.ended)


def test_who_only_reads_properties_is_let_in_while_it_drains_and_does_not_keep_it() -> None:
    with serve_gym(long, limits=Limits(drain_timeout=600.0)) as server:
        env = make_remote(server.url, timeout=20)
        env.reset()
        server.drain()
        until(lambda: server.draining)
        inspector = Inspector(server.url, 20.0)
        said = read_encoded(inspector.read_property("server.status"))
        assert (said["draining"], said["worlds"], said["slots"]) == (True, 1, 1)
        env.close()
        until(lambda: server.ended)
        with pytest.raises(errors.RemoteError):
            inspector.read_property("server.status")
        inspector.close()


@TRANSPORTS
def test_who_stays_is_cut_off_after_the_timeout(transport: Any) -> None:
    with serve_gym(long, limits=Limits(drain_timeout=600.0), transport=transport) as server:
        env = make_remote(server.url, timeout=20)
        env.reset()
        server.drain(0.1)
        with pytest.raises(
            errors.ConnectionLostError, match=r"the server was stopped. Call reset\(\) to connect again$"
        ):
            until(lambda: env.step(0) is None, 20.0)
        until(lambda: server.ended)
        env.close()


def test_a_shorter_drain_and_a_stop_end_a_longer_one() -> None:
    for hurry in (lambda server: server.drain(0.0), lambda server: server.stop()):
        with serve_gym(long) as server:
            env = make_remote(server.url, timeout=20)
            env.reset()
            server.drain(600.0)
            until(lambda: server.draining)
            hurry(server)
            until(lambda: server.ended)
            server.drain()  # which does nothing any more
            env.close()


def test_a_server_without_clients_ends_at_once() -> None:
    with (
        serve_gym(long, limits=Limits(drain_timeout=600.0)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        next(watch)  # asking for health makes nobody a client
        waiting = threading.Thread(target=server.wait)
        waiting.start()
        server.drain()
        waiting.join(20)
        assert not waiting.is_alive()
        assert [answer.status for answer in watch] in ([NOT_SERVING], [NOT_SERVING, NOT_SERVING])


def test_a_server_that_was_never_started_is_stopped() -> None:
    server = serve_gym(long, start=False)
    server.drain(600.0)
    assert "stopped" in repr(server)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that wake a thread")
def test_ctrl_c_ends_the_wait_of_stop_and_the_next_stop_ends_the_server(processes: int) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with serve_gym(long, processes=processes) as server, make_remote(server.urls[0], timeout=20) as env:
            env.reset()

            def interrupt() -> None:
                until(lambda: is_told(env))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                server.stop(grace=600.0)
            thread.join()
            env.step(0)  # it still drains
            server.stop()
            assert server.ended
            with pytest.raises(errors.ConnectionLostError):
                env.step(0)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGUSR1 calls in the main thread."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda function: signal.signal(signal.SIGUSR1, lambda *given: function()) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that wake a thread")
def test_a_signal_handler_ends_the_wait_of_the_stop_that_it_interrupts(processes: int, on_signal: Any) -> None:
    """A program's handler of SIGTERM stops its server with some grace, and a supervisor sends SIGTERM twice."""
    with serve_gym(long, processes=processes) as server, make_remote(server.urls[0], timeout=20) as env:
        env.reset()
        on_signal(server.stop)

        def interrupt() -> None:
            until(lambda: is_told(env))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        thread = threading.Thread(target=interrupt)
        thread.start()
        server.stop(grace=600.0)
        thread.join()
        assert "stopped" in repr(server)
        with pytest.raises(errors.ConnectionLostError):
            env.step(0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_in_another_thread_shortens_the_grace_of_the_first(processes: int) -> None:
    with serve_gym(long, processes=processes) as server, make_remote(server.urls[0], timeout=20) as env:
        env.reset()
        first = threading.Thread(target=server.stop, args=[600.0])
        first.start()
        until(lambda: is_told(env))
        server.stop()
        assert "stopped" in repr(server)
        first.join(20)
        assert not first.is_alive()


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="needs signals")
def test_a_signal_handler_may_stop_a_group_whose_process_is_asked_whether_it_has_ended(
    on_signal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`subprocess` holds a lock then, for which a `stop` that waited in the handler would wait for ever."""
    ask, interrupted = os.waitpid, list[int]()

    def interrupt(pid: int, options: int) -> tuple[int, int]:
        if not interrupted:
            interrupted.append(pid)
            signal.raise_signal(signal.SIGUSR1)
        return ask(pid, options)

    with serve_gym(long, processes=2) as server, make_remote(server.urls[0], timeout=20) as env:
        env.reset()
        on_signal(server.stop)
        monkeypatch.setattr(os, "waitpid", interrupt)
        server.stop(grace=600.0)
        assert interrupted
        assert "stopped" in repr(server)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_a_signal_handler_may_ask_a_group_that_is_asked(on_signal: Any) -> None:
    told = []

    def ask() -> None:
        for pid in server.pids:
            os.kill(pid, signal.SIGCONT)
        told.append(server.status())

    with serve_gym(long, processes=2) as server, make_remote(server.urls[0], timeout=20) as env:
        env.reset()
        on_signal(ask)
        for pid in server.pids:
            os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
        timer.start()
        own = server.status()
        timer.join()
        assert [own["worlds"], told[0]["worlds"]] == [1, 1]


@pytest.mark.parametrize("seconds", [-1, "2", float("inf"), True])
def test_a_timeout_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(errors.SettingError, match="expected drain_timeout to be a number of seconds"):
        serve_gym(long, limits=Limits(drain_timeout=seconds))
    with serve_gym(long) as server:
        with pytest.raises(errors.SettingError, match="expected timeout to be a number"):
            server.drain(seconds)
        for method in (server.stop, server.wait):
            with pytest.raises(errors.SettingError, match="expected grace to be a number"):
                method(seconds)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_sigterm_drains_bridge_serve_for_as_long_as_it_is_told() -> None:
    with ServerProcess("CartPole-v1", "--drain-timeout", "600") as server:
        env = make_remote(server.url, timeout=20)
        env.reset(seed=0)
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20.0
        while not env.draining:
            assert time.monotonic() < deadline
            env.reset()
            env.step(0)
        env.close()
        assert server.wait(20) == 0


GROUP = """
import bridge, sys
server = bridge.serve_gym("CartPole-v1", processes=2, limits=bridge.Limits(drain_timeout=600.0))
print(*server.urls, flush=True)
server.wait()
print("ended", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("again", sampled([False, True], 2))
def test_sigterm_drains_server_processes_and_a_second_one_stops_them(again: bool) -> None:
    root = ROOT
    parent = Program("-c", GROUP, cwd=root)
    assert parent.stdout is not None
    try:
        urls = parent.stdout.readline().split()
        envs = [make_remote(url, timeout=20) for url in urls]
        for env in envs:
            env.reset()
        parent.send_signal(signal.SIGTERM)
        for env in envs:
            until(lambda env=env: env.reset() and env.draining, 20.0)
        envs[0].close()
        assert parent.poll() is None
        if again:
            parent.send_signal(signal.SIGTERM)
        else:
            envs[1].close()
        assert parent.stdout.read() == "ended\n"
        assert parent.wait(20) == 0
        envs[1].close()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_server_processes_drain_together() -> None:
    with serve_gym("CartPole-v1", processes=2) as server:
        env = make_remote(server.urls[1], timeout=20)
        env.reset()
        assert not server.draining
        server.drain(600.0)
        assert server.draining
        until(lambda: env.reset() and env.draining)
        env.close()
        server.wait()
