"""Our servers for clients of OpenEnv: spaces, sessions, requests over HTTP, refusals."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed

from bridge import Auth, Limits, Server, make_remote, serve_gym
from bridge.errors import (
    ConnectError,
    SettingError,
)
from bridge.testing import EVERY_SPACE, CountingEnv, FailingEnv, SpaceEnv, digest
from tests.inside import server_signs_of_life
from tests.openenv.sessions import ask, openenv, session, web
from tests.support import sampled, until

# JSON has no form for these: keys that are one text, and containers whose parts Gymnasium batches.
WITHOUT_JSON = {
    "dict_int_and_text_keys",
    "sequence_of_dict_stacked",
    "graph_of_dicts",
    "graph_of_sequences",
    "one_of_nested",
}


IMAGE = spaces.Box(0, 255, (5, 7, 3), np.uint8)


class SlowEnv(CountingEnv):
    """Its reset waits until it is let go on."""

    entered, released = threading.Event(), threading.Event()

    def reset(self, **keywords: Any) -> Any:
        self.entered.set()
        assert self.released.wait(30.0)
        return super().reset(**keywords)


def fetch(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of a response; a body makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(web(server) + path, data, headers), timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize("name", sampled((name for name in EVERY_SPACE if name not in WITHOUT_JSON), 6, slow=True))
def test_every_space_is_the_local_one_bit_for_bit(name: str) -> None:
    make = EVERY_SPACE[name]
    local = SpaceEnv(make(), make())
    with serve_gym(lambda: SpaceEnv(make(), make()), web=True, openenv=True) as server:
        env = make_remote(openenv(server))
        assert (env.observation_space, env.action_space) == (local.observation_space, local.action_space)
        env.action_space.seed(2)
        for seed in (1, None):
            ours, theirs = env.reset(seed=seed), local.reset(seed=seed)
            assert digest(ours[0]) == digest(theirs[0])
            for _ in range(6):
                action = env.action_space.sample()
                ours, theirs = env.step(action), local.step(action)
                assert digest(ours[0]) == digest(theirs[0])
                assert ours[1:4] == theirs[1:4]
        env.close()


@pytest.mark.parametrize("name", sorted(WITHOUT_JSON))
def test_a_space_without_a_form_in_json_is_refused_with_its_name(name: str) -> None:
    make = EVERY_SPACE[name]
    with serve_gym(lambda: SpaceEnv(make(), None), web=True, openenv=True) as server:
        status, answer = fetch(server, "/schema")
        assert status == 422
        assert "OpenEnv's JSON" in answer["detail"]
        with session(server) as socket_:
            for _ in range(2):
                assert "OpenEnv's JSON" in ask(socket_, {"type": "reset", "data": {}})["data"]["message"]


@pytest.mark.slow
def test_a_session_is_an_environment_of_its_own_with_seeds_options_and_state() -> None:
    local = gymnasium.make("CartPole-v1")
    with serve_gym("CartPole-v1", web=True, openenv=True) as server, session(server) as one, session(server) as other:
        assert "reset before" in ask(one, {"type": "step", "data": {"action": 1}})["data"]["message"]
        first = ask(one, {"type": "reset", "data": {"seed": 4, "episode_id": "mine", "low": -0.01, "high": 0.01}})
        ask(other, {"type": "reset", "data": {"seed": 5}})
        expected, _ = local.reset(seed=4, options={"low": -0.01, "high": 0.01})
        assert first["data"]["observation"]["observation"] == expected.tolist()
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        ended = False
        steps = 0
        while not ended:
            answer = ask(one, {"type": "step", "data": {"action": 1, "metadata": {}}})["data"]
            observation, reward, ended, _, _ = local.step(1)
            steps += 1
            assert answer["observation"] == {
                "observation": observation.tolist(),
                "terminated": ended,
                "truncated": False,
                "info": {},
            }
            assert (answer["reward"], answer["done"]) == (reward, ended)
        assert "has ended" in ask(one, {"type": "step", "data": {"action": 1}})["data"]["message"]
        assert ask(one, {"type": "state"})["data"] == {"episode_id": "mine", "step_count": steps}
        assert ask(other, {"type": "state"})["data"] == {"episode_id": None, "step_count": 0}
        assert len(server.worlds) == 2
        one.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            one.recv(10.0)  # half of the time after which the server hangs up on whoever says nothing
        until(lambda: len(server.worlds) == 1)


def test_the_requests_over_http_are_those_of_openenv() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server:
        assert fetch(server, "/health") == (200, {"status": "healthy"})
        assert fetch(server, "/metadata")[1]["name"] == "CartPole-v1"
        assert fetch(server, "/state") == (200, {"episode_id": None, "step_count": 0})
        assert set(fetch(server, "/openapi.json")[1]["paths"]) == {"/reset", "/step", "/state", "/schema"}
        assert fetch(server, "/mcp", {})[1]["jsonrpc"] == "2.0"
        schema = fetch(server, "/schema")[1]
        assert schema["action"]["properties"]["action"]["maximum"] == 1
        assert set(schema["observation"]["required"]) == {"observation", "terminated", "truncated", "info"}
        expected, _ = gymnasium.make("CartPole-v1").reset(seed=2)
        status, answer = fetch(server, "/reset", {"seed": 2})
        assert (status, answer["observation"]["observation"]) == (200, expected.tolist())
        assert fetch(server, "/step", {"action": {"action": 1}})[1]["reward"] == 1.0
        status, answer = fetch(server, "/step", {"action": {"action": 9}})
        assert status == 422
        assert "not in Discrete(2)" in answer["detail"]
        assert fetch(server, "/step", {"action": 1})[0] == 422
        until(lambda: server.worlds == [])  # that of each request goes with it
        with urllib.request.urlopen(web(server), timeout=20) as page:
            assert b"<html" in page.read()
        for url in (server.url, server.url.replace("grpc", "ws", 1)):  # dm_env_rpc at the same port
            env = make_remote(url)
            assert env.reset(seed=2)[0].tolist() == expected.tolist()
            assert env.step(1)[1] == 1.0
            env.close()


def test_a_body_may_come_later_than_its_head() -> None:
    body = b'{"seed": 2}'
    with (
        serve_gym("CartPole-v1", web=True, openenv=True) as server,
        socket.create_connection(("127.0.0.1", server.port), 20.0) as raw,
    ):
        raw.sendall(b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert fetch(server, "/health")[0] == 200  # the server has read the head by now
        raw.sendall(body[:4])
        assert fetch(server, "/health")[0] == 200
        raw.sendall(body[4:])
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=2)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["observation"]["observation"] == expected.tolist()


def test_a_body_of_some_megabytes_is_read_before_its_client_gives_up() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server:
        assert fetch(server, "/reset", {"episode_id": " " * (24 << 20)})[0] == 200


def test_a_request_over_http_may_take_longer_than_a_client_may_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client over HTTP can give no sign of life, and waits for its answer."""
    server_signs_of_life(monkeypatch, 0.05, 0.1, 0.1)

    class Late(CountingEnv):
        def reset(self, **keywords: Any) -> Any:
            time.sleep(1.0)
            return super().reset(**keywords)

    with serve_gym(Late, web=True, openenv=True) as server:
        assert fetch(server, "/reset", {})[0] == 200
        with session(server) as socket_:
            assert ask(socket_, {"type": "reset"})["type"] == "observation"


def test_a_server_that_serves_all_it_may_says_so_in_json() -> None:
    """Such a refusal comes from the server, before the session sees the message."""
    limits = Limits(max_requests_in_flight=1)
    with (
        serve_gym(lambda: SlowEnv(), web=True, openenv=True, thread_safe=True, limits=limits) as server,
        session(server) as slow,
        session(server) as other,
    ):
        slow.send('{"type": "reset"}')
        assert SlowEnv.entered.wait(20.0)
        assert ask(other, {"type": "state"})["data"]["code"] == "CAPACITY_REACHED"
        SlowEnv.released.set()
        assert json.loads(slow.recv(20.0))["type"] == "observation"


def test_pictures_travel_as_png_where_that_is_asked_for() -> None:
    make = lambda: SpaceEnv(spaces.Dict(camera=IMAGE, speed=spaces.Box(0, 1, (), np.float32)), None)  # noqa: E731
    local = make()
    with serve_gym(make, web=True, openenv="png") as server:
        with session(server) as socket_:
            found = ask(socket_, {"type": "reset", "data": {"seed": 1}})["data"]["observation"]["observation"]
        assert found["camera"].startswith("data:image/png;base64,")
        env = make_remote(openenv(server))
        assert digest(env.reset(seed=1)[0]) == digest(local.reset(seed=1)[0])
        env.close()


def test_tokens_are_asked_for_everywhere_but_at_health() -> None:
    basic = base64.b64encode(b"anyone:secret").decode()
    with serve_gym("CartPole-v1", web=True, openenv=True, token="secret", auth=Auth(watch_token="eyes")) as server:
        assert fetch(server, "/health")[0] == 200
        assert fetch(server, "/schema")[0] == 401
        assert fetch(server, "/schema", Authorization="Bearer wrong")[0] == 401
        assert (
            fetch(server, "/schema", Authorization="Bearer eyes")[0] == 403
        )  # as elsewhere: it is known, and not allowed
        assert fetch(server, "/schema", Authorization="Bearer secret")[0] == 200
        assert fetch(server, "/schema", Authorization=f"Basic {basic}")[0] == 200
        for headers in ({}, {"Authorization": "Bearer eyes"}, {"Authorization": "Basic ?"}):
            with session(server, additional_headers=headers) as socket_, pytest.raises(ConnectionClosed, match="token"):
                socket_.recv(20.0)
        with session(server, additional_headers={"Authorization": f"Basic {basic}"}) as socket_:
            assert ask(socket_, {"type": "reset"})["type"] == "observation"
        with pytest.raises(ConnectError, match=r"401.*: 'a token is required, and none was sent; pass token=…"):
            make_remote(openenv(server))
        env = make_remote(openenv(server), token="secret")
        env.reset()
        env.close()


def test_pages_of_other_sites_are_not_let_in() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server:
        assert fetch(server, "/schema", Origin="https://evil.example")[0] == 403
        # What browsers say of an image, which they ask for without an Origin.
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            assert fetch(server, "/schema", **{"Sec-Fetch-Site": site})[0] == status
        with session(server, origin="https://evil.example") as socket_, pytest.raises(ConnectionClosed, match="evil"):
            socket_.recv(20.0)
        request = b"GET /schema HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 20.0) as raw:
            raw.sendall(request)
            assert b" 421 " in raw.recv(4096)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ('{"data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action": 1.5}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action": [1]}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action": "1"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action": null}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"action": 1e400}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "fly"}', "UNKNOWN_TYPE"),
        ('{"type": ["step"]}', "UNKNOWN_TYPE"),
    ],
)
def test_a_bad_message_is_answered_and_the_episode_goes_on(message: str, code: str) -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server, session(server) as socket_:
        ask(socket_, {"type": "reset", "data": {"seed": 1}})
        answer = ask(socket_, message)
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert answer["data"]["message"]
        assert ask(socket_, {"type": "step", "data": {"action": 1}})["data"]["reward"] == 1.0
        assert ask(socket_, {"type": "state"})["data"]["step_count"] == 1


def test_a_message_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server, session(server) as socket_:
        answer = ask(socket_, "," * 100_000)  # no JSON, which is not looked at
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert "at most 100000 values" in answer["data"]["message"]


def test_what_is_too_large_or_no_text_ends_the_connection_and_nobody_elses() -> None:
    limits = Limits(max_message_bytes=10_000)
    with (
        serve_gym("CartPole-v1", web=True, openenv=True, limits=limits) as server,
        session(server) as honest,
    ):
        ask(honest, {"type": "reset", "data": {}})
        with session(server) as socket_, pytest.raises(ConnectionClosed, match="max_message_bytes"):
            ask(socket_, " " * 20_000)
        with session(server) as socket_, pytest.raises(ConnectionClosed, match="expected text messages"):
            ask(socket_, b"{}")
        for fields in ("Content-Length: 20000", "Content-Length: -1", "Transfer-Encoding: chunked"):
            with socket.create_connection(("127.0.0.1", server.port), 20.0) as raw:
                raw.sendall(f"POST /reset HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n\r\n".encode())
                assert b" 400 " in raw.recv(4096)
        assert ask(honest, {"type": "step", "data": {"action": 1}})["data"]["reward"] == 1.0


def test_a_full_server_and_a_failing_environment_are_told() -> None:
    with (
        serve_gym("CartPole-v1", web=True, openenv=True, limits=Limits(max_worlds=1)) as server,
        session(server) as one,
    ):
        ask(one, {"type": "reset"})
        with session(server) as two:
            refused = ask(two, {"type": "reset"})["data"]
            assert refused["code"] == "CAPACITY_REACHED"
            assert "this server has max_worlds=1 worlds in use" in refused["message"]
            assert fetch(server, "/reset", {})[0] == 503
    with serve_gym(lambda: FailingEnv(fail_in_step=1), web=True, openenv=True) as server, session(server) as one:
        ask(one, {"type": "reset"})
        answer = ask(one, {"type": "step", "data": {"action": 0}})["data"]
        assert answer["code"] == "EXECUTION_ERROR"
        assert "TestFailure" in answer["message"]
        assert ask(one, {"type": "reset"})["type"] == "observation"


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"openenv": True}, "give web=True too"),
        ({"openenv": "jpeg", "web": True}, "expected openenv to be True, False or 'png'"),
        ({"openenv": True, "web": True, "num_envs": 2}, "leave num_envs and fps out"),
        ({"openenv": True, "web": True, "fps": 30}, "leave num_envs and fps out"),
    ],
)
def test_keywords_that_do_not_go_with_openenv_are_refused(keywords: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        serve_gym("CartPole-v1", **keywords)
