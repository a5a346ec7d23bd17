"""A gateway: worlds of other servers, and PERLERT lobbies, at one port."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import grpc
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb
from google.protobuf import any_pb2
from gymnasium import spaces

from bridge import Auth, Endpoint, RealTime, errors, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.cli import main
from bridge.core.encoding import values
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_RESPONSE_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.transport.credentials import TOKEN_VARIABLE, ClientCredentials, Token
from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.perlert import serve_perlert
from bridge.testing import CountingEnv, Inspector, VirtualClock
from bridge.web.gateway import GatewayScheme, serve_gateway
from bridge.wrappers import BlockingReset
from tests.peers import HELLO, METHOD, SERVICE, Stream
from tests.public_server import PublicServer
from tests.scripted_server import ScriptedServer
from tests.support import assert_identical, server_process, until
from tests.web_envs import Paddle, Paddles

SECRET = "the-servers-own-secret"


def overview(gateway, **credentials):
    with Inspector(gateway.url, 20.0, ClientCredentials.of(**credentials)) as inspector:
        return json.loads(str(unpack_tensor(inspector.read_property("server.web"))[()]))


def place(server):
    return server.url.removeprefix("grpc://").partition("?")[0]


def through(gateway, server, world=""):
    return f"{gateway.url}?world={place(server)}/{world}"


def spectating(server):
    return pb.JoinWorldRequest(world_name=f"{place(server)}/", settings={"role": pack_tensor("spectator")})


class Saying(ScriptedServer):
    """A server that says this of its worlds."""

    def __init__(self, said):
        super().__init__(public_pb.ActionObservationSpecs())
        self.said = said

    def answer(self, kind, request):
        if kind != "extension":
            return super().answer(kind, request)
        body = properties_pb2.PropertyResponse()
        body.read_property.value.CopyFrom(pack_tensor(self.said))
        return any_pb2.Any(type_url=PROPERTY_RESPONSE_URL, value=body.SerializeToString())


@contextmanager
def gateway_to(*servers, **keywords):
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield stack.enter_context(serve_gateway([server.url for server in servers], **keywords))


@pytest.mark.parametrize("scheme", ["grpc", "ws"])
def test_a_remote_environment_through_a_gateway_equals_the_local_one(scheme):
    with gateway_to(serve_gym("CartPole-v1"), serve_gym("FrozenLake-v1")) as gateway:
        servers = [server["name"] for server in overview(gateway)["servers"]]
        url = gateway.url.replace("grpc", scheme)
        for env_id, server in zip(("CartPole-v1", "FrozenLake-v1"), servers, strict=True):
            remote, local = make_remote(f"{url}?server={server}"), gymnasium.make(env_id)
            assert remote.observation_space == local.observation_space
            assert_identical(remote.reset(seed=4), local.reset(seed=4))
            for action in (0, 1, 1, 0):
                assert_identical(remote.step(action), local.step(action))
            remote.close()
            local.close()


def test_an_action_in_real_time_is_handed_on_while_the_steps_before_it_are_held():
    clock = VirtualClock(10.0)
    with gateway_to(serve_gym(Paddle, fps=10, realtime=RealTime(clock=clock))) as gateway:
        world = f"{overview(gateway)['servers'][0]['name']}/"
        player, watcher = Stream(gateway).join(world, wait="new_frame"), Stream(gateway).join(world, role="spectator")
        assert player.read_property("world.episode_uid") == 2
        wanted = [player.uids["frames"]]
        player.ask(step=pb.StepRequest(requested_observations=wanted))
        player.send(step=pb.StepRequest(requested_observations=wanted))  # is held: there is no new frame
        for _ in range(2):
            player.send(step=pb.StepRequest(actions={1: pack_tensor(1)}, requested_observations=wanted))
        until(lambda: values.decode(watcher.read_property("world.realtime").tobytes())["actions_replaced"] == 1)
        clock.advance(0.1)
        assert unpack_tensor(player.take().step.observations[wanted[0]]) == 1
        player.close()
        watcher.close()


def test_steps_that_are_sent_ahead_come_back_in_their_order_through_a_gateway():
    with gateway_to(serve_gym(lambda: CountingEnv(100))) as gateway, closing(make_remote(gateway.url)) as env:
        env.reset(seed=1)
        assert [int(step.observation[1]) for step in env.rollout([0] * 40, window=16)] == list(range(1, 41))
        assert env.reset()[0].tolist() == [2, 0]


def test_lanes_and_many_slots_go_through_a_gateway():
    with serve_gym("CartPole-v1", num_envs=3) as server, serve_gateway(server.url) as gateway:
        envs = BlockingReset(make_vec_remote(gateway.url, num_envs=6))
        observations, _ = envs.reset(seed=0)
        assert observations.shape == (6, 4)
        assert envs.step(np.ones(6, np.int64))[1].tolist() == [1.0] * 6
        envs.close()


def test_the_overview_has_every_server_and_of_one_without_a_page_the_default_world_alone():
    with gateway_to(serve_gym(CountingEnv), serve_gym(CountingEnv, web=True), serve_gym(Paddle, fps=20)) as gateway:
        first, second, third = (server["name"] for server in overview(gateway)["servers"])
        assert [world["waiting"] for world in overview(gateway)["worlds"]] == [True, True, True]
        assert [server["realtime"] for server in overview(gateway)["servers"]] == [False, False, True]
        with ExitStack() as stack:
            for url in (f"{first}?world=", first, second, f"{third}?world="):
                env = stack.enter_context(make_remote(f"grpc://{url}"))
                env.reset()
            until(lambda: not any(world.get("waiting") for world in overview(gateway)["worlds"]))
            worlds = overview(gateway)["worlds"]
            assert worlds[0]["name"] == f"{first}/"
            assert worlds[0]["seats"] == {"agent": True}
            assert worlds[1]["name"].startswith(f"{second}/world-")
            assert worlds[2]["name"] == f"{third}/"
            assert worlds[2]["fps"] == 20


def test_what_a_client_of_the_gateway_changes_is_in_the_next_overview():
    with gateway_to(serve_gym(Paddle, fps=20)) as gateway:
        for _ in range(3):  # a list that is some tenths of a second old would miss some of these
            assert overview(gateway)["worlds"][0].get("seats", {}).get("agent", False) is False
            with make_remote(f"{gateway.url}?world={overview(gateway)['worlds'][0]['name']}"):
                assert overview(gateway)["worlds"][0]["seats"] == {"agent": True}
            until(lambda: not overview(gateway)["worlds"][0]["seats"].get("agent"))


def test_a_url_with_the_name_of_a_world_shows_that_one():
    with serve_gym(CountingEnv) as server, Inspector(server.url, 20.0) as owner:
        name = owner.ask("create_world", pb.CreateWorldRequest()).world_name
        with serve_gateway(f"{server.url}?world={name}") as gateway:
            (world,) = overview(gateway)["worlds"]
            assert world["name"] == f"{place(server)}/{name}"
            assert not world["waiting"]
            with make_remote(through(gateway, server, name)) as env:
                env.reset()


def test_a_spectator_looks_on_through_a_gateway_with_pictures():
    with gateway_to(serve_gym(Paddle, env_kwargs={"render_mode": "rgb_array"})) as gateway:
        (server,) = (server["name"] for server in overview(gateway)["servers"])
        env = make_remote(f"grpc://{server}?world=")
        env.reset(seed=0)
        with Inspector(gateway.url, 20.0) as inspector:
            settings = {"role": pack_tensor("spectator"), "frame": pack_tensor("png")}
            request = pb.JoinWorldRequest(world_name=f"{server}/", settings=settings)
            specs = inspector.ask("join_world", request).specs
            (uid,) = (uid for uid, spec in specs.observations.items() if spec.name == "frame")
            answer = inspector.ask("step", pb.StepRequest(requested_observations=[uid]))
            assert unpack_tensor(answer.observations[uid]).tobytes().startswith(b"\x89PNG")
        env.close()


def test_a_world_that_is_made_through_a_gateway_draws_where_it_can():
    plain = serve_gym(lambda: CountingEnv())
    with gateway_to(serve_gym(Paddle), plain) as gateway:
        first, second = (server["name"] for server in overview(gateway)["servers"])
        env = make_remote(f"{gateway.url}?server={first}")
        assert env.render_mode == "rgb_array"
        env.close()
        env = make_remote(f"{gateway.url}?server={second}")
        env.reset()
        assert env.render_mode is None
        env.close()


def test_names_lead_to_one_server_and_wrong_ones_are_refused_in_words():
    with gateway_to(serve_gym(CountingEnv), serve_gym(CountingEnv)) as gateway:
        first, second = (server["name"] for server in overview(gateway)["servers"])
        for url, words in (
            ("?world=nobody/x", f"begin with that of a server: {first}/, {second}/"),
            ("?world=", "begin with that of a server"),
            (f"?world={first}/x", "there is no world 'x'"),
            ("?server=nobody", f"there are {first}, {second}"),
            ("", r"\?server=NAME"),  # the client goes on to the default world
        ):
            with pytest.raises(errors.BridgeError, match=words):
                make_remote(f"{gateway.url}{url}")
        with Inspector(gateway.url, 20.0) as inspector:
            with pytest.raises(errors.RefusedError, match=f"setting server, one of {first}, {second}"):
                inspector.ask("create_world", pb.CreateWorldRequest())
            name = inspector.ask(
                "create_world", pb.CreateWorldRequest(settings={"server": pack_tensor(first)})
            ).world_name
            assert name.startswith(f"{first}/world-")
            with pytest.raises(errors.RefusedError, match=f"this connection is with {first}; use another"):
                inspector.ask("join_world", pb.JoinWorldRequest(world_name=f"{second}/"))
            inspector.ask("join_world", pb.JoinWorldRequest(world_name=name))
            inspector.ask("leave_world", pb.LeaveWorldRequest())
            inspector.ask("destroy_world", pb.DestroyWorldRequest(world_name=name))


def test_the_only_server_needs_no_name():
    with gateway_to(serve_gym(CountingEnv)) as gateway:
        for url in (gateway.url, f"{gateway.url}?world="):
            env = make_remote(url)
            env.reset()
            env.close()


def test_a_client_that_goes_leaves_the_server():
    server = serve_gym(CountingEnv)
    with gateway_to(server) as gateway:
        env = make_remote(gateway.url)
        env.reset()
        assert len(server.worlds) == 1
        env.close()
        until(lambda: server.worlds == [] and server.connections == 0)
        overview(gateway)
        gateway.stop()
        until(lambda: server.connections == 0)


def test_a_client_that_hangs_up_in_the_midst_of_a_long_wait_leaves_the_server():
    server = serve_gym(CountingEnv)
    with gateway_to(server) as gateway:
        stream = Stream(gateway, own_connection=True).join(f"{place(server)}/", role="spectator")
        stream.send(step=pb.StepRequest(requested_observations=[1]))  # nobody plays: it waits for an episode
        until(lambda: server.status()["requests"] == 1)
        stream.die()
        until(lambda: server.connections == 0 and gateway.connections == 0)
        assert gateway.status()["requests"] == 0
        stream.channel.close()


@pytest.mark.parametrize(
    ("said", "worlds"),
    [
        ('{"worlds": [{"name": 3, "seats": "all", "fps": {}, "lanes": [], "more": 1}, 4]}', 1),
        ('{"worlds": [], "fps": "fast"}', 1),  # what is to be made
        ('{"worlds": 5}', 0),
        ('{"worlds": [{"name": "a", "fps": NaN}]}', 0),
        ('{"worlds": [{"name": "a", "more": [1e999]}]}', 0),
        ("[]", 0),
        ("nothing", 0),
        ("[" * 100_000, 0),
    ],
)
def test_a_server_that_says_nonsense_of_its_worlds_breaks_nothing(said, worlds):
    with gateway_to(Saying(said)) as gateway:
        found = overview(gateway)
        assert len(found["worlds"]) == worlds
        for world in found["worlds"]:
            assert world["seats"] == {}
            assert world["fps"] is None
            assert world["lanes"] is None
        assert bool(found["servers"][0]["problem"]) == (worlds == 0)
        assert found["servers"][0]["fps"] is None


def test_a_lost_server_is_told_the_others_go_on_and_it_is_found_again():
    lost, other = serve_gym(CountingEnv), serve_gym(CountingEnv)
    with other, serve_gateway([lost.url, other.url]) as gateway:
        envs = [make_remote(f"{gateway.url}?server={place(server)}") for server in (lost, other)]
        for env in envs:
            env.reset()
        lost.stop()
        with pytest.raises(errors.RefusedError, match=f"{place(lost)}: ") as caught:
            envs[0].step(0)
        assert caught.value.code == Code.UNAVAILABLE
        envs[1].step(0)
        until(lambda: overview(gateway)["servers"][0]["problem"])
        found = overview(gateway)
        assert f"{place(lost)} cannot be reached" in found["servers"][0]["problem"]
        assert found["servers"][1]["problem"] == ""
        assert [world["server"] for world in found["worlds"]] == [place(other)]
        with serve_gym(CountingEnv, port=lost.port):
            until(lambda: not overview(gateway)["servers"][0]["problem"])
            with make_remote(f"{gateway.url}?server={place(lost)}") as env:
                env.reset()
        for env in envs:
            env.close()


@pytest.mark.slow
def test_servers_of_a_directory_come_and_go(tmp_path):
    file = tmp_path / "urls.txt"
    with serve_gym(CountingEnv) as first, serve_gym(CountingEnv) as second:
        file.write_text(f"{first.url}\n")
        with serve_gateway(f"file://{file}") as gateway:
            names = lambda: [server["name"] for server in overview(gateway)["servers"]]  # noqa: E731
            assert names() == [place(first)]
            env = make_remote(f"{gateway.url}?server={place(first)}")
            env.reset()
            file.write_text(f"{first.url}\n{second.url}\n")
            until(lambda: names() == [place(first), place(second)])
            file.write_text(f"{second.url}\n")
            until(lambda: names() == [place(second)])
            env.step(0)  # what there is goes on
            env.close()


@pytest.mark.slow
@pytest.mark.parametrize("query", ["?server={}", "?world={}/"])
def test_clients_reach_the_servers_that_are_there_now_while_no_page_is_open(tmp_path, query):
    file = tmp_path / "urls.txt"
    with serve_gym(CountingEnv) as first, serve_gym(CountingEnv) as second:
        file.write_text(f"{first.url}\n")
        with serve_gateway(f"file://{file}") as gateway:
            file.write_text(f"{second.url}\n")

            def reached():
                try:
                    make_remote(gateway.url + query.format(place(second))).close()
                except errors.RefusedError:  # NOT_FOUND, until the file is read again
                    return False
                return True

            until(reached)


def test_the_servers_token_opens_them_and_never_leaves_the_gateway():
    with gateway_to(serve_gym(CountingEnv, token=SECRET), upstream=ClientCredentials(token=Token(SECRET))) as gateway:
        text = json.dumps(overview(gateway))
        assert SECRET not in text
        env = make_remote(gateway.url)
        env.reset()
        env.close()
        with pytest.raises(errors.RefusedError) as caught:
            make_remote(f"{gateway.url}?world=nobody")
        assert SECRET not in str(caught.value)
    with (
        serve_gym(CountingEnv, token=SECRET) as server,
        serve_gateway(f"{server.url}?token={SECRET}") as gateway,
        make_remote(gateway.url) as env,
    ):
        env.reset()
        assert SECRET not in json.dumps(overview(gateway))


def test_a_server_that_does_not_let_the_gateway_in_is_told_and_no_client_is_asked_for_its_token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "the-gateways-own-token")  # which no server gets
    with gateway_to(serve_gym(CountingEnv, token=SECRET)) as gateway:
        (server,) = overview(gateway)["servers"]
        assert "does not let this gateway in (UNAUTHENTICATED): give it the server's token" in server["problem"]
        with pytest.raises(errors.RefusedError, match="does not let this gateway in") as caught:
            make_remote(gateway.url)
        assert caught.value.code == Code.FAILED_PRECONDITION
        with pytest.raises(errors.RefusedError, match="the token is wrong"):
            make_remote(gateway.url, token=SECRET)


def test_a_token_for_looking_on_does_that_alone():
    server = serve_gym(Paddle)
    with gateway_to(server, token="for-players", auth=Auth(watch_token="for-watchers")) as gateway:
        env = make_remote(through(gateway, server), token="for-players")
        env.reset(seed=0)
        seen = make_remote(through(gateway, server), token="for-watchers", role="spectator", wait="now")
        seen.reset()
        env.step(1)
        assert seen.step(0)[0].tolist() == [102]
        for keywords in ({}, {"role": "takeover"}):
            with pytest.raises((errors.RefusedError, errors.SettingError), match="this token is for watching"):
                make_remote(through(gateway, server), token="for-watchers", **keywords)
        with pytest.raises(errors.RefusedError, match="this token is for watching"):
            make_remote(gateway.url, token="for-watchers")
        with Inspector(gateway.url, 20.0, ClientCredentials.of(token="for-watchers")) as inspector:
            assert "server.web" in [property.spec.name for property in inspector.list_properties()]  # the gateway's own
            inspector.ask("join_world", spectating(server))
            # The page reads the first of them.
            for key in ("world.name", "world.timing", "world.wrappers"):
                inspector.read_property(key)
            assert next(inspector.list_properties("world")).spec.name.startswith("world.")
            for key in ("world.attributes.place", "world.controls", "world.frame"):
                with pytest.raises(errors.RefusedError, match="this token is for watching"):
                    inspector.read_property(key)
            with pytest.raises(errors.RefusedError, match="this token is for watching"):
                inspector.ask("destroy_world", pb.DestroyWorldRequest(world_name=f"{place(server)}/"))
        seen.close()
        env.close()


def test_a_token_for_looking_on_does_not_play_on_a_server_that_knows_no_spectators():
    """Those of other packages may ignore the settings of JoinWorld, as the example of dm_env_rpc does."""
    tokens = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}
    server = PublicServer(kind="discrete", faults={"join_ignores_settings"})
    with gateway_to(server, **tokens) as gateway:
        with Inspector(gateway.url, 20.0, ClientCredentials.of(token="for-watchers")) as inspector:
            for _ in range(2):
                with pytest.raises(errors.RefusedError, match="knows no spectators") as caught:
                    inspector.ask("join_world", spectating(server))
                assert caught.value.code == Code.PERMISSION_DENIED
        assert server.requests["join_world"] == 0
        with Inspector(gateway.url, 20.0, ClientCredentials.of(token="for-players")) as inspector:
            inspector.ask("join_world", pb.JoinWorldRequest(world_name=f"{place(server)}/"))


def test_beyond_loopback_a_gateway_makes_a_token():
    with serve_gym(CountingEnv) as server:
        with pytest.warns(RuntimeWarning, match="without TLS"):
            gateway = serve_gateway(server.url, host="0.0.0.0")
        with gateway:
            assert "/#token=" in gateway.web_url
            with pytest.raises(errors.RefusedError, match="a token is required"):
                make_remote(f"grpc://127.0.0.1:{gateway.port}")


def test_urls_that_cannot_be_read_are_refused_at_the_start(tmp_path):
    with pytest.raises(errors.SettingError, match="expected the URLs of servers, got none"):
        serve_gateway([])
    with pytest.raises(errors.AddressError, match="http"):
        serve_gateway("http://127.0.0.1:1")
    with pytest.raises(errors.AddressError, match="it names no environment"):
        serve_gateway("perlert://127.0.0.1:1")
    with pytest.raises(errors.SettingError, match="cannot be read"):
        serve_gateway(f"file://{tmp_path}/missing")
    with pytest.raises(errors.SettingError, match="16 random bytes"):
        serve_gateway("perlert://127.0.0.1:1/x:0", perlert_key=b"short")


def test_a_scheme_of_somebody_else_names_servers_and_takes_its_keywords():
    opened = []

    class Rack:
        def __init__(self, url):
            self.url = url

        def endpoints(self):
            return [Endpoint(self.url, "rack-1")]

    def open_rack(url, **keywords):
        opened.append((url, keywords))
        return Rack(server.url)

    racks = GatewayScheme("rack", open_rack, {"rack_key": "the key of the rack"})
    halls = GatewayScheme("hall", open_rack)
    with serve_gym("CartPole-v1", web=True) as server:
        with serve_gateway("rack://a/1?x=://", schemes=[halls, racks], rack_key=b"secret") as gateway:
            assert [one["name"] for one in overview(gateway)["servers"]] == ["rack-1"]
            with closing(make_remote(f"{gateway.url}?server=rack-1")) as env:
                env.reset(seed=0)
        with serve_gateway("hall://1", schemes=[halls, racks], rack_key=b"secret"):
            pass
    assert opened == [("rack://a/1?x=://", {"rack_key": b"secret"}), ("hall://1", {})]
    with pytest.raises(TypeError, match=r"'rack_kez': did you mean rack_key="):
        serve_gateway("rack://a/1", schemes=[racks], rack_kez=b"secret")
    with pytest.raises(TypeError, match=r"'perlert_key'"):
        serve_gateway("rack://a/1", schemes=[racks], perlert_key=b"secret")
    with pytest.raises(errors.AddressError, match="perlert"):
        serve_gateway("perlert://127.0.0.1:1/x:0", schemes=[racks])
    assert len(opened) == 2


def test_several_agents_and_a_takeover_go_through_a_gateway():
    server = serve_parallel(Paddles, fps=30, env_kwargs={"render_mode": "rgb_array"})
    with gateway_to(server) as gateway:
        agent = make_remote(through(gateway, server), agent="upper")
        agent.reset()
        until(lambda: overview(gateway)["worlds"][0]["seats"] == {"upper": True, "lower": False, "third": False})
        with Inspector(gateway.url, 20.0) as person:
            settings = {"role": "takeover", "agent": "upper", "name": "ann"}
            packed = {name: pack_tensor(value) for name, value in settings.items()}
            specs = person.ask("join_world", pb.JoinWorldRequest(world_name=f"{place(server)}/", settings=packed)).specs
            person.ask("step", pb.StepRequest(requested_observations=[1]))
            (uid,) = specs.actions
            end = time.monotonic() + 20
            while agent.step(0)[-1].get("intervened_by") != "ann":
                assert time.monotonic() < end
                actions = {uid: pack_tensor(np.asarray(1, np.int64))}
                person.ask("step", pb.StepRequest(actions=actions, requested_observations=[1]))
        agent.close()


# PERLERT


class Player:
    """A person in a lobby, through the gateway."""

    def __init__(self, gateway, world, **settings):
        self.inspector = Inspector(gateway.url, 20.0)
        packed = {name: pack_tensor(value) for name, value in settings.items()}
        try:
            specs = self.inspector.ask("join_world", pb.JoinWorldRequest(world_name=world, settings=packed)).specs
        except errors.RefusedError:
            self.inspector.close()
            raise
        self.names = {uid: spec.name for uid, spec in specs.observations.items()}

    def step(self, action=None, ready=None):
        actions = {} if action is None else {1: pack_tensor(action)}
        actions |= {} if ready is None else {2: pack_tensor(np.asarray(ready))}
        answer = self.inspector.ask("step", pb.StepRequest(actions=actions, requested_observations=list(self.names)))
        found = {self.names[uid]: unpack_tensor(tensor)[()] for uid, tensor in answer.observations.items()}
        return {**found, **json.loads(str(found["lobby"]))}


class Guess(gymnasium.Env):
    """An episode of five steps by a person, whose reward is the action: while nobody acts it goes on."""

    observation_space = spaces.Box(0, 9, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += bool(action)
        return np.full(2, self.steps, np.float32), float(action), self.steps >= 5, False, {}


def test_a_person_registers_in_a_perlert_lobby_is_ready_plays_and_sees_the_result():
    with (
        serve_perlert(Guess, fps=20, port=0, countdown=0.0, default_action=0) as server,
        serve_gateway(server.url) as gateway,
    ):
        (world,) = overview(gateway)["worlds"]
        assert (world["kind"], world["seats"]) == ("perlert", {"agent0": False})
        looker = Player(gateway, world["name"], role="spectator")
        ann = Player(gateway, world["name"], agent="agent0", name="ann")
        until(lambda: ann.step()["mine"] == "agent0")
        until(lambda: looker.step()["slots"][0]["name"] == "ann")
        assert looker.step()["mine"] is None
        until(lambda: overview(gateway)["worlds"][0]["seats"] == {"agent0": True})
        until(lambda: ann.step()["controls"] is not None)
        assert ann.step()["controls"]["kind"] == "discrete"
        ann.step(ready=True)
        until(lambda: ann.step(action="2")["over"])
        seen = ann.step()
        assert seen["state"] == "over"
        assert seen["return"] == 10
        assert seen["observation"].split(",")[0].startswith("5")
        ann.step(ready=True)  # another run
        until(lambda: not ann.step()["over"])
        until(lambda: ann.step(action="1")["over"])
        ann.inspector.close()
        until(lambda: overview(gateway)["worlds"][0]["seats"] == {"agent0": False})
        looker.inspector.close()


def test_a_lobby_refuses_what_it_cannot_send_and_a_slot_that_is_taken_is_waited_for():
    with serve_perlert(Guess, fps=20, port=0) as server, serve_gateway(server.url) as gateway:
        world = overview(gateway)["worlds"][0]["name"]
        ann = Player(gateway, world, agent="agent0", name="ann")
        until(lambda: ann.step()["mine"] == "agent0")
        bob = Player(gateway, world, agent="agent0", name="bob")
        until(lambda: "is held by 'ann" in bob.step()["waits"])
        ann.inspector.close()
        until(lambda: bob.step()["mine"] == "agent0")
        for settings, words in (
            ({}, "expected role=spectator, or role=player"),
            ({"role": "spectator", "agent": "agent0"}, "expected role=spectator, or role=player"),
            ({"agent": "agent0", "name": "x" * 99}, "tag of at most"),
            ({"agent": "a;b"}, "bad JoinWorld settings"),
            ({"colour": "red"}, "unknown JoinWorld settings colour"),
        ):
            with pytest.raises(errors.RefusedError, match=words):
                Player(gateway, world, **settings)
        refused = pytest.raises(errors.RefusedError, match="in which no worlds are made: join it")
        with Inspector(gateway.url, 20.0) as inspector, refused:
            inspector.ask("create_world", pb.CreateWorldRequest())
        bob.inspector.close()


class Push(Guess):
    """Takes a number, which may be written with any digits."""

    action_space = spaces.Box(0, 9, (1,))

    def step(self, action):
        return super().step(action[0])


def test_an_action_of_too_many_digits_is_refused_and_the_seat_plays_on():
    with (
        serve_perlert(Push, fps=3, name="push", countdown=0.0, default_action=[0.0]) as server,
        serve_gateway(server.url) as gateway,
    ):
        ann = Player(gateway, overview(gateway)["worlds"][0]["name"], agent="agent0", name="ann")
        until(lambda: ann.step()["controls"] is not None)
        ann.step(ready=True)
        until(lambda: ann.step()["state"] == "playing")
        ann.step(action="7")
        with pytest.raises(errors.RefusedError, match="at most 1151 bytes"):
            ann.step(action=f"8.{'0' * 1120}")
        until(lambda: ann.step()["over"])
        assert ann.step()["return"] == 35
        ann.inspector.close()


def test_a_lobby_that_offers_a_space_without_an_action_ends_no_gateway():
    space = '{"type":"Box","shape":[1],"dtype":"float32","low":"inf","high":"inf","bounded_below":1,"bounded_above":1}'
    offer = f'bridge/1 {{"token":"{"0" * 12}","slot":"agent0","fps":30,"observation":{space},"action":{space}}}'
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lobby, ExitStack() as stack:
        lobby.bind(("127.0.0.1", 0))

        def answer():
            while (asked := lobby.recvfrom(2000))[0] != b"end":
                said = f"message={offer}" if b"register" in asked[0] else "agent0=open,citizen,,not_ready"
                lobby.sendto(f"city:7;{said}".encode(), asked[1])

        thread = threading.Thread(target=answer)
        thread.start()
        stack.callback(thread.join)
        stack.callback(lobby.sendto, b"end", lobby.getsockname())
        gateway = stack.enter_context(serve_gateway(f"perlert://127.0.0.1:{lobby.getsockname()[1]}/city:7"))
        world = overview(gateway)["worlds"][0]["name"]
        ann = Player(gateway, world, agent="agent0", name="ann")
        stack.callback(ann.inspector.close)
        until(lambda: ann.step()["said"].startswith("bridge/1"))
        assert ann.step()["controls"] is None


@pytest.mark.slow
def test_a_lobby_that_is_gone_is_told_and_found_again():
    with serve_perlert(Guess, fps=20, port=0) as server:
        gateway = serve_gateway(server.url)
        assert overview(gateway)["servers"][0]["problem"] == ""
        port = int(server.url.rpartition("/")[0].rpartition(":")[2])
    with gateway:
        until(lambda: "does not answer" in overview(gateway)["servers"][0]["problem"], deadline=20)
        assert overview(gateway)["worlds"] == []
        with serve_perlert(Guess, fps=20, port=port, name="guess"):
            until(lambda: overview(gateway)["servers"][0]["problem"] == "")


BRIDGE = "import sys; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_command_serves_with_the_servers_token_of_a_file_until_its_input_ends(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    with serve_gym(CountingEnv, token=SECRET) as server:
        options = (server.url, "--port", "0", "--upstream-token-file", str(file), "--exit-on-eof")
        with server_process(BRIDGE, "web", *options) as (process, line):
            assert line.startswith("In a browser: http://127.0.0.1:")
            port = line.rstrip("/").rpartition(":")[2]
            with make_remote(f"ws://127.0.0.1:{port}") as env:
                env.reset()
            process.stdin.close()
            assert process.wait(30) == 0


def test_the_command_says_what_is_wrong_with_its_urls(capsys):
    assert main(["web", "http://localhost:1", "--port", "0"]) == 2
    assert "http:// is not supported; use grpc://" in capsys.readouterr().err
    assert main(["web", "grpc://localhost:1", "perlert://localhost:1", "--port", "0"]) == 2
    assert "it names no environment" in capsys.readouterr().err
    assert main(["web", "grpc://localhost:1", "--port", "0", "--upstream-token-file", "nowhere"]) == 2
    assert "cannot read --upstream-token-file …: No such file" in capsys.readouterr().err


class Reading(Saying):
    """Keeps the bytes of its requests; says that it is of this package, which knows spectators."""

    def __init__(self):
        super().__init__("{}")
        self.came = []

    def read(self, data):
        self.came.append(data)
        return super().read(data)

    def Process(self, request_iterator, context):  # noqa: N802
        context.send_initial_metadata(((HELLO, "1.0"),))
        yield from super().Process(request_iterator, context)


def test_a_step_is_handed_on_without_a_request_before_it_in_the_same_message():
    """Which of the two a server reads is for it to say, and the gateway has more rights there than a spectator."""
    step = pb.EnvironmentRequest(step=pb.StepRequest()).SerializeToString()
    other = pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name="w")).SerializeToString()
    server = Reading()
    with gateway_to(server, auth=Auth(watch_token="for-watchers"), token="for-players") as gateway:
        with grpc.insecure_channel(gateway.url.removeprefix("grpc://")) as channel:
            process = channel.stream_stream(f"/{SERVICE}/{METHOD}")  # bytes as they are
            join = pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=f"{place(server)}/"))
            join.join_world.settings["role"].CopyFrom(pack_tensor("spectator"))
            requests = [join.SerializeToString(), step, other + step]
            metadata = [("authorization", "Bearer for-watchers")]
            answers = [pb.EnvironmentResponse.FromString(each) for each in process(iter(requests), metadata=metadata)]
        assert [answer.WhichOneof("payload") for answer in answers] == ["join_world", "step", "step"]
        assert server.came[-2:] == [step, step]


def test_a_request_behind_a_step_in_one_message_does_not_pass_as_a_step():
    """Protobuf takes the last field of a oneof, so a message may begin like a Step and be another request."""
    server = serve_gym(Paddle)
    step = pb.EnvironmentRequest(step=pb.StepRequest()).SerializeToString()
    name = f"{place(server)}/"
    called = pb.EnvironmentRequest()
    called.extension.type_url = CALL_REQUEST_URL
    called.extension.value = bridge_pb2.CallRequest(name="close").SerializeToString()
    others = {
        "create_world": pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()),
        "destroy_world": pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest(world_name=name)),
        "reset_world": pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=name)),
        "extension": called,
    }
    with gateway_to(server, token="for-players", auth=Auth(watch_token="for-watchers")) as gateway:
        env = make_remote(through(gateway, server), token="for-players")
        env.reset(seed=0)
        before = server.worlds
        with grpc.insecure_channel(gateway.url.removeprefix("grpc://")) as channel:
            process = channel.stream_stream(f"/{SERVICE}/{METHOD}")  # bytes as they are
            for kind, other in others.items():
                join = pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(world_name=name))
                join.join_world.settings["role"].CopyFrom(pack_tensor("spectator"))
                requests = [join.SerializeToString(), step + other.SerializeToString()]
                metadata = [("authorization", "Bearer for-watchers")]
                answers = [
                    pb.EnvironmentResponse.FromString(each) for each in process(iter(requests), metadata=metadata)
                ]
                assert answers[0].WhichOneof("payload") == "join_world", answers
                assert answers[1].error.code == Code.PERMISSION_DENIED, (kind, answers[1])
        assert server.worlds == before
        env.step(1)
        env.close()
