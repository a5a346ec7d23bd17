"""Running a server: health, reflection, metrics, logs, draining."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bridge import TLS, Limits, errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, Inspector, make_certificates
from bridge.wrappers import BlockingReset
from tests.peers import SERVICE
from tests.support import server_process, until


def scrape(server: Any) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_health_says_serving_also_to_who_has_no_token() -> None:
    with (
        serve_gym("CartPole-v1", token="secret-token") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_says_not_serving_while_the_server_drains() -> None:
    with serve_gym("CartPole-v1") as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        import threading

        thread = threading.Thread(target=server.stop, args=(5.0,))
        thread.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        thread.join(20)


def test_reflection_describes_the_service_but_not_to_strangers() -> None:
    with (
        serve_gym("CartPole-v1", token="secret-token") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([request]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        header = (("authorization", "Bearer secret-token"),)
        answers = list(stub.ServerReflectionInfo(iter([request]), timeout=10, metadata=header))
        assert SERVICE in [service.name for service in answers[0].list_services_response.service]


@pytest.mark.parametrize("isolation", [None, "process"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_metrics_count_steps_episodes_and_latency(lanes: int, isolation: Any) -> None:
    with serve_gym(CountingEnv, num_envs=lanes, isolation=isolation, metrics_port=0) as server:
        assert scrape(server)["bridge_connections"] == 0
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=0)
        ended = begun = 0
        for _ in range(12):
            begun = ended
            _, _, terminated, truncated, _ = envs.step(np.zeros(lanes, np.int64))
            ended += int((terminated | truncated).sum())
        found = scrape(server)
        assert ended > 0
        # What begins the next episode of an environment is no step of it, whether a lane does so in a Step or not.
        assert found["bridge_steps_total"] == 12 * lanes - begun
        assert found["bridge_episodes_total"] == ended
        assert found["bridge_step_seconds_count"] == (12 - begun if lanes == 1 else 12)
        assert (found["bridge_connections"], found["bridge_worlds"], found["bridge_slots"]) == (1, 1, lanes)
        assert (found["bridge_max_worlds"], found["bridge_draining"]) == (256, 0)
        assert any(name.startswith("bridge_build_info{") for name in found)
        assert {f'bridge_charged_seconds_total{{role="{role}"}}' for role in ("client", "viewer", "stranger")} <= set(
            found
        )
        envs.close()


def test_episodes_of_worlds_that_went_are_counted_too() -> None:
    with serve_gym(lambda: CountingEnv(2), metrics_port=0) as server:
        for _ in range(3):
            with make_remote(server.url) as env:
                for _ in range(2):
                    env.reset(seed=0)
                    while not env.step(0)[2]:
                        pass
            until(lambda: server.worlds == [])
        assert scrape(server)["bridge_episodes_total"] == server.status()["episodes"] == 6


def test_metrics_count_errors_by_code_and_worlds_that_went_too() -> None:
    with serve_gym(CountingEnv, metrics_port=0) as server:
        # A series that is missing until its first error would hide that error from a rate.
        before = {key: value for key, value in scrape(server).items() if key.startswith("bridge_errors_total")}
        assert before == {f'bridge_errors_total{{code="{each.name}"}}': 0 for each in errors.Code if each}
        for _ in range(3):
            with make_remote(server.url) as env:
                env.reset(seed=0)
                env.step(0)
                with pytest.raises(errors.RefusedError):
                    env.call("no_such_method")
            until(lambda: server.worlds == [])
        found = scrape(server)
        assert found["bridge_steps_total"] == 3
        assert sum(value for key, value in found.items() if key.startswith("bridge_errors_total")) == 3
        assert not [key for key in found if "world=" in key]


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_metrics_count_clients_with_a_wrong_token_or_none(transport: Any) -> None:
    with serve_gym(CountingEnv, token="secret", transport=transport, metrics_port=0) as server:
        for more in ({"token": "wrong"}, {}):
            with pytest.raises(errors.RefusedError, match="UNAUTHENTICATED"):
                make_remote(server.url, **more)
        make_remote(server.url, token="secret").close()
        assert scrape(server)["bridge_refused_tokens_total"] == 2


def test_metrics_count_handshakes_that_failed(tmp_path: Path) -> None:
    held = make_certificates(tmp_path)
    tls = TLS(certificate=held["server.pem"], key=held["server.key"])
    with serve_gym(CountingEnv, tls=tls, metrics_port=0) as server:
        assert scrape(server)["bridge_failed_handshakes_total"] == 0
        with socket.create_connection(("127.0.0.1", server.port), 20.0) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            plain.recv(1)
        until(lambda: scrape(server)["bridge_failed_handshakes_total"] == 1)
        with pytest.raises(errors.ConnectError):  # it does not trust the server's certificate
            make_remote(server.url)
        until(lambda: scrape(server)["bridge_failed_handshakes_total"] == 2)


def test_the_metrics_port_closes_with_the_server_and_a_taken_one_is_named() -> None:
    with serve_gym("CartPole-v1", metrics_port=0) as server:
        with pytest.raises(
            errors.SettingError, match=r"metrics_port: Address already in use; port 0 takes any free one"
        ):
            serve_gym("CartPole-v1", metrics_port=server.metrics_port)
        port = server.metrics_port
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_metrics_can_have_an_address_of_their_own() -> None:
    with serve_gym("CartPole-v1", host="::1", metrics_host="127.0.0.1", metrics_port=0) as server:
        assert scrape(server)["bridge_worlds"] == 0.0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", int(server.metrics_port or 0)), timeout=5).close()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"metrics_port": 70000}, "expected metrics_port from 0 to 65535, got 70000"),
        ({"metrics_port": 0, "metrics_host": ""}, "expected metrics_host to be an address"),
        ({"metrics_host": "127.0.0.1"}, "metrics_host='127.0.0.1' is the address of metrics_port: give that too"),
        ({"metrics_port": 0, "metrics_host": "192.0.2.1"}, r"192\.0\.2\.1:0 for metrics_port: .* metrics_host names"),
    ],
)
def test_where_metrics_cannot_be_served_is_said(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.SettingError, match=said):
        serve_gym("CartPole-v1", **keywords)


def test_strangers_at_the_metrics_port_use_up_no_files_of_the_server() -> None:
    with serve_gym("CartPole-v1", metrics_port=0) as server, contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(server.metrics_port or 0)
        silent = [stack.enter_context(socket.create_connection(address, 20.0)) for _ in range(40)]
        assert silent[0].recv(1) == b""  # it goes for a further one
        assert scrape(server)["bridge_worlds"] == 0


def test_logs_carry_connection_and_world(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bridge.core.server"), serve_gym(CountingEnv) as server:
        env = make_remote(server.url)
        world = server.worlds[0]
        env.reset()
        with contextlib.suppress(errors.RefusedError):
            env.call("_private")
        env.close()
        until(lambda: "connection=1 peer=ipv4:127.0.0.1" in caplog.text and "closed" in caplog.text)
        assert f"connection=1 world={world} refused code=PERMISSION_DENIED" in caplog.text
        assert "opened" in caplog.text


def test_the_log_says_why_a_request_or_a_connection_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> list[str]:
        return [line for line in caplog.messages if " refused code=" in line]

    limits = Limits(max_worlds=1, max_connections=2)
    with caplog.at_level(logging.INFO, "bridge.core.server"), serve_gym(CountingEnv, limits=limits) as server:
        env = make_remote(server.url)
        with pytest.raises(errors.RefusedError, match="max_worlds=1"):
            make_remote(server.url)
        assert all("code=RESOURCE_EXHAUSTED reason='" in line and "max_worlds=1" in line for line in refused())
        # A request of its own each, and so a line of its own.
        assert [line.partition("reason='")[2].partition(":")[0] for line in refused()] == ["create_world", "join_world"]
        with contextlib.suppress(errors.RemoteError):
            env.call("name\nINFO forged=1" + "x" * 3000)
        assert "forged" in refused()[-1]
        assert len(refused()[-1].splitlines()) == 1
        assert len(refused()[-1]) < 600
        other = Inspector(server.url, 20.0)
        other.read_property("server.version")  # it is connected
        with pytest.raises(errors.RefusedError, match="max_connections=2"):
            make_remote(server.url)
        assert "max_connections=2" in refused()[-1]
        other.close()
        env.close()


SERVE_SLOWLY = """
import bridge
server = bridge.serve_gym("CartPole-v1")
print(server.url, flush=True)
server.wait(grace=3.0)
"""


def test_sigterm_drains_lets_running_clients_go_on_and_exits_with_0() -> None:
    with server_process(SERVE_SLOWLY) as (process, url):
        env = make_remote(url, timeout=20)
        env.reset(seed=0)
        process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None:
            try:
                make_remote(url, timeout=20).close()
            except errors.RemoteError as error:
                refused = error
        env.step(0)  # within its grace
        env.close()
        assert process.wait(20) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_stopped_server_listens_no_longer_where_a_forked_process_lives_on() -> None:
    with serve_gym("CartPole-v1", metrics_port=0) as server:
        assert server.metrics_port is not None
        ports = server.port, server.metrics_port
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
        os.close(read)
    try:
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 10)
        serve_gym("CartPole-v1", port=ports[0]).stop()
    finally:
        os.close(write)
        os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("returns", [True, False])
def test_a_process_that_an_environment_forks_serves_no_client_of_its_parent(returns: bool) -> None:
    children = []

    class Forks(CountingEnv):
        def step(self, action: Any) -> Any:
            child = os.fork()
            if not child:
                signal.alarm(20)
                if not returns:
                    sys.exit(3)
            else:
                children.append(os.waitpid(child, 0)[1])
            return super().step(action)

    with serve_gym(lambda: Forks(50)) as server:
        envs = [make_remote(server.url, timeout=40) for _ in range(2)]
        for env in envs:
            env.reset()
        for count in (1, 2, 3):
            assert [env.step(env.action_space.sample())[0].tolist() for env in envs] == [[1, count]] * 2
        for env in envs:
            env.close()
    assert [os.waitstatus_to_exitcode(status) for status in children] == [1] * 6
