"""Seats that wait for who lost the connection: the JoinWorld setting `seat_key`."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bridge import Limits, make_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.parallel_envs import Relay
from tests.support import until
from tests.web.matches.clients import FRAME, RUNNING, Client, states

KEY = "ann's key of 24 letters!".replace(" ", "-")


@pytest.fixture
def isolation():
    return None


def refusal(stream, **settings):
    packed = {name: pack_tensor(value) for name, value in settings.items()}
    answer = stream.ask(join_world=pb.JoinWorldRequest(settings=packed))
    assert answer.WhichOneof("payload") == "error", answer
    return Code(answer.error.code), answer.error.message


def lose(server, stream):
    """Cut a connection, and wait until the server has noticed."""
    count = server.status()["connections"]
    stream.die()
    until(lambda: server.status()["connections"] < count)


def test_who_comes_back_with_the_key_plays_on_in_the_same_round(serve, client, clock):
    server = serve(lambda: Relay(horizon=500))
    viewer = client(server).sit(None, role="spectator")
    ann = client(server).sit("ann", "person:Ann", seat_key=KEY)
    ann.ready()
    clock.advance(3.0)
    states(viewer, "running")
    assert ann.step()[0] == RUNNING
    ann.step(2)
    clock.advance(FRAME)
    clock.advance(FRAME)
    assert viewer.seats("return")[0] == (4.0,)
    lose(server, ann)
    clock.advance(10.0)
    # The round went on, and the seat did nothing meanwhile; nobody else gets it.
    assert viewer.seats("name", "playing")[0] == ("Ann", True)
    assert viewer.seats("return")[0] == (4.0,)
    assert refusal(client(server), agent="ann", player="person:Eve")[0] is Code.RESOURCE_EXHAUSTED
    assert refusal(client(server), agent="ann", player="person:Eve", seat_key="e" * 24)[0] is Code.RESOURCE_EXHAUSTED
    back = client(server).sit("ann", "person:Ann", seat_key=KEY)
    assert back.step()[0] == RUNNING
    back.step(2)
    clock.advance(FRAME)
    assert viewer.seats("name", "playing", "return")[0] == ("Ann", True, 6.0)


def test_who_asks_for_a_seat_that_somebody_may_come_back_to_hears_when_it_is_free(serve, client):
    server = serve(lambda: Relay(horizon=500), limits=Limits(seat_timeout=300.0))
    ann, bob, cyd = (client(server).sit(agent, "person:X", seat_key=KEY + agent) for agent in ("ann", "bob", "cyd"))

    def told(**settings):
        code, message = refusal(client(server), player="person:Eve", **settings)
        assert code is Code.RESOURCE_EXHAUSTED
        return re.findall(r"free in (\d+) s, unless they come back$", message)

    assert told(agent="ann") == [], "she is there"
    ann.die()
    until(lambda: told(agent="ann"))
    # Whichever key, and whoever asks for any seat.
    for settings in ({"agent": "ann"}, {"agent": "ann", "seat_key": "e" * 24}, {"role": "player"}, {}):
        (seconds,) = told(**settings)
        assert 240 <= int(seconds) <= 300
    assert told(agent="bob") == [], "his seat is not kept"
    client(server).sit("ann", "person:X", seat_key=KEY + "ann")
    assert told(agent="ann") == [], "she is back"
    for stream in (bob, cyd):
        stream.die()
    until(lambda: told(agent="cyd"))


def test_a_player_with_pictures_comes_back_too_and_looks_anew(serve, client, clock):
    server = serve(lambda: Relay(horizon=500, render_mode="rgb_array"))
    viewer = client(server).sit(None, role="spectator")
    ann = client(server).sit("ann", "person:Ann", seat_key=KEY, frame="png")
    assert server.status()["viewers"] == 1
    lose(server, ann)
    assert viewer.seats("taken_by")[0] == ("Ann",)
    assert server.status()["viewers"] == 0
    back = client(server).sit("ann", "person:Ann", seat_key=KEY, frame="jpeg")
    back.ready()
    clock.advance(3.0)
    back.send(step=pb.StepRequest(requested_observations=[back.uids["frame"], back.uids["watch"]]))
    answer = back.take()
    assert answer.WhichOneof("payload") == "step", answer
    assert server.status()["viewers"] == 1
    lose(server, back)
    plain = client(server).sit("ann", "person:Ann", seat_key=KEY)
    assert "frame" not in plain.uids
    assert plain.step()[0] == RUNNING


def test_a_seat_is_free_once_nobody_came_back(serve, client, clock):
    server = serve(limits=Limits(seat_timeout=0.5))
    viewer = client(server).sit(None, role="spectator")
    lose(server, client(server).sit("ann", "person:Ann", seat_key=KEY))
    until(lambda: viewer.seats("taken_by")[0] == ("",))
    assert client(server).sit("ann", "person:Ben").seats("taken_by")[0] == ("Ben",)


def test_who_leaves_gives_the_seat_up_at_once(serve, client, clock):
    server = serve()
    viewer = client(server).sit(None, role="spectator")
    ann = client(server).sit("ann", "person:Ann", seat_key=KEY)
    assert ann.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
    assert viewer.seats("taken_by")[0] == ("",)


def test_without_a_key_a_lost_client_s_seat_is_free_at_once(serve, client, clock):
    server = serve()
    viewer = client(server).sit(None, role="spectator")
    client(server).sit("ann", "person:Ann").die()
    until(lambda: viewer.seats("taken_by")[0] == ("",))


def test_who_comes_back_for_another_seat_gets_that_one_and_gives_up_the_first(serve, client, clock):
    server = serve()
    viewer = client(server).sit(None, role="spectator")
    lose(server, client(server).sit("ann", "person:Ann", seat_key=KEY))
    client(server).sit("bob", "person:Ann", seat_key=KEY)
    assert viewer.seats("taken_by")[:2] == [("",), ("Ann",)]


@pytest.mark.parametrize("key", ["short", "k" * 65, "with spaces in it, of 30 letters", 7])
def test_a_key_that_is_none_is_refused(serve, client, key):
    code, message = refusal(client(serve()), agent="ann", seat_key=key if isinstance(key, str) else np.int64(key))
    assert code is Code.INVALID_ARGUMENT
    assert "a secret of 16 to 64 characters" in message


def test_a_person_who_took_over_has_the_place_again_and_the_agent_acted_meanwhile():
    with serve_gym(CountingEnv) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)

        def hold(stream):
            (uid,) = stream.specs.actions
            action = pack_tensor(np.asarray(1, np.int64))
            assert stream.ask(step=pb.StepRequest(actions={uid: action})).WhichOneof("payload") == "step"

        ann = Client(server, own_connection=True).join("", role="takeover", name="Ann", seat_key=KEY)
        ann.ask(step=pb.StepRequest())
        hold(ann)
        assert env.step(0)[4]["intervened_by"] == "Ann"
        ann.die()
        until(lambda: "intervention" not in env.step(0)[4])
        eve = Client(server, own_connection=True)
        code, message = refusal(eve, role="takeover", name="Eve")
        assert code is Code.RESOURCE_EXHAUSTED
        assert "'Ann' has the seat already" in message
        assert re.search(r"free in (30|2\d) s, unless they come back", message)
        back = Client(server, own_connection=True).join("", role="takeover", name="Ann", seat_key=KEY)
        back.ask(step=pb.StepRequest())
        hold(back)
        assert env.step(0)[4]["intervened_by"] == "Ann"
        for stream in (ann, eve, back):
            stream.die()
            stream.channel.close()
        env.close()
