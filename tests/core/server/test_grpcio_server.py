"""`serve_gym(…, transport="grpcio")`: the server by the library grpcio; `test_compliance.py` runs over it too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge import TLS, Limits, errors, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import EVERY_SPACE, CountingEnv, make_certificates
from bridge.wrappers import BlockingReset
from tests import side_by_side
from tests.http2_tools import PATH
from tests.peers import Stream
from tests.support import chosen, sampled, until

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def by_grpcio(env: Any, **keywords: Any) -> Any:
    return serve_gym(env, **{"transport": "grpcio", **keywords})


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests of fidelity serve by grpcio."""
    monkeypatch.setattr(side_by_side, "serve_gym", by_grpcio)


@pytest.mark.usefixtures("fidelity")
@pytest.mark.parametrize("name", sampled(["CartPole", "Taxi", "Blackjack", "Pong", "MiniGrid"], 5, 0))
def test_remote_equals_local(name: str) -> None:
    side_by_side.compare_briefly(name)


DICTS_AND_BOXES = [name for name in EVERY_SPACE if name.startswith(("dict", "box"))]


@pytest.mark.usefixtures("fidelity")
@pytest.mark.parametrize("name", chosen(DICTS_AND_BOXES, lambda name: name == "dict_nested"))
def test_spaces_arrive_exactly(name: str) -> None:
    side_by_side.compare_space(name)


def test_a_unix_socket_and_the_port_are_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with by_grpcio("CartPole-v1", unix_path=str(path)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        for url in server.urls:
            envs = BlockingReset(make_vec_remote(url, num_envs=3))
            assert envs.reset(seed=1)[0].shape == (3, 4)
            assert (envs.step(np.zeros(3, np.int64))[1] == 1.0).all()
            envs.close()
        until(lambda: server.connections == 0)
    with by_grpcio("CartPole-v1") as one:
        for _ in range(2):  # the first one leaves the Unix socket to the next
            with pytest.raises(errors.SettingError, match=r"cannot listen on .*\(port\).*Is it in use"):
                by_grpcio("CartPole-v1", port=one.port, unix_path=str(path))
    # grpcio by itself would take the path away from whoever listens there.
    with by_grpcio("CartPole-v1", unix_path=str(path)) as one:
        with pytest.raises(errors.SettingError, match="a server listens there"):
            by_grpcio("CartPole-v1", unix_path=str(path))
        make_remote(one.urls[1]).close()


def test_a_call_that_waits_for_a_server_which_never_starts_ends_with_it() -> None:
    """A thread that waits on would keep the process from ending."""
    before = set(threading.enumerate())
    server = by_grpcio("CartPole-v1", start=False)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(PATH)(iter([b""]), timeout=20)
        until(lambda: any(thread.name.startswith("grpcio") for thread in threading.enumerate()))
        server.stop()
        with pytest.raises(grpc.RpcError):
            next(call)
    until(lambda: not any(thread.name.startswith("grpcio") for thread in set(threading.enumerate()) - before))


def test_tls_with_a_token(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, ["127.0.0.1"])
    files: dict[str, Any] = {"tls": TLS(made["server.pem"], made["server.key"])}
    with by_grpcio("CartPole-v1", token="secret-token", **files) as server:
        for transport in ("http2", "grpcio"):
            env = make_remote(server.url, token="secret-token", tls=TLS(ca=tmp_path / "ca.pem"), transport=transport)
            env.reset(seed=0)
            env.close()
            with pytest.raises(errors.RefusedError, match="the token is wrong"):
                make_remote(server.url, token="wrong-token", tls=TLS(ca=tmp_path / "ca.pem"), transport=transport)


def test_health_is_told_without_a_token_and_connections_are_limited() -> None:
    with by_grpcio("CartPole-v1", token="secret-token", limits=Limits(max_connections=1)) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        first = make_remote(server.url, token="secret-token")
        with pytest.raises(errors.RefusedError, match="max_connections=1"):
            make_remote(server.url, token="secret-token")
        first.close()
        until(lambda: server.connections == 0)
        make_remote(server.url, token="secret-token").close()


def test_a_client_that_goes_while_it_waits_frees_its_world_and_the_server_ends_the_calls_of_others() -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            entered.set()
            assert release.wait(20.0)
            return super().step(action)

    with by_grpcio(lambda: Slow(9)) as server:
        stream, other = Stream(server).join(), Stream(server)
        stream.ask(step=pb.StepRequest())
        stream.send(step=pb.StepRequest(actions={1: pack_tensor(0)}))
        assert entered.wait(20.0)
        stream.die()
        assert other.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
        release.set()
        until(lambda: server.connections == 1)
        other.send(reset_world=pb.ResetWorldRequest(world_name="nowhere"))
        assert other.take().error.code == Code.NOT_FOUND
        server.stop()
        with pytest.raises(grpc.RpcError):
            other.ask(leave_world=pb.LeaveWorldRequest())
        other.close()
        stream.close()


def test_requests_are_answered_in_their_order_however_many_are_sent_ahead() -> None:
    release = threading.Event()

    class Held(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 1 << 20, (), np.int64)
        action_space = gymnasium.spaces.Discrete(1 << 20)

        def reset(self, **given: Any) -> Any:
            return np.zeros((), np.int64), {}

        def step(self, action: Any) -> Any:
            assert release.wait(20.0)
            return np.asarray(action, np.int64), 0.0, False, False, {}

    with by_grpcio(Held) as server:
        stream, other = Stream(server).join(), Stream(server)
        wanted = [stream.uids["observation"]]
        stream.ask(step=pb.StepRequest(requested_observations=wanted))
        numbers = range(1, 2001)
        for number in numbers:
            stream.send(step=pb.StepRequest(actions={1: pack_tensor(number)}, requested_observations=wanted))
        until(stream.requests.empty)
        for _ in range(50):  # meanwhile the server reads as much as it will
            other.ask(leave_world=pb.LeaveWorldRequest())
        release.set()
        for number in numbers:
            assert unpack_tensor(stream.take().step.observations[wanted[0]]) == number
        other.close()
        stream.close()


def test_for_a_client_that_takes_no_answers_few_are_made_until_it_does() -> None:
    count, size, made = 120, 1 << 19, [0]

    class Large(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (size,), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, **given: Any) -> Any:
            return np.zeros(size, np.uint8), {}

        def step(self, action: Any) -> Any:
            made[0] += 1
            return np.full(size, made[0], np.uint8), 0.0, False, False, {}

    with by_grpcio(Large) as server:
        stream, other = Stream(server).join(), Stream(server, own_connection=True)
        wanted = [stream.uids["observation"]]
        stream.ask(step=pb.StepRequest())
        for _ in range(count):
            stream.send(step=pb.StepRequest(actions={1: pack_tensor(0)}, requested_observations=wanted))
        until(lambda: made[0] >= 2)
        for _ in range(300):  # meanwhile the server makes as many as it will
            other.ask(leave_world=pb.LeaveWorldRequest())
        assert made[0] < count // 2, "what was made and not taken is kept in memory"
        for number in range(1, count + 1):
            assert unpack_tensor(stream.take().step.observations[wanted[0]])[0] == number
        other.close()
        stream.close()


def test_a_transport_that_there_is_not_is_refused() -> None:
    with pytest.raises(errors.SettingError, match="expected transport to be 'http2' or 'grpcio', got 'quic'"):
        serve_gym("CartPole-v1", transport="quic")  # type: ignore[arg-type]
