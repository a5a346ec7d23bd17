"""`transport="grpcio"`: the client by the library grpcio in place of our own HTTP/2: same results, same errors."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import TLS, errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import EVERY_SPACE, CountingEnv, Proxy, make_certificates
from bridge.wrappers import BlockingReset
from tests import side_by_side
from tests.inside import call_of, remote_of
from tests.support import LargeArrays, chosen, sampled, until

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
GRPCIO: dict[str, Any] = {"transport": "grpcio", "timeout": 20.0}


def by_grpcio(url: Any, **keywords: Any) -> Any:
    return make_remote(url, **{**GRPCIO, **keywords})


def many_by_grpcio(urls: Any, **keywords: Any) -> Any:
    return make_vec_remote(urls, **{**GRPCIO, **keywords})


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """Hold that no thread of a test's connections is left, ours or grpcio's."""
    before = threading.active_count()
    yield
    until(lambda: threading.active_count() <= before)


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests of fidelity connect by grpcio."""
    monkeypatch.setattr(side_by_side, "make_remote", by_grpcio)
    monkeypatch.setattr(side_by_side, "make_vec_remote", many_by_grpcio)


# Remote equals local


@pytest.mark.usefixtures("fidelity")
@pytest.mark.parametrize("name", sampled(["CartPole", "Taxi", "Blackjack", "Pong", "MiniGrid"], 5, 0))
def test_remote_equals_local(name: str) -> None:
    side_by_side.compare_briefly(name)


DICTS_AND_BOXES = [name for name in EVERY_SPACE if name.startswith(("dict", "box"))]


@pytest.mark.usefixtures("fidelity")
@pytest.mark.parametrize("name", chosen(DICTS_AND_BOXES, lambda name: name == "dict_nested"))
def test_spaces_arrive_exactly(name: str) -> None:
    side_by_side.compare_space(name)


def test_large_arrays_are_the_users_own_and_writable() -> None:
    with serve_gym(LargeArrays) as server:
        env = by_grpcio(server.url)
        env.reset(seed=0)
        first, *_ = env.step(np.full((700, 1000), 3, np.uint8))
        second, *_ = env.step(np.full((700, 1000), 7, np.uint8))
        assert (first == 4).all()
        assert (second == 8).all()
        first += 1
        assert (second == 8).all()
        env.close()


def test_a_unix_socket_and_a_path_with_a_space(tmp_path: Path) -> None:
    with serve_gym("CartPole-v1", unix_path=str(tmp_path / "a b")) as server:
        env = by_grpcio(server.urls[1])
        local = gymnasium.make("CartPole-v1")
        assert np.array_equal(env.reset(seed=4)[0], local.reset(seed=4)[0])
        assert np.array_equal(env.step(1)[0], local.step(1)[0])
        assert env.server_version is not None
        local.close()
        env.close()


def test_a_world_in_real_time_tells_its_latency() -> None:
    with serve_gym(lambda: CountingEnv(10**6), fps=200.0) as server:
        env = by_grpcio(server.url)
        env.reset(seed=0)
        for _ in range(5):
            *_, info = env.step(0)
        assert 0.0 < info["latency"]["round_trip"] < 10.0
        env.close()


def test_a_copy_connects_by_grpcio_too_and_so_does_the_spec() -> None:
    with serve_gym("CartPole-v1") as server:
        env = by_grpcio(server.url)
        assert env.spec is not None
        assert env.spec.kwargs["transport"] == "grpcio"
        other = pickle.loads(pickle.dumps(env))
        assert np.array_equal(other.reset(seed=3)[0], env.reset(seed=3)[0])
        assert type(call_of(remote_of(other))).__name__ == "GrpcioCall"
        other.close()
        env.close()


# Errors


def test_a_transport_that_there_is_not_is_refused() -> None:
    for make in (make_remote, make_vec_remote):
        with pytest.raises(
            errors.SettingError, match="expected transport to be one of 'http2', 'grpcio', got 'pigeon'"
        ):
            make("grpc://localhost:1", transport="pigeon")  # type: ignore[operator]


@pytest.mark.parametrize("make", [by_grpcio, many_by_grpcio])
def test_nobody_there_is_told_at_once(make: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(errors.ConnectError, match=r"no connection: .*Is the server running there"):
        make(f"grpc://127.0.0.1:{port}")


@pytest.mark.parametrize("token", [None, "wrong-token"])
def test_a_wrong_token_is_refused(token: str | None) -> None:
    with serve_gym("CartPole-v1", token="right-token") as server:
        for make in (by_grpcio, many_by_grpcio):
            with pytest.raises(errors.RefusedError, match="token") as caught:
                make(server.url, token=token)
            assert caught.value.code == errors.Code.UNAUTHENTICATED
        by_grpcio(server.url, token="right-token").close()
        assert server.worlds == []


def test_a_lost_server_is_told_and_reset_connects_again() -> None:
    server = serve_gym("CartPole-v1")
    env = by_grpcio(server.url)
    env.reset(seed=0)
    server.stop()
    with pytest.raises(errors.ConnectionLostError, match=r"ended the stream|was lost"):
        env.step(0)
    with pytest.raises(errors.ConnectError, match="no connection"):
        env.reset()
    with serve_gym("CartPole-v1", port=server.port):
        env.reset(seed=0)
        env.step(0)
        env.close()


def test_slots_whose_connections_are_cut_are_truncated_and_come_back() -> None:
    with serve_gym(lambda: CountingEnv(10**6)) as server, Proxy(server.port) as proxy:
        envs = many_by_grpcio(f"grpc://127.0.0.1:{proxy.port}", num_envs=3)
        zeros = np.zeros(3, np.int64)
        BlockingReset(envs).reset(seed=0)
        envs.step(zeros)
        proxy.cut()
        cut = np.zeros(3, bool)
        until(lambda: (cut.__ior__(envs.step(zeros)[3])).all(), 20)
        until(lambda: envs.step(zeros) and all(report.state == "running" for report in envs.remotes()), 20)
        assert [report.losses for report in envs.remotes()] == [1, 1, 1]
        envs.close()
        until(lambda: server.connections == 0)


def test_messages_that_are_too_large_are_refused_at_both_ends() -> None:
    with serve_gym(LargeArrays) as server:
        env = by_grpcio(server.url, max_message_bytes=100_000)
        with pytest.raises(errors.SettingError, match="larger than max_message_bytes=100000"):
            env.call("reset", "x" * 200_000)
        with pytest.raises(errors.RefusedError) as caught:
            env.reset(seed=0)
        assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        env.close()


def test_a_step_that_takes_too_long_ends_at_the_timeout() -> None:
    release = threading.Event()

    class Stuck(CountingEnv):
        def step(self, action: Any) -> Any:
            assert release.wait(20.0)
            return super().step(action)

    with serve_gym(lambda: Stuck(10)) as server:
        env = by_grpcio(server.url, timeout=0.5)
        env.reset(seed=0)
        with pytest.raises(errors.RemoteTimeoutError, match="no answer"):
            env.step(0)
        release.set()
        env.close()


# TLS


def test_tls_with_a_token_and_a_certificate_of_the_client(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    of_server = TLS(files["server.pem"], files["server.key"], client_ca=files["ca.pem"])
    own = TLS(files["client.pem"], files["client.key"], ca=files["ca.pem"])
    with serve_gym("CartPole-v1", token="secret", tls=of_server) as server:
        env = by_grpcio(server.url, token="secret", tls=own)
        env.reset(seed=0)
        env.step(1)
        env.close()
        with pytest.raises(errors.ConnectError, match="no connection"):
            by_grpcio(server.url, token="secret", tls=TLS(ca=files["ca.pem"]))
        with pytest.raises(errors.ConnectError, match="not signed by a CA that is trusted here"):
            by_grpcio(server.url, token="secret")
        with pytest.raises(errors.SettingError, match=r"ca=…\) cannot be used"):
            by_grpcio(server.url, tls=TLS(ca=files["server.key"]))
    with pytest.raises(errors.SettingError, match="write grpcs://"):
        by_grpcio("grpc://localhost:1", tls=TLS(ca=files["ca.pem"]))


# The end


def test_an_environment_that_nobody_closes_goes_with_the_garbage() -> None:
    with serve_gym("CartPole-v1") as server:
        env = by_grpcio(server.url)
        env.reset(seed=0)
        del env
        gc.collect()
        until(lambda: server.connections == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_parents_connection_alone() -> None:
    with serve_gym("CartPole-v1") as server:
        env = by_grpcio(server.url)
        env.reset(seed=0)
        connection = call_of(remote_of(env))
        child = os.fork()
        if not child:
            code = 1
            try:
                connection.finish()
                connection.close(0.0)
                connection.send(b"")
            except errors.ConnectionLostError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        env.step(0)
        env.close()
