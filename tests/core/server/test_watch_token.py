"""A second token, for those who may watch and do nothing else."""

from __future__ import annotations

import contextlib
import time

import grpc
import numpy as np
import pytest

from bridge import Auth, Limits, errors, make_remote, serve_gym
from bridge.cli import main
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.transport.credentials import write_secret
from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.peers import Stream
from tests.support import until
from tests.web_envs import Paddle

# More than a test refuses in a row: a connection that was refused counts until its end has come.
VIEWERS = 8
TOKENS = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}


@pytest.fixture(params=["http2", "grpcio", "websocket"])
def server(request):
    options = {"web": True} if request.param == "websocket" else {"transport": request.param}
    with serve_gym(Paddle, **TOKENS, limits=Limits(max_viewers=VIEWERS), **options) as server:
        server.over = request.param
        yield server


def url(server):
    return f"{server.urls[-1] if server.over == 'websocket' else server.url}?world="


def test_with_it_a_client_looks_on_and_with_the_other_it_plays(server):
    env = make_remote(url(server), token="for-players")
    env.reset(seed=0)
    seen = make_remote(url(server), token="for-watchers", role="spectator", wait="now")
    seen.reset()
    env.step(1)
    assert seen.step(0)[0].tolist() == [102]
    for keywords in ({}, {"role": "player"}, {"role": "takeover"}):
        with pytest.raises((errors.RefusedError, errors.SettingError), match="this token is for watching") as caught:
            make_remote(url(server), token="for-watchers", **keywords)
        assert caught.value.code == Code.PERMISSION_DENIED
    with pytest.raises(errors.RefusedError, match="this token is for watching"):
        make_remote(url(server).partition("?")[0], token="for-watchers")
    with pytest.raises(errors.RefusedError, match="the token is wrong"):
        make_remote(url(server), token="for-nobody")
    seen.close()
    env.close()


def test_viewers_take_no_places_of_those_who_play(server):
    with contextlib.ExitStack() as stack:
        looks = {"token": "for-watchers", "role": "spectator", "wait": "now"}
        env = stack.enter_context(make_remote(url(server), token="for-players"))
        env.reset(seed=0)
        for _ in range(VIEWERS):
            stack.enter_context(make_remote(url(server), **looks))
        with pytest.raises(errors.RefusedError, match=f"max_viewers={VIEWERS}") as caught:
            make_remote(url(server), **looks)
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
        status = server.status()
        assert (status["connections"], status["viewer_connections"]) == (VIEWERS + 1, VIEWERS)
        stack.enter_context(make_remote(url(server).partition("?")[0], token="for-players"))
    until(lambda: server.status()["connections"] == 0)
    make_remote(url(server), **looks).close()


@pytest.mark.parametrize("web", [False, True])
def test_a_viewer_that_steps_without_end_is_read_later(web):
    """Else four of them would leave a trainer one step in a hundred."""
    with serve_gym(Paddle, web=web, **TOKENS) as server:
        url = f"{server.urls[-1] if web else server.url}?world="
        with make_remote(url, token="for-players") as env:
            env.reset(seed=0)
            with make_remote(url, token="for-watchers", role="spectator", wait="now") as seen:
                seen.reset()
                deadline = time.monotonic() + 30.0
                while server.status()["throttled"] == 0:
                    assert time.monotonic() < deadline, "it was never read later"
                    seen.step(0)
                env.step(1)  # who plays is not
                assert server.status()["throttled"] <= 1


def requests():
    """Requests that a client with the watch token may not send."""
    yield pb.EnvironmentRequest(create_world=pb.CreateWorldRequest())
    yield pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest())
    yield pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest())
    yield pb.EnvironmentRequest(join_world=pb.JoinWorldRequest())
    for role in ("player", "takeover", np.array(["spectator", "player"]), 3):
        yield pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(settings={"role": pack_tensor(role)}))
    call = bridge_pb2.CallRequest(name="render")
    written = properties_pb2.PropertyRequest()
    written.write_property.key = "world.attributes.place"
    drawn = properties_pb2.PropertyRequest()
    drawn.read_property.key = "world.frame"
    for kind, message in ((CALL_REQUEST_URL, call), (PROPERTY_REQUEST_URL, written), (PROPERTY_REQUEST_URL, drawn)):
        request = pb.EnvironmentRequest()
        request.extension.type_url, request.extension.value = kind, message.SerializeToString()
        yield request
    request = pb.EnvironmentRequest()
    request.extension.type_url = "unknown"
    yield request


@pytest.mark.parametrize("request_", list(requests()), ids=lambda request: str(request).replace("\n", " ")[:60])
def test_nothing_else_can_be_asked_for(request_):
    with serve_gym(Paddle, **TOKENS) as server:
        player = Stream(server, own_connection=True, token="for-players").join()
        player.ask(step=pb.StepRequest())
        watcher = Stream(server, own_connection=True, token="for-watchers")
        if request_.WhichOneof("payload") != "join_world":
            watcher.join(role="spectator")
        watcher.requests.put(request_)
        assert watcher.take().error.code == Code.PERMISSION_DENIED
        watcher.requests.put(pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()))
        assert watcher.take().WhichOneof("payload") == "leave_world"
        watcher.close()
        player.close()


def test_what_is_written_garbled_is_answered():
    with serve_gym(Paddle, **TOKENS) as server:
        watcher = Stream(server, own_connection=True, token="for-watchers")
        request = pb.EnvironmentRequest()
        request.extension.type_url, request.extension.value = PROPERTY_REQUEST_URL, b"\xff"
        watcher.requests.put(request)
        assert watcher.take().WhichOneof("payload") == "error"
        watcher.close()


@pytest.mark.parametrize("keywords", [{}, {"token": "a"}])
def test_it_needs_another_token_beside_it(keywords):
    with pytest.raises(errors.SettingError, match=r"watch_token.*another token"):
        serve_gym(Paddle, auth=Auth(watch_token="a"), **keywords)


def test_it_is_in_no_message(caplog):
    with serve_gym(Paddle, **TOKENS) as server:
        assert "for-watchers" not in repr(server)
        with pytest.raises(grpc.RpcError) as caught:
            Stream(server, own_connection=True, token="guess").ask(leave_world=pb.LeaveWorldRequest())
    assert "for-watchers" not in str(caught.value) + caplog.text


def test_the_watch_token_may_be_in_a_file_which_the_command_line_names(tmp_path, capsys):
    player, watcher = tmp_path / "token", tmp_path / "watch-token"
    write_secret(player, b"for-players\n")
    watcher.write_text("for-watchers\n")
    assert main(["serve", "--help-all"]) == 0
    assert "--watch-token-file" in capsys.readouterr().out
    with serve_gym(Paddle, web=True, fps=30, token_file=player, auth=Auth(watch_token_file=watcher)) as server:
        env = make_remote(f"{server.url}?world=", token="for-watchers", role="spectator")
        env.reset()
        env.close()
        with pytest.raises(errors.RefusedError):
            make_remote(f"{server.url}?world=", token="for-watchers")
    with pytest.raises(errors.SettingError, match="expected watch_token or watch_token_file, got both"):
        serve_gym(Paddle, token="a", auth=Auth(watch_token="b", watch_token_file=watcher))
    with pytest.raises(errors.SettingError, match="watch_token_file="):
        serve_gym(Paddle, token="a", auth=Auth(watch_token_file=tmp_path / "none"))
