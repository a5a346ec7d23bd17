"""Matches over the protocol: `serve_parallel(fps=…, match=True)`, with a clock that the test turns."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, RefusedError, SettingError, StartError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.parallel_envs import NAMES, Relay
from tests.recording_reader import read_run
from tests.support import everywhere, until
from tests.web.matches.clients import (
    FPS,
    FRAME,
    INTERRUPTED,
    RUNNING,
    states,
    still,
)


def fast(observation: Any) -> Any:
    """The same, running."""
    if isinstance(observation, dict):
        return {"run": 3, "lean": np.zeros(2, np.float32)}
    return np.full(1, 5, np.float32) if isinstance(observation, str) else 2


@everywhere
def test_two_people_and_a_policy_play_rounds(serve, client, clock):
    """Names, ready, the countdown, a round with its rewards, the result, and a rematch."""
    server = serve(lambda: Relay(horizon=5))
    ann = client(server).sit("ann", "person:Ann")
    ben = client(server).sit("bob", "person:Ben\u202e")
    assert ann.seats("seat", "name", "kind", "ready") == [
        ("ann", "Ann", "person", False),
        ("bob", "Ben", "person", False),
        ("cyd", "still", "policy", False),
    ]
    assert ann.ready() is None
    assert (ann.is_ready(), ben.is_ready()) == (1, 0)
    clock.advance(5.0)
    assert (ben.match()["state"], ben.match()["waits_for"]) == ("gathering", ["bob"])
    assert ben.ready() is None
    assert (ann.match()["state"], ann.match()["countdown"]) == ("countdown", 3.0)
    clock.advance(2.0)
    assert ann.match()["countdown"] == 1.0
    clock.advance(1.0)
    states(ann, "running")
    assert ann.seats("playing") == [(True,), (True,), (False,)]
    assert ann.step()[0] == RUNNING
    assert ben.step()[0] == RUNNING
    assert ann.step(2) == (RUNNING, 0.0)
    for _ in range(4):
        clock.advance(FRAME)
    assert ann.step(2) == (RUNNING, 8.0)
    assert ann.seats("return") == [(8.0,), (pytest.approx(8.4),), (pytest.approx(8.8),)]
    clock.advance(FRAME)
    assert ann.step(2) == (INTERRUPTED, 2.0)
    result = ben.match()["result"]
    assert result == {
        "round": 1,
        "seats": [
            {"seat": "ann", "name": "Ann", "kind": "person", "return": 10.0},
            {"seat": "bob", "name": "Ben", "kind": "person", "return": pytest.approx(10.5)},
            {"seat": "cyd", "name": "still", "kind": "policy", "return": pytest.approx(11.0)},
        ],
        "winners": ["cyd"],
        "error": None,
    }
    clock.advance(30.0)
    assert ann.match()["state"] == "gathering"
    assert ben.step()[0] == INTERRUPTED
    assert ann.ready() is None
    assert ben.ready() is None
    clock.advance(3.0)
    states(ann, "running")
    assert (ann.match()["round"], ann.match()["result"]) == (2, None)
    assert ben.step()[0] == RUNNING


def test_a_spectator_sees_the_match_and_counts_for_nothing(serve, client, clock):
    server = serve()
    ann, viewer = client(server).sit("ann", "person:Ann"), client(server).sit(None, role="spectator")
    refused = viewer.ready()
    assert (refused.code, "world.ready" in refused.message) == (Code.NOT_FOUND, True)
    assert viewer.seats("name", "taken_by") == [("Ann", "Ann"), ("still", ""), ("still", "")]
    viewer.send_step()
    ann.ready()
    clock.advance(3.0)
    assert viewer.stepped()[0] == RUNNING


def test_a_program_is_always_ready_and_waits_in_its_first_step(serve, client, clock):
    server = serve(lambda: Relay(horizon=2))
    env = bridge.make_remote(f"{server.url}?world=", agent="ann", timeout=20)
    person = client(server).sit("bob", "person:Ben")
    seen: list[Any] = []

    def play() -> None:
        for _ in range(2):
            seen.append(env.reset())
            while not any((last := env.step(1))[2:4]):
                pass
            seen.append(last[1])

    thread = threading.Thread(target=play)
    thread.start()
    try:
        assert person.seats("kind", "ready")[:2] == [("agent", True), ("person", False)]
        for number in (1, 2):
            person.ready()
            clock.advance(3.0)
            states(person, "running")
            until(lambda number=number: len(seen) == 2 * number - 1)
            while person.match()["state"] == "running":
                clock.advance(FRAME)
            until(lambda number=number: len(seen) == 2 * number)
    finally:
        thread.join(20)
        env.close()
    assert not thread.is_alive()
    assert person.match()["result"]["seats"][0]["name"] == "agent"


def test_a_person_s_reset_says_ready_and_a_step_before_that_is_refused(serve, client, clock):
    server = serve()
    ann = client(server).sit("ann", "person:Ann")
    ann.send_step()
    error = ann.refused()
    assert (error.code, "'Ann' is not ready" in error.message, "world.ready" in error.message) == (9, True, True)
    env = bridge.make_remote(f"{server.url}?world=", agent="bob", player="person:Ben", timeout=20)
    thread = threading.Thread(target=lambda: env.reset(seed=7))
    thread.start()
    until(lambda: ann.seats("ready")[1] == (True,))
    ann.ready()
    clock.advance(3.0)
    thread.join(20)
    assert not thread.is_alive()
    env.close()


def test_a_seed_given_by_reset_is_the_next_round_s(serve, client, clock):
    made: list[Relay] = []

    def make() -> Relay:
        made.append(Relay())
        return made[-1]

    ann = client(serve(make)).sit("ann", "person:Ann")
    ann.ask(reset=pb.ResetRequest(settings={"seed": pack_tensor(np.int64(7))}))
    clock.advance(3.0)
    states(ann, "running")
    assert made[0].seeds == [7]


@everywhere
def test_who_leaves_is_played_by_the_policy_and_the_others_go_on(serve, client, clock):
    server = serve(agents={"ann": fast, "bob": still, "cyd": still})
    ann, ben = client(server).sit("ann", "person:Ann"), client(server).sit("bob", "person:Ben")
    ann.ready()
    ben.ready()
    clock.advance(3.0)
    states(ben, "running")
    assert ann.step()[0] == RUNNING
    assert ben.step()[0] == RUNNING
    ann.step(1)
    clock.advance(FRAME)
    assert ben.step() == (RUNNING, 1.1)
    ann.die()
    until(lambda: ben.seats("name")[0] == ("fast",))
    clock.advance(FRAME)
    assert ben.step() == (RUNNING, 2.1)
    ben.die()
    viewer = client(server).sit(None, role="spectator")
    until(lambda: viewer.match()["state"] == "gathering")
    assert viewer.match()["result"] is None, "nobody was left"


def test_who_comes_in_a_round_waits_for_the_next_one(serve, client, clock):
    server = serve(lambda: Relay(horizon=3), agents=fast)
    ben = client(server).sit("bob", "person:Ben")
    ben.ready()
    clock.advance(3.0)
    states(ben, "running")
    ben.step()
    ann = client(server).sit("ann", "person:Ann")
    assert ann.seats("name", "taken_by", "playing")[0] == ("fast", "Ann", False)
    ann.ready()
    ann.send_step()
    for reward in (7.1, 7.1):  # the policies of ann and cyd
        clock.advance(FRAME)
        assert ben.step() == (RUNNING, reward)
    clock.advance(FRAME)
    assert ben.step()[0] == INTERRUPTED
    ben.ready()
    clock.advance(3.0)
    assert ann.stepped() == (RUNNING, 0.0)
    assert ben.seats("playing") == [(True,), (True,), (False,)]


def test_a_reset_in_a_round_gives_the_seat_to_the_policy_until_the_next_one(serve, client, clock):
    server = serve(lambda: Relay(horizon=3), agents=fast)
    ann, ben = client(server).sit("ann", "agent:PPO"), client(server).sit("bob", "person:Ben")
    ben.ready()
    clock.advance(3.0)
    states(ben, "running")
    ann.ask(reset=pb.ResetRequest())  # before its first Step: it is in the round still
    assert ann.step()[0] == RUNNING
    ann.ask(reset=pb.ResetRequest())
    assert ben.seats("name", "taken_by")[0] == ("fast", "PPO")
    ann.send_step()
    for _ in range(3):
        clock.advance(FRAME)
    states(ben, "gathering")
    ben.ready()
    clock.advance(3.0)
    assert ann.stepped()[0] == RUNNING


def test_an_episode_that_fails_is_told_to_all_and_the_match_goes_on(serve, client, clock):
    server = serve(lambda: Relay(fail_at=1))
    ann = client(server).sit("ann", "person:Ann")
    ann.ready()
    clock.advance(3.0)
    states(ann, "running")
    assert ann.step()[0] == RUNNING
    clock.advance(2 * FRAME)
    states(ann, "gathering")
    assert "the environment raised" in ann.match()["result"]["error"]
    assert "Traceback" not in ann.match()["result"]["error"]
    ann.send_step()
    assert ann.refused().code == Code.INTERNAL
    ann.ready()
    clock.advance(10.0)
    states(ann, "running")


def test_a_policy_that_raises_is_named(serve, client, clock):
    def broken(observation: Any) -> Any:
        raise LookupError("no such weights")

    ann = client(serve(agents={"cyd": broken})).sit("ann", "person:Ann")
    ann.ready()
    clock.advance(3.0)
    states(ann, "running")
    ann.step()
    clock.advance(FRAME)
    states(ann, "gathering")
    assert "LookupError in the policy of 'cyd': no such weights" in ann.match()["result"]["error"]


def test_nobody_resets_the_world_or_takes_over_in_a_match(serve, client, clock):
    server = serve(web=True)
    ann = client(server).sit("ann", "person:Ann")
    answer = ann.ask(reset_world=pb.ResetWorldRequest(world_name=""))
    assert (answer.error.code, "is a match" in answer.error.message) == (9, True)
    settings = {"role": pack_tensor("takeover"), "agent": pack_tensor("ann")}
    answer = client(server).ask(join_world=pb.JoinWorldRequest(world_name="", settings=settings))
    assert (answer.error.code, "nobody takes over in a match" in answer.error.message) == (9, True)


def test_ready_is_1_or_0_and_a_world_without_a_match_has_neither_property(serve, client, clock):
    ann = client(serve()).sit("ann", "person:Ann")
    refused = ann.ready(2)
    assert (refused.code, refused.message) == (3, "expected world.ready to be 1 or 0, got 2")
    assert ann.ready(0) is None
    plain = client(serve(match=False)).sit("ann", "person:Ann")
    for key in ("world.match", "world.ready"):
        assert plain.property(read_property={"key": key}).code == Code.NOT_FOUND


def test_the_page_s_overview_has_the_match(serve, client):
    server = serve(web=True)
    ann = client(server)
    overview = lambda: json.loads(  # noqa: E731
        unpack_tensor(ann.property(read_property={"key": "server.web"}).read_property.value)[()]
    )
    assert (overview()["match"], overview()["worlds"]) == (True, [])
    ann.sit("ann", "person:Ann")
    assert overview()["worlds"][0]["match"] == ann.match()
    plain = client(serve(web=True, match=False))
    plain.sit("ann")
    answer = plain.property(read_property={"key": "server.web"})
    shown = json.loads(unpack_tensor(answer.read_property.value)[()])
    assert (shown["match"], shown["worlds"][0]["match"]) == (False, None)


def test_who_joins_without_an_agent_gets_the_first_free_seat(serve, client):
    server = serve()
    assert [client(server).sit(None, "person:Ann").property(read_property={"key": "world.agent"}) for _ in NAMES]
    viewer = client(server).sit(None, role="spectator")
    assert viewer.seats("taken_by") == [("Ann",)] * 3


def test_a_recording_says_who_acted(serve, client, clock, tmp_path):
    """The person, the policy, and the policy in the person's place once that one has left."""
    server = serve(lambda: Relay(horizon=4), agents=fast, record=tmp_path)
    ann, ben = client(server).sit("ann", "person:Ann"), client(server).sit("bob", "agent:PPO")
    ann.ready()
    clock.advance(3.0)
    states(ben, "running")
    assert ann.step()[0] == RUNNING
    assert ben.step()[0] == RUNNING
    ann.step(1)
    clock.advance(2 * FRAME)
    ann.die()
    until(lambda: ben.seats("taken_by")[0] == ("",))
    clock.advance(2 * FRAME)
    states(ben, "countdown")
    server.stop()
    ((header, rows),) = read_run(tmp_path).values()
    steps = [row for row in rows if row["kind"] == 0 and row["episode"] == 1 and row["acted"]]
    who = {
        agent: [row["by"] for row in steps if header["agents"][row["lane"]] == agent] for agent in ("ann", "bob", "cyd")
    }
    assert who["ann"] == ["person:Ann", "person:Ann", "agent:fast", "agent:fast"]
    assert {*zip(who["bob"], who["cyd"], strict=True)} == {("default", "agent:fast")}


# Policies, in a match and without


def test_policies_play_what_no_client_does_in_any_real_time_world(serve, client, clock):
    server = serve(match=False, agents={"ann": fast})
    ben = client(server).sit("bob")
    ben.step()
    clock.advance(FRAME)
    assert ben.step() == (RUNNING, 2.1)
    ann = client(server).sit("ann")
    clock.advance(FRAME)
    assert ben.step() == (RUNNING, 0.1), "a client has it, which has not acted yet"
    ann.die()

    def plays_again() -> bool:
        clock.advance(FRAME)
        return ben.step() == (RUNNING, 2.1)

    until(plays_again)


def test_a_random_policy_plays_the_free_seats(serve, client, clock):
    server = serve(lambda: Relay(horizon=50), agents="random")
    ann = client(server).sit("ann", "person:Ann")
    assert ann.seats("name") == [("Ann",), ("random",), ("random",)]
    ann.ready()
    clock.advance(3.0)
    states(ann, "running")
    ann.step()
    for _ in range(5):
        clock.advance(FRAME)
    assert ann.step()[1] > 0


def test_without_policies_a_match_fills_its_seats_at_random_and_with_a_default_action_by_that(serve, client):
    viewer = client(serve(agents=None)).sit(None, role="spectator")
    assert viewer.seats("name") == [("random",)] * 3
    viewer = client(serve(agents=None, default_action=lambda agent, seen, space: space.sample()))
    assert viewer.sit(None, role="spectator").seats("name") == [("policy",)] * 3
    viewer = client(serve(agents={"ann": fast})).sit(None, role="spectator")
    assert viewer.seats("name") == [("fast",), ("nobody",), ("nobody",)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fps": None}, "agents and match: only in a real-time world; give fps= too"),
        ({"match": False, "countdown": 1.0}, "countdown are of a match: give match=True too"),
        ({"countdown": -1.0}, "expected countdown in seconds, from 0 to 3600, got -1.0"),
        ({"agents": 3}, "expected agents as policies"),
        ({"agents": {"ann": "clever"}}, "got 'clever'"),
    ],
)
def test_wrong_options_are_refused_at_the_start(options, text):
    given = {"fps": FPS, "match": True, "agents": still, **options}
    with pytest.raises((SettingError, StartError), match=text):
        bridge.serve_parallel(Relay, **given)


def test_a_policy_of_an_agent_that_there_is_not_is_told_to_whoever_joins(serve):
    server = serve(agents={"dan": still})
    with pytest.raises(RefusedError, match=r"expected agents for agents of ann, bob, cyd, got \['dan'\]"):
        bridge.make_remote(f"{server.url}?world=", timeout=20)


def test_clients_hear_of_refusals_in_words(serve, clock):
    server = serve()
    first = bridge.make_remote(f"{server.url}?world=", agent="ann", timeout=20)
    with pytest.raises(RefusedError, match="'ann' is taken; there are still bob, cyd"):
        bridge.make_remote(f"{server.url}?world=", agent="ann", timeout=20)
    first.close()
