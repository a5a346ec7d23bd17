"""A person takes over from an agent of a game: the program does what the person does, and all hear what was done."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from bridge import make_remote
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.reader import read_folder
from tests.game.loops import check_recorded, in_thread, walking
from tests.peers import Stream
from tests.support import until


@contextlib.contextmanager
def taking_over(server, name="Ann"):
    """Take the agent's place over; give what holds an action, or None to let go."""
    stream = Stream(server, own_connection=True)
    stream.join("", role="takeover", name=name)

    def hold(action):
        actions = {} if action is None else {1: pack_tensor(np.int64(action))}
        assert stream.ask(step=pb.StepRequest(actions=actions)).WhichOneof("payload") == "step"

    try:
        hold(None)
        yield hold
    finally:
        stream.die()
        stream.channel.close()


def test_whose_agent_is_late_in_lock_step_acts_and_the_agent_hears_of_it(process, tmp_path):
    with walking(True, process=process, timeout=0.03, default_action=3, record=tmp_path, web=True) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        env.step(2)
        with taking_over(walk.game.server) as hold:

            def act(action, calls):
                hold(action)
                return len(walk.taken) > calls

            calls = len(walk.taken)
            until(lambda: act(1, calls + 6))
            assert 1 in walk.taken, "the agent is silent, so the person acts in its place"
            seen, reward, *_, info = env.step(2)
            assert reward == seen[1] - 2, "the rewards of all frames since its last Step"
            assert info["intervened_by"] == "Ann"
            hold(None)
        calls = len(walk.taken)
        until(lambda: len(walk.taken) > calls + 2)
        assert walk.taken[-1] == 3, "nobody acts, and nobody has taken over"
        env.close()
    episodes = read_folder(tmp_path).episodes()
    for episode in episodes:
        check_recorded(episode)
    players = [str(player) for episode in episodes for player in episode.players]
    assert any(player.startswith("person") for player in players)
    assert "default" in players


def test_who_takes_over_at_a_slow_pace_makes_no_frame_come_in_between(process, tmp_path):
    """The program waits on while a step waits for the person's pace, although its timeout is over by then."""
    with walking(True, process=process, timeout=0.05, default_action=3, record=tmp_path, web=True) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        stream = Stream(walk.game.server, own_connection=True)
        stream.join("", role="takeover", name="Ann", pace=5.0)
        for _ in range(4):
            stream.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(1))}))
            env.step(2)
        stream.die()
        stream.channel.close()
        env.close()
    for episode in read_folder(tmp_path).episodes():
        check_recorded(episode)


@pytest.mark.parametrize("wait", [False, True])
def test_an_agent_and_a_person_may_ask_for_a_round_at_once(process, wait):
    keywords = {"timeout": 0.05} if wait else {}
    with walking(wait, process=process, web=True, **keywords) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        person = Stream(walk.game.server, own_connection=True)
        person.join("", role="spectator")
        for seed in range(2, 6):
            asked, refused = threading.Event(), []

            def ask(asked=asked, refused=refused):
                asked.wait(10)
                settings = {"seed": pack_tensor(np.int64(77))}
                person.send(reset_world=pb.ResetWorldRequest(world_name="", settings=settings))
                refused.append(person.take())

            with in_thread(ask):
                asked.set()
                seen, _ = env.reset(seed=seed)
            assert seen[1] == 0, "the beginning of a round"
            assert "only watches" in refused[0].error.message
            env.step(1)
        person.die()
        person.channel.close()
        env.close()
    seeds = [seed for seed, _ in walk.begun if seed is not None]
    assert seeds == [1, 2, 3, 4, 5], "each round that the agent asked for, once, and none of who watches"
