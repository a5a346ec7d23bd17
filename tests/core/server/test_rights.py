"""Who may change an environment by its attributes and methods: who has its world alone. All others read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

from bridge import Auth, RealTime, make_parallel_remote, make_remote, make_vec_remote, serve_gym
from bridge import serve_parallel as serve_agents
from bridge.core.encoding.names import CALL_REQUEST_URL, NAMES, PROPERTY_REQUEST_URL
from bridge.core.encoding.properties import encoded, read_encoded
from bridge.errors import Code, RefusedError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import VirtualClock
from bridge.web.gateway import serve_gateway
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.support import sampled
from tests.web_envs import Paddle

TOKENS: dict[str, Any] = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}


class Planet(Paddle):
    """Counts what is done to it."""

    def __init__(self, render_mode: Any = None) -> None:
        super().__init__(render_mode)
        self.gravity, self.resets, self.falls = 9.8, 0, 0

    def reset(self, **keywords: Any) -> Any:
        self.resets += 1
        return super().reset(**keywords)

    def fall(self) -> int:
        self.falls += 1
        return self.falls


class Windy(Relay):
    def __init__(self) -> None:
        super().__init__()
        self.gravity, self.falls = 9.8, 0

    def fall(self) -> int:
        self.falls += 1
        return self.falls


def ways_of_changing(env: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "a method", lambda: env.call("fall")
    yield "a method found by its name", lambda: env.get_wrapper_attr("fall")()
    yield "get_attr of a method", lambda: env.get_attr("fall")
    yield "set_attr", lambda: env.set_attr("gravity", 1.0)
    yield "set_wrapper_attr", lambda: env.set_wrapper_attr("gravity", 1.0)
    yield (
        "set_wrapper_attr of a wrapper",
        lambda: gymnasium.wrappers.OrderEnforcing(env).set_wrapper_attr("gravity", 1.0),
    )
    yield "a new attribute", lambda: env.set_attr("brand_new", 1.0)
    for name in ("reset", "step", "close"):
        yield f"call of {name}", lambda name=name: env.call(name)
        yield f"setting of {name}", lambda name=name: env.set_attr(name, None)


def assert_reads_alone(env: Any, *, knows_names: bool = True) -> None:
    """Check that a client reads attributes, and changes nothing by any way."""
    assert env.get_attr("gravity") == env.call("gravity") == env.get_wrapper_attr("gravity") == 9.8
    ways = dict(ways_of_changing(env))
    if knows_names:
        assert env.gravity == 9.8
        ways["a dot"] = lambda: setattr(env, "gravity", 1.0)
        ways["a method by a dot"] = lambda: env.fall()
    for way, change in ways.items():
        with pytest.raises(RefusedError) as caught:
            change()
        assert caught.value.code == Code.PERMISSION_DENIED, way
    assert (env.get_attr("gravity"), env.get_attr("falls")) == (9.8, 0)
    with pytest.raises(AttributeError):
        env.get_attr("brand_new")


def assert_changes(env: Any) -> None:
    """Check that a client may call and set."""
    env.gravity = 2.0
    assert env.call("gravity") == 2.0
    env.set_attr("gravity", 9.8)
    falls = env.get_attr("falls")
    assert env.fall() == falls + 1
    env.set_attr("falls", 0)


@contextlib.contextmanager
def closing(*envs: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for env in envs:
            stack.callback(env.close)
        yield


# Spectators and viewers


WAYS = ["http2", "grpcio", "websocket", "gateway"]
WORLDS: list[dict[str, Any]] = [
    {},
    {"fps": 50.0},
    {"isolation": "process"},
    {"fps": 50.0, "isolation": "process"},
    {"thread_safe": True},
]


@pytest.mark.parametrize(("over", "options"), sampled(itertools.product(WAYS, WORLDS), 3), ids=str)
def test_a_spectator_reads_attributes_and_changes_nothing(options: Any, over: str) -> None:
    more = {"http2": {}, "grpcio": {"transport": "grpcio"}, "websocket": {"web": True}, "gateway": {}}[over]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_gym(Planet, **options, **more))
        url = f"{server.urls[-1] if over == 'websocket' else server.url}?world="
        if over == "gateway":
            gateway = stack.enter_context(serve_gateway(server.url))
            url = f"{gateway.url}?world={server.url.removeprefix('grpc://')}/"
        player = stack.enter_context(make_remote(url))
        player.reset(seed=0)
        resets = player.get_attr("resets")
        spectator = stack.enter_context(make_remote(url, role="spectator", wait="now"))
        assert_reads_alone(spectator)
        assert_changes(player)
        if "fps" not in options:
            assert player.get_attr("resets") == resets


@pytest.mark.parametrize(("over", "options"), sampled(itertools.product(WAYS, WORLDS), 3, 1), ids=str)
def test_a_viewer_reads_attributes_and_changes_nothing(options: Any, over: str) -> None:
    more = {"http2": {}, "grpcio": {"transport": "grpcio"}, "websocket": {"web": True}, "gateway": {}}[over]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_gym(Planet, **options, **more, **TOKENS))
        url = f"{server.urls[-1] if over == 'websocket' else server.url}?world="
        if over == "gateway":
            upstream = f"{server.url}?token=for-players"
            gateway = stack.enter_context(serve_gateway(upstream, **TOKENS))
            url = f"{gateway.url}?world={server.url.removeprefix('grpc://')}/"
        player = stack.enter_context(make_remote(url, token="for-players"))
        player.reset(seed=0)
        viewer = stack.enter_context(make_remote(url, token="for-watchers", role="spectator", wait="now"))
        with pytest.raises(AttributeError, match="get_wrapper_attr"):
            viewer.gravity  # noqa: B018 - names are many bytes, and not for viewers
        assert_reads_alone(viewer, knows_names=False)
        assert_changes(player)


@pytest.mark.parametrize("role", ["player", "spectator", "viewer"])
@pytest.mark.parametrize("fps", [None, 50.0])
def test_requests_that_our_client_does_not_send_change_nothing_either(role: str, fps: Any) -> None:
    """To read the property of a method calls it."""
    with serve_gym(Planet, fps=fps, **TOKENS) as server:
        player = Stream(server, own_connection=True, token="for-players").join()
        player.ask(step=pb.StepRequest())
        other = player
        if role != "player":
            token = "for-watchers" if role == "viewer" else "for-players"
            other = Stream(server, own_connection=True, token=token).join(role="spectator")

        def ask(url: str, message: Any, stream: Any = other) -> Any:
            request = pb.EnvironmentRequest()
            request.extension.type_url, request.extension.value = url, message.SerializeToString()
            stream.requests.put(request)
            return stream.take()

        def read(name: str, stream: Any = other) -> Any:
            message = properties_pb2.PropertyRequest()
            message.read_property.key = f"world.attributes.{name}"
            return ask(PROPERTY_REQUEST_URL, message, stream)

        def write(name: str, value: Any) -> Any:
            message = properties_pb2.PropertyRequest()
            message.write_property.key = f"world.attributes.{name}"
            message.write_property.value.CopyFrom(encoded(value))
            return ask(PROPERTY_REQUEST_URL, message)

        def call(name: str, *, look: bool = False) -> Any:
            return ask(CALL_REQUEST_URL, bridge_pb2.CallRequest(name=name, look=look))

        refused = [read("reset"), read("step"), call("reset"), call("close"), write("reset", [1]), write("step", [1])]
        if role != "player":
            refused += [read("fall"), call("fall"), write("gravity", [1.0]), write("brand_new", [1.0])]
            assert not call("fall", look=True).HasField("error")
        for answer in refused:
            assert answer.error.code == Code.PERMISSION_DENIED
        found = properties_pb2.PropertyResponse.FromString(read("gravity").extension.value)
        assert read_encoded(found.read_property.value) == [9.8]
        falls = properties_pb2.PropertyResponse.FromString(read("falls", player).extension.value)
        assert read_encoded(falls.read_property.value) == [0]
        if role == "viewer":
            message = properties_pb2.PropertyRequest()
            message.read_property.key = NAMES
            assert ask(PROPERTY_REQUEST_URL, message).error.code == Code.PERMISSION_DENIED
        for stream in {id(each): each for each in (player, other)}.values():
            stream.close()


def test_a_person_who_takes_over_reads_attributes() -> None:
    with serve_gym(Planet) as server, make_remote(f"{server.url}?world=") as player:
        player.reset(seed=0)
        person = Stream(server, own_connection=True).join(role="takeover")
        request = pb.EnvironmentRequest()
        request.extension.type_url = CALL_REQUEST_URL
        for name, code in (("gravity", 0), ("fall", Code.PERMISSION_DENIED)):
            request.extension.value = bridge_pb2.CallRequest(name=name).SerializeToString()
            person.requests.put(request)
            assert person.take().error.code == code
        assert_changes(player)
        person.close()


@pytest.mark.parametrize("fps", [None, 50.0])
def test_the_server_may_let_everybody_change(fps: Any) -> None:
    auth = Auth(watch_token="for-watchers", shared_control=True)
    with serve_gym(Planet, fps=fps, token="for-players", auth=auth) as server:
        url = f"{server.url}?world="
        player = make_remote(url, token="for-players")
        player.reset(seed=0)
        spectator = make_remote(url, token="for-players", role="spectator", wait="now")
        viewer = make_remote(url, token="for-watchers", role="spectator", wait="now")
        with closing(player, spectator, viewer):
            assert_changes(spectator)
            viewer.set_attr("gravity", 3.0)
            assert player.gravity == 3.0
            assert viewer.call("fall") == 1
            for env in (player, spectator, viewer):
                with pytest.raises(RefusedError, match="no attribute to call or set"):
                    env.call("reset")


def test_a_gateway_may_let_viewers_change_where_the_server_does() -> None:
    upstream = {"token": "of-the-server", "auth": Auth(shared_control=True)}
    auth = Auth(watch_token="for-watchers", shared_control=True)
    with (
        serve_gym(Planet, **upstream) as server,
        serve_gateway(f"{server.url}?token=of-the-server", token="for-players", auth=auth) as gateway,
    ):
        url = f"{gateway.url}?world={server.url.removeprefix('grpc://')}/"
        viewer = make_remote(url, token="for-watchers", role="spectator", wait="now")
        with closing(viewer):
            viewer.set_attr("gravity", 3.0)
            assert viewer.call("fall") == 1
            assert viewer.get_attr("gravity") == 3.0


# Worlds that several share


def shared_worlds() -> Any:
    clock = VirtualClock()
    yield "lock step", {}
    yield "real time", {"fps": 30.0, "realtime": RealTime(clock=clock)}
    yield "a match", {"fps": 30.0, "match": True}


@pytest.mark.parametrize("options", [each for _, each in shared_worlds()], ids=[name for name, _ in shared_worlds()])
def test_who_shares_a_world_reads_until_the_others_are_gone(options: Any) -> None:
    with serve_agents(Windy, **options) as server:
        first = make_remote(f"{server.url}?world=", agent="ann")
        with closing(first):
            assert_changes(first)
            second = make_remote(f"{server.url}?world=", agent="bob")
            with closing(second):
                assert_reads_alone(first)
                assert_reads_alone(second)
            assert_changes(first)


def test_who_made_a_world_that_others_share_reads_too() -> None:
    with serve_agents(Windy) as server:
        first = make_remote(server.url, agent="ann")
        (world,) = server.worlds
        second = make_remote(f"{server.url}?world={world}", agent="bob")
        with closing(first, second):
            assert_reads_alone(first)
            assert_reads_alone(second)


@pytest.mark.parametrize("over", ["http2", "grpcio", "websocket", "gateway"])
@pytest.mark.parametrize("world", ["", "?world="])
def test_all_agents_of_one_client_have_the_world_alone(over: str, world: str) -> None:
    more = {"http2": {}, "grpcio": {"transport": "grpcio"}, "websocket": {"web": True}, "gateway": {}}[over]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_agents(Windy, **more))
        url = f"{server.urls[-1] if over == 'websocket' else server.url}{world}"
        if over == "gateway":
            gateway = stack.enter_context(serve_gateway(server.url))
            url = f"{gateway.url}{world and world + server.url.removeprefix('grpc://') + '/'}"
        env = make_parallel_remote(url)
        stack.callback(env.close)
        env.reset(seed=0)
        assert_changes(env)
        if over == "http2" and world:
            spectator = Stream(server, own_connection=True).join(role="spectator")
            assert_changes(env)
            spectator.close()


def test_agents_of_an_older_client_have_the_world_alone_that_it_made() -> None:
    """It does not say that they are its own: they share a connection, and a world whose name nobody else is told."""
    with serve_agents(Windy) as server:
        request = pb.EnvironmentRequest()
        request.extension.type_url = CALL_REQUEST_URL
        request.extension.value = bridge_pb2.CallRequest(name="fall").SerializeToString()
        first, second = Stream(server), Stream(server)
        made = first.ask(create_world=pb.CreateWorldRequest()).create_world.world_name
        for world, code in ((made, 0), ("", Code.PERMISSION_DENIED)):
            for stream, agent in ((first, "ann"), (second, "bob")):
                stream.join(world, agent=agent)
            for stream in (first, second):
                stream.requests.put(request)
                assert stream.take().error.code == code
            for stream in (first, second):
                stream.ask(leave_world=pb.LeaveWorldRequest())
        for stream in (first, second):
            stream.close()


def test_a_shared_vector_is_told_the_same() -> None:
    with serve_agents(Windy) as server:
        envs = [BlockingReset(make_vec_remote(f"{server.url}?world=", agent=name)) for name in ("ann", "bob")]
        with closing(*envs):
            assert envs[0].get_attr("gravity") == (9.8,)
            for change in (lambda: envs[0].call("fall"), lambda: envs[0].set_attr("gravity", 1.0)):
                with pytest.raises(RefusedError) as caught:
                    change()
                assert caught.value.code == Code.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_nobody_calls_or_sets_what_the_protocol_does(name: str) -> None:
    with serve_gym(Planet) as server, make_remote(server.url) as env:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=2))
        lanes = BlockingReset(make_vec_remote(f"{server.url}?num_envs=2"))
        with closing(envs, lanes):
            env.reset(seed=0)
            for change in (
                lambda: env.call(name),
                lambda: env.set_attr(name, 1),
                lambda: envs.call(name),
                lambda: envs.set_attr(name, 1),
                lambda: lanes.call(name),
                lambda: lanes.set_attr(name, [1, 2]),
            ):
                with pytest.raises(RefusedError, match="no attribute to call or set") as caught:
                    change()
                assert caught.value.code == Code.PERMISSION_DENIED
            assert env.get_attr("resets") == 1
            assert callable(env.get_wrapper_attr(name))
            assert env.call("render").shape == (150, 200, 3)
