"""Servers of OpenEnv as remote environments: schemas, redirections, losses, tokens."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from bridge import Limits, make_remote, make_vec_remote, serve_gym
from bridge.errors import (
    AddressError,
    ConnectError,
    ConnectionLostError,
    EnvironmentFailedError,
    InvalidActionError,
    PeerError,
    RefusedError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
)
from bridge.testing import CountingEnv, SpaceEnv, digest
from tests.openenv.sessions import ask, openenv, session


class CrashingEnv(CountingEnv):
    """Its step ends its process."""

    def step(self, action: Any) -> Any:
        os._exit(3)


# Servers of others as remotes


class OtherServer:
    """A server whose `/schema` and sessions are scripted: each message gets the next answer.

    Args:
        schema: The body of `/schema`.
        answers: What a session sends, an answer each; None closes it, and "" is silence.
    """

    def __init__(self, schema: Any, answers: list[Any]) -> None:
        from websockets.datastructures import Headers
        from websockets.http11 import Response
        from websockets.sync.server import ServerConnection, serve

        body = schema if isinstance(schema, bytes) else json.dumps(schema).encode()

        def give(connection: ServerConnection, request: Any) -> Any:
            if request.path == "/schema":
                return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)
            return None

        def play(connection: ServerConnection) -> None:
            with contextlib.suppress(ConnectionClosed):
                for answer in answers:
                    self.received.append(json.loads(connection.recv()))
                    if answer is None:
                        return
                    if answer != "":
                        connection.send(answer if isinstance(answer, str) else json.dumps(answer))
                connection.recv()

        self.received: list[Any] = []
        self._server = serve(play, "127.0.0.1", 0, process_request=give)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> OtherServer:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._thread.join(20.0)

    @property
    def url(self) -> str:
        return f"openenv://127.0.0.1:{self._server.socket.getsockname()[1]}"


def schema_of(action: Any, observation: Any, **more: Any) -> Any:
    flags = {"done": {"type": "boolean"}, "reward": {"anyOf": [{"type": "number"}, {"type": "null"}]}}
    return {
        "action": {"type": "object", "properties": {**action, "metadata": {"type": "object"}}, **more},
        "observation": {
            "type": "object",
            "properties": {**observation, **flags, "metadata": {"type": "object"}},
            **more,
        },
        "state": {},
    }


ECHO = schema_of(
    {"message": {"type": "string", "maxLength": 40}},
    {"text": {"type": "string"}, "length": {"type": "integer", "minimum": 0}, "tags": {"type": "object"}},
)


def heard(text: str, **more: Any) -> Any:
    data = {"observation": {"text": text, "length": len(text), "tags": {"a": 1}}, "reward": 1, "done": False, **more}
    return {"type": "observation", "data": data}


def test_a_foreign_servers_schema_makes_the_spaces_and_what_has_none_is_in_the_info() -> None:
    with OtherServer(ECHO, [heard("hello", reward=None), heard("you"), heard("end", done=True)]) as other:
        env = make_remote(other.url)
        assert isinstance(env.action_space, spaces.Text)
        assert list(env.observation_space.spaces) == ["length", "text"]
        observation, info = env.reset(seed=7, options={"level": 2})
        assert observation == {"text": "hello", "length": 5}
        assert info == {"tags": {"a": 1}}
        assert env.step("hi")[1:4] == (1.0, False, False)
        assert env.step("é – ü")[2:4] == (True, False)
        with pytest.raises(InvalidActionError):
            env.step("x" * 41)
        env.close()
        assert other.received[0] == {"type": "reset", "data": {"level": 2, "seed": 7}}
        assert other.received[2] == {"type": "step", "data": {"message": "é – ü"}}


def test_null_is_not_a_number_as_pydantic_writes_it() -> None:
    answer = {"type": "observation", "data": {"observation": {"speeds": [0.5, None]}}}
    speeds = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    with OtherServer(schema_of({"move": {"type": "string"}}, {"speeds": {"type": "array"}}), [answer]) as other:
        env = make_remote(other.url, observation_space=speeds)
        assert digest(env.reset()[0]) == digest(np.array([0.5, np.nan], np.float32))
        env.close()


def test_spaces_that_are_given_take_the_place_of_the_schema() -> None:
    schema = schema_of({"move": {"type": "object"}}, {"board": {"type": "array", "items": {"type": "array"}}})
    answer = {"type": "observation", "data": {"observation": {"board": [[1, 2], [3, 4]]}}}
    board, move = spaces.Box(0, 9, (2, 2), np.int8), spaces.MultiDiscrete([3, 3])
    with OtherServer(schema, [answer, answer]) as other:
        with pytest.raises(SettingError, match="action_space="):
            make_remote(other.url)
        with pytest.raises(SettingError, match="observation_space="):
            make_remote(other.url, action_space=move)
        env = make_remote(other.url, action_space=move, observation_space=board)
        observation, _ = env.reset()
        assert observation.dtype == np.int8
        assert observation.tolist() == [[1, 2], [3, 4]]
        env.step(np.array([1, 2]))
        env.close()
        assert other.received[1]["data"] == {"move": [1, 2]}


def test_a_schema_is_read_as_pydantic_writes_it() -> None:
    definitions = {"$defs": {"Move": {"type": "integer", "minimum": 2, "maximum": 5}}}
    fields = {
        "move": {"$ref": "#/$defs/Move"},
        "speed": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
        "stop": {"type": "boolean"},
        "grid": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "number"}},
        },
        "words": {"type": "array", "items": {"type": "string"}},
    }
    with OtherServer(schema_of(fields, {"text": {"type": "string"}}, **definitions), []) as other:
        env = make_remote(other.url)
        assert env.action_space == spaces.Dict(
            move=spaces.Discrete(4, start=2),
            speed=spaces.Box(0, 1, (), np.float64),
            stop=spaces.Discrete(2),
            grid=spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        )


DOUBLING = {
    str(number): {"type": "object", "properties": {key: {"$ref": f"#/$defs/{number + 1}"} for key in "ab"}}
    for number in range(60)
}


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (b"{", PeerError),
        ([], PeerError),
        ({"action": {}}, PeerError),
        (schema_of({"a": {"type": "string", "maxLength": "x"}}, {}), SettingError),
        (schema_of({"a": {"type": "integer", "minimum": 5, "maximum": 1}}, {}), SettingError),
        (schema_of({"a": {"$ref": "#/nowhere"}}, {}), SettingError),
        (schema_of({"a": {"$ref": "#/$defs/0"}}, {}, **{"$defs": DOUBLING}), SettingError),
        (schema_of({"a": {"x-gymnasium-space": "{"}}, {}), SettingError),
        (
            schema_of({"a": {"type": "array", "minItems": 10**9, "maxItems": 10**9, "items": {"type": "number"}}}, {}),
            SettingError,
        ),
    ],
)
def test_a_schema_that_cannot_be_read_is_an_error_that_says_so(schema: Any, error: type[Exception]) -> None:
    with OtherServer(schema, []) as other, pytest.raises(error):
        make_remote(other.url)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ("{", PeerError, "expected JSON"),
        ("[]", PeerError, "expected an observation"),
        ({"type": "observation", "data": {}}, PeerError, "expected an observation"),
        ({"type": "observation", "data": {"observation": {"text": 3, "length": 1}}}, PeerError, "observation"),
        ({"type": "observation", "data": {"observation": {"text": "x"}}}, PeerError, "length"),
        ({"type": "error", "data": {"message": "no such level"}}, EnvironmentFailedError, "no such level"),
        ("", RemoteTimeoutError, "no answer to step"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_that_says_so(answer: Any, error: type[Exception], text: str) -> None:
    with OtherServer(ECHO, [heard("hello"), answer]) as other:
        env = make_remote(other.url, timeout=1.0)
        env.reset()
        with pytest.raises(error, match=text):
            env.step("hi")
        env.close()


def test_a_port_that_speaks_no_http_is_an_error_that_says_so() -> None:
    with serve_gym("CartPole-v1") as server, pytest.raises(ConnectError, match=r"GET /schema failed: BadStatus"):
        make_remote(f"openenv://127.0.0.1:{server.port}")


def test_a_port_where_nobody_listens_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        ConnectError, match=r"failed: \[Errno \d+\] Connection refused\. Is the server running there\?$"
    ):
        make_remote(f"openenv://127.0.0.1:{port}")


def test_a_space_that_json_does_not_hold_is_named_to_the_client() -> None:
    space = spaces.Sequence(spaces.Dict(a=spaces.Discrete(2)), stack=True)
    with (
        serve_gym(lambda: SpaceEnv(space), web=True, openenv=True) as server,
        pytest.raises(ConnectError, match="holds no Sequence of composites, got Sequence"),
    ):
        make_remote(f"openenv://127.0.0.1:{server.port}")


def test_a_redirection_to_what_is_no_url_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def redirect() -> None:
            with listener.accept()[0] as peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://a..b/\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=redirect)
        thread.start()
        with pytest.raises(ConnectError, match="GET /schema failed: "):
            make_remote(f"openenv://127.0.0.1:{listener.getsockname()[1]}", timeout=10.0)
        thread.join()


def test_a_redirection_to_another_server_does_not_take_the_token_along() -> None:
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as other:
        place = b"Location: http://127.0.0.1:%d/schema\r\n" % other.getsockname()[1]

        def answer() -> None:
            for listener, status in ((first, b"302 Found"), (other, b"404 Not Found")):
                with listener.accept()[0] as peer:
                    heads.append(peer.recv(4096))
                    peer.sendall(b"HTTP/1.1 %b\r\n%bContent-Length: 0\r\n\r\n" % (status, place))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectError, match=r"GET /schema failed: .*404"):
            make_remote(f"openenv://127.0.0.1:{first.getsockname()[1]}", token="secret", timeout=10.0)
        thread.join()
    assert b"Bearer secret" in heads[0]
    assert b"secret" not in heads[1]


def test_urls_that_differ_in_their_tokens_alone_are_refused_without_showing_them() -> None:
    with pytest.raises(SettingError, match="differ in more than their tokens") as caught:
        make_vec_remote(["openenv://127.0.0.1:9?token=first", "openenv://127.0.0.1:9?token=second"])
    assert "first" not in str(caught.value)


def test_a_schema_that_never_ends_is_given_up_after_the_timeout() -> None:
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            with listener.accept()[0] as peer, contextlib.suppress(OSError):
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not done.wait(0.1):
                    peer.sendall(b" ")

        thread = threading.Thread(target=dribble)
        thread.start()
        # Ended by the test at last, so that it fails where the client waits on.
        timer = threading.Timer(10.0, done.set)
        timer.start()
        with pytest.raises(RemoteTimeoutError, match=r"no answer to GET /schema within 0\.5 s"):
            make_remote(f"openenv://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
        timer.cancel()
        done.set()
        thread.join()


LINUX = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends such a connection")


@pytest.mark.parametrize("pings", [False, pytest.param(True, marks=LINUX)])
def test_a_server_that_does_not_read_is_given_up_after_the_timeout(pings: bool) -> None:
    """Its buffers do not hold a large request, nor the answers to pings without end."""
    schema = json.dumps(ECHO).encode()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as opened:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def play() -> None:
            asked = opened.enter_context(listener.accept()[0])
            asked.recv(65536)
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(schema), schema))
            session = opened.enter_context(listener.accept()[0])
            protocol = ServerProtocol()
            protocol.receive_data(session.recv(65536))
            (request,) = protocol.events_received()
            protocol.send_response(protocol.accept(request))
            session.sendall(b"".join(protocol.data_to_send()))
            with contextlib.suppress(OSError):
                while pings:
                    session.sendall((b"\x89\x7d" + bytes(125)) * 500)

        thread = threading.Thread(target=play)
        thread.start()
        env = make_remote(f"openenv://127.0.0.1:{listener.getsockname()[1]}", timeout=1.0)
        text = "no answer to reset|lost|closed" if pings else "did not read the request within 1 s"
        with pytest.raises((ConnectionLostError, RemoteTimeoutError), match=text):
            env.reset(options={"level": "x" * (1 if pings else 1 << 24)})
        env.close()
        thread.join(20.0)
        assert not thread.is_alive()


def test_a_lost_connection_is_a_truncated_episode_and_reset_connects_again() -> None:
    with serve_gym(lambda: CountingEnv(9), web=True, openenv=True) as server:
        env = make_remote(openenv(server))
        with pytest.raises(ResetNeededError):
            env.step(0)
        env.reset()
        last = env.step(0)
        port = server.port
    lost = env.step(0)
    assert digest(lost[0]) == digest(last[0])
    assert lost[1:4] == (0.0, False, True)
    assert "was lost" in lost[4]["error"]
    with serve_gym(lambda: CountingEnv(9), web=True, openenv=True, port=port):
        env.reset()
        assert not env.step(0)[3]
        env.close()


def test_the_last_observation_is_given_again_as_it_came_whatever_was_done_to_it() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server:
        env = make_remote(openenv(server))
        env.reset(seed=0)
        last = env.step(0)[0]
        came = last.copy()
        last[:] = 0.0
    lost = env.step(0)[0]
    assert lost.tolist() == came.tolist()
    lost[:] = 0.0
    env.close()


def test_slots_at_a_url_that_is_no_text_leave_no_server_running() -> None:
    before = threading.active_count()
    with pytest.raises(UnicodeEncodeError):
        make_vec_remote("openenv://\udc80:1")
    assert threading.active_count() == before


def test_slots_play_on_openenv_servers_and_come_back_after_a_loss() -> None:
    local = gymnasium.make("CartPole-v1")
    with serve_gym("CartPole-v1", web=True, openenv=True) as one:
        other = serve_gym("CartPole-v1", web=True, openenv=True)
        port = other.port
        envs = make_vec_remote([openenv(one), openenv(other)], num_envs=2, blocking=True, timeout=20.0)
        observations, _ = envs.reset(seed=3)
        for slot in range(2):
            assert observations[slot].tolist() == local.reset(seed=3 + slot)[0].tolist()
        other.stop()
        _, _, _, truncations, _ = envs.step(np.array([1, 1]))
        assert truncations.tolist() == [False, True]
        with serve_gym("CartPole-v1", web=True, openenv=True, port=port):
            envs.step(np.array([1, 1]))
            _, rewards, _, truncations, _ = envs.step(np.array([1, 1]))
            assert not truncations.any()
            assert rewards.tolist() == [1.0, 1.0]
            envs.close()


def test_a_world_that_is_gone_is_made_anew_by_the_next_reset() -> None:
    limits = Limits(idle_timeout=3600.0)
    with (
        serve_gym(CrashingEnv, web=True, openenv=True, isolation="process", limits=limits) as server,
        session(server) as one,
    ):
        for _ in range(2):
            assert ask(one, {"type": "reset"})["type"] == "observation"
            assert ask(one, {"type": "step", "data": {"action": 0}})["type"] == "error"


def test_a_token_of_the_environment_is_not_sent_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_TOKEN", "secret")
    with serve_gym("CartPole-v1", web=True, openenv=True, token="secret") as server:
        make_remote(openenv(server)).close()  # on this machine
        monkeypatch.delenv("BRIDGE_TOKEN")
        make_remote(f"{openenv(server)}?token=secret").close()
        monkeypatch.setenv("BRIDGE_TOKEN", "secret")
        elsewhere: list[Any] = []

        def refuse(opener: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
            elsewhere.append(request)
            raise OSError("nobody is there")

        monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
        with pytest.raises(ConnectError, match="nobody is there"):
            make_remote("openenv://elsewhere.example:1")
    assert not elsewhere[0].has_header("Authorization")


def test_a_token_in_the_url_of_slots_is_used_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True, token="the-secret") as server:
        url = openenv(server)
        envs = make_vec_remote([f"{url}?token=the-secret"] * 2, blocking=True)
        assert envs.reset()[0].shape == (2, 4)
        envs.close()
        with pytest.raises(RefusedError, match="401") as caught:
            make_vec_remote([f"{url}?token=no-secret"])
    assert "no-secret" not in str(caught.value)
    assert "the-secret" not in caplog.text
    assert "no-secret" not in caplog.text


def test_urls_of_openenv_are_checked() -> None:
    for url, problem in (("openenv://", "no host"), ("openenv://localhost:1/CartPole-v1", "no path and no settings")):
        with pytest.raises(AddressError, match=rf"{problem}\. Expected openenv://HOST:PORT") as caught:
            make_remote(url)
        assert "grpc://" not in str(caught.value)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectError, match="/schema"):
            make_remote(f"openenv://127.0.0.1:{nobody.getsockname()[1]}")
    with pytest.raises(SettingError, match="mixture"):
        make_vec_remote(["openenv://localhost:1", "grpc://localhost:2"])
    with pytest.raises(TypeError, match="compression"):
        make_remote("openenv://localhost:1", compression="gzip")
