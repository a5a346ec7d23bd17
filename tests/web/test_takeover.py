"""A person takes over from an agent, and gives back."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import weakref

import numpy as np
import pytest

from bridge import Limits, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.recording.selection import Selection
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import let_holds_lapse
from tests.peers import Stream
from tests.recording_reader import read_run
from tests.support import everywhere, until, world_of
from tests.web_envs import Paddle, Paddles


class Person(Stream):
    def sit(self, world="", **settings):
        self.join(world, role="takeover", **settings)
        self.hold(None)
        return self

    def hold(self, action):
        """Hold keys that mean an action, or none; return whether the person acts."""
        actions = {} if action is None else {1: pack_tensor(np.int64(action))}
        answer = self.ask(step=pb.StepRequest(actions=actions, requested_observations=[1, 2]))
        assert answer.WhichOneof("payload") == "step", answer
        return bool(unpack_tensor(answer.step.observations[1]))


@pytest.fixture
def person():
    with contextlib.ExitStack() as stack:

        def make(server):
            stream = Person(server, own_connection=True)
            stack.callback(stream.channel.close)
            stack.callback(stream.die)
            return stream

        yield make


def test_a_world_whose_seat_was_refused_is_freed_at_its_end(person):
    with serve_gym(Paddle) as server:
        stream = person(server)
        name = stream.ask(create_world=pb.CreateWorldRequest()).create_world.world_name
        world = weakref.ref(world_of(server, name))
        wrong = {"role": pack_tensor("takeover"), "pace": pack_tensor(0.0)}
        answer = stream.ask(join_world=pb.JoinWorldRequest(world_name=name, settings=wrong))
        assert "expected the setting pace" in answer.error.message
        stream.ask(destroy_world=pb.DestroyWorldRequest(world_name=name))
        until(lambda: gc.collect() is None or world() is None)


@everywhere
def test_a_held_action_stands_in_for_the_agent_s_and_release_gives_it_back(person, isolation):
    with serve_gym(Paddle, isolation=isolation) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit(name="Ann")
        observation, *_, info = env.step(1)
        assert (observation.tolist(), info) == ([102], {})
        assert one.hold(-1) is True
        for place in (100, 98):
            observation, *_, info = env.step(1)
            assert observation.tolist() == [place]
            assert info == {"intervention": True, "intervened_by": "Ann", "intervene_action": -1}
        assert one.hold(None) is False
        observation, *_, info = env.step(1)
        assert (observation.tolist(), info) == ([100], {})
        env.close()


def test_who_leaves_or_dies_gives_back_and_the_environment_is_the_world_s_own_again(person):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        own = world_of(server).env
        one = person(server).sit()
        one.hold(-1)
        assert env.step(1)[4]["intervened_by"] == "somebody"
        one.die()
        until(lambda: world_of(server).env is own)
        assert env.step(1)[0].tolist() == [100]
        env.close()


@pytest.mark.parametrize(
    ("serve", "env", "keywords", "seat", "settings"),
    [
        (serve_gym, Paddle, {}, "agent", {}),
        (serve_gym, CountingEnv, {"num_envs": 2}, "lane 1", {"lane": 1}),
        (serve_parallel, Paddles, {}, "third", {"agent": "third"}),
    ],
)
def test_a_page_is_told_whose_seat_a_person_has_taken_over_until_they_give_it_back(
    person, serve, env, keywords, seat, settings
):
    def told(stream):
        (world,) = json.loads(stream.read_property("server.web"))["worlds"]
        return world["taken_over"]

    with serve(env, web=True, limits=Limits(seat_timeout=60), **keywords) as server:
        other = Stream(server, own_connection=True).join("", role="spectator")
        one = person(server).sit(name="Ann", **settings)
        assert told(other) == {seat: "Ann"}
        one.ask(leave_world=pb.LeaveWorldRequest())
        assert told(other) == {}
        # Who has lost the connection may come back; others hear for how long they have to wait.
        lost = person(server).sit(name="Ann", seat_key="1234567890123456", **settings)
        assert told(other) == {seat: "Ann"}
        lost.die()
        until(lambda: told(other) == {})
        back = person(server).sit(name="Ann", seat_key="1234567890123456", **settings)
        assert told(other) == {seat: "Ann"}
        back.die()
        other.die()
        other.channel.close()


def test_an_action_that_is_not_repeated_is_given_up(person, monkeypatch):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit()
        one.hold(-1)
        let_holds_lapse(monkeypatch)
        assert env.step(1)[0].tolist() == [102]
        env.close()


def test_the_agent_of_a_real_time_world_is_taken_over_and_told(person):
    with serve_gym(Paddle, fps=100) as server:
        env = make_remote(f"{server.url}?world=", wait="next_frame")
        env.reset(seed=0)
        one = person(server).sit(name="Bob")
        seen = []
        for _ in range(20):
            one.hold(1)  # a key that is held is sent again and again: what is a second old has ended
            seen.append(env.step(-1))
        assert seen[-1][0] > seen[1][0]
        assert seen[-1][4]["intervened_by"] == "Bob"
        one.hold(None)
        later = [env.step(-1) for _ in range(20)]
        assert later[-1][0] < later[1][0]
        assert "intervention" not in later[-1][4]
        env.close()


def test_one_agent_of_several_is_taken_over(person):
    with serve_parallel(Paddles, fps=100) as server:
        upper = make_remote(f"{server.url}?world=", agent="upper", wait="next_frame")
        lower = make_remote(f"{server.url}?world=", agent="lower", wait="next_frame")
        upper.reset()
        lower.reset()
        one = person(server).sit(agent="upper", name="Cyd")
        for _ in range(30):
            one.hold(1)
            seen = upper.step(-1), lower.step(-1)
        assert seen[0][0] > 100 > seen[1][0]
        assert seen[0][4]["intervened_by"] == "Cyd"
        assert "intervention" not in seen[1][4]
        upper.close()
        lower.close()


def test_one_lane_of_a_world_of_lanes_is_taken_over(person):
    with serve_gym(Paddle, num_envs=3) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        envs = BlockingReset(envs)
        envs.reset(seed=0)
        one = person(server).sit(lane=1, name="Dan")
        one.hold(-1)
        observations, *_, infos = envs.step(np.ones(3, np.int64))
        assert observations.reshape(-1).tolist() == [102, 98, 102]
        assert infos["intervention"].tolist() == [False, True, False]
        assert infos["intervened_by"][1] == "Dan"
        envs.close()


@everywhere
@pytest.mark.parametrize("fps", [None, 100.0], ids=["lock-step", "real time"])
def test_who_took_over_a_lane_is_recorded_for_that_lane_alone(person, tmp_path, isolation, fps):
    """By whom each action is stands in the recording, lane by lane, and in the infos that the client gets."""
    with serve_gym(Paddle, num_envs=3, fps=fps, record=tmp_path, isolation=isolation) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world=", player="agent:PPO"))
        envs.reset(seed=0)
        one = person(server).sit(lane=1, name="Dan")
        envs.step(np.ones(3, np.int64))
        marks = []

        def stepped() -> bool:
            """Step; return whether the infos say that a person acted."""
            one.hold(-1)
            *_, infos = envs.step(np.ones(3, np.int64))
            marks.extend([infos] if "intervention" in infos else [])
            return len(marks) == 3

        until(stepped)
        one.hold(None)

        def given_back() -> bool:
            """Step; return whether the agent acted in a frame of the lane."""
            infos = envs.step(np.ones(3, np.int64))[-1]
            return "intervention" not in infos and (fps is None or infos["frames"][1] > 0)

        until(given_back)
        one.die()
        envs.close()
    assert [infos["intervention"].tolist() for infos in marks] == [[False, True, False]] * 3
    assert [infos["intervened_by"][1] for infos in marks] == ["Dan"] * 3
    episodes = sorted(read_folder(tmp_path).episodes(), key=lambda one: one.stream.lane_number(one.lane))
    who = [set(episode.players) - {"default"} for episode in episodes]
    assert who == [{"agent:PPO"}, {"agent:PPO", "person:Dan"}, {"agent:PPO"}]
    chosen = Selection(intervention=True, complete=False).of(episodes)
    assert [episode.id for episode in chosen] == [episodes[1].id]
    data = load_episode(episodes[1], Paddle)
    taken = [by == "person:Dan" for by in data.by]
    assert sum(taken) == 3 if fps is None else any(taken)
    assert all(int(action) == -1 for action, by in zip(data.actions, data.by, strict=True) if by == "person:Dan")
    assert all(verify(episode, Paddle).ok for episode in episodes)
    if fps is None:  # as the page of the format says it
        _, rows = read_run(tmp_path)[1]
        assert {(row["lane"], row["by"]) for row in rows if row["kind"] == 0} == {
            (0, "agent:PPO"), (1, "agent:PPO"), (1, "person:Dan"), (2, "agent:PPO"),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"agent": "x"}, "unknown JoinWorld settings agent"),
        ({"lane": 0}, "unknown JoinWorld settings lane"),
        ({"name": 3}, "expected the setting name to be a text"),
        ({"frame": "jpeg"}, "unknown JoinWorld settings frame"),
    ],
)
def test_settings_that_are_none_are_refused(settings, said, person):
    with serve_gym(Paddle) as server:
        packed = {name: pack_tensor(value) for name, value in {"role": "takeover", **settings}.items()}
        error = person(server).ask(join_world=pb.JoinWorldRequest(settings=packed)).error
        assert (error.code, said in error.message) == (Code.INVALID_ARGUMENT, True), error.message


@pytest.mark.parametrize(
    ("serve", "env", "settings", "said"),
    [
        (serve_parallel, Paddles, {"agent": "nobody"}, "one of upper, lower, third"),
        (serve_parallel, Paddles, {}, "one of upper, lower, third"),
        (serve_gym, None, {"lane": 5}, "from 0 to 1"),
        (serve_gym, None, {"lane": "one"}, "to be an integer"),
    ],
)
def test_seats_that_there_are_not_are_refused(serve, env, settings, said, person):
    keywords = {"num_envs": 2} if env is None else {}
    with serve(env or (lambda: CountingEnv(5)), **keywords) as server:
        packed = {name: pack_tensor(value) for name, value in {"role": "takeover", **settings}.items()}
        error = person(server).ask(join_world=pb.JoinWorldRequest(settings=packed)).error
        assert (error.code, said in error.message) == (Code.INVALID_ARGUMENT, True), error.message


def test_two_do_not_take_over_from_the_same_agent_and_bad_actions_change_nothing(person):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one, two = person(server).sit(name="Ann"), person(server)
        packed = {"role": pack_tensor("takeover")}
        error = two.ask(join_world=pb.JoinWorldRequest(settings=packed)).error
        assert error.code == Code.RESOURCE_EXHAUSTED
        assert "'Ann' has the seat" in error.message
        answer = one.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(9))}))
        assert answer.error.code == Code.OUT_OF_RANGE or answer.error.code == Code.INVALID_ARGUMENT
        assert env.step(1)[0].tolist() == [102]
        env.close()


def sit_at(server, person, pace, **settings):
    one = person(server)
    one.join("", role="takeover", pace=pace, **settings)
    one.hold(None)
    return one


@contextlib.contextmanager
def repeating(one):
    """Have a person's page say every tenth of a second that no key is held: it is heard of."""
    over = threading.Event()

    def repeat():
        while not over.wait(0.1):
            one.hold(None)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def seconds_of(env, steps):
    began = time.monotonic()
    for _ in range(steps):
        env.step(0)
    return time.monotonic() - began


@everywhere
def test_a_world_keeps_to_the_pace_of_a_person_who_has_the_seat(person, isolation):
    with serve_gym(Paddle, isolation=isolation) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        own = world_of(server).env
        one = sit_at(server, person, 25.0)
        # A step that comes late is followed at once by the next: of ten, eight have waited.
        assert seconds_of(env, 10) >= 8 / 25
        one.die()
        until(lambda: world_of(server).env is own)
        env.step(0)
        env.close()


@everywhere
def test_a_trainer_is_told_the_pace_and_waits_longer_for_its_steps(person, isolation):
    with serve_gym(Paddle, isolation=isolation) as server:
        env = make_remote(f"{server.url}?world=", timeout=0.9)  # less than a step takes at that pace
        env.reset(seed=0)
        assert env.step(0)[4] == {}
        one = sit_at(server, person, 1.0)
        with contextlib.closing(env), repeating(one):
            assert [env.step(0)[4] for _ in range(3)] == [{"takeover_fps": 1.0}] * 3


@everywhere
def test_a_vector_is_told_the_pace_and_waits_longer_for_its_steps(person, isolation):
    with serve_gym(Paddle, num_envs=2, isolation=isolation) as server:
        remote = make_vec_remote([f"{server.url}?world="])
        envs = BlockingReset(remote, on_lost="continue", step_timeout=0.8)
        envs.reset(seed=0)
        one = sit_at(server, person, 1.0, lane=np.int64(1))
        with repeating(one):
            for _ in range(3):
                infos = envs.step(np.zeros(2, np.int64))[4]
                assert infos["takeover_fps"].tolist() == [1.0, 1.0]
                assert "error" not in infos
        envs.close()


def test_each_of_several_agents_is_told_the_pace(person):
    with serve_parallel(Paddles) as server:
        env = make_parallel_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = sit_at(server, person, 20.0, agent="upper")
        one.hold(1)
        infos = env.step(dict.fromkeys(env.agents, 0))[4]
        assert {agent: info["takeover_fps"] for agent, info in infos.items()} == dict.fromkeys(env.agents, 20.0)
        assert [agent for agent, info in infos.items() if "intervention" in info] == ["upper"]
        env.close()


def test_a_tap_between_two_steps_acts_in_one(person):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit()
        assert one.hold(-1) is True
        assert one.hold(None) is False
        assert [env.step(1)[0].tolist() for _ in range(3)] == [[98], [100], [102]]
        env.close()


def test_a_page_that_is_not_heard_of_slows_nobody_down(person, monkeypatch):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = sit_at(server, person, 1.0)
        let_holds_lapse(monkeypatch)
        for _ in range(1000):  # a quarter of an hour at the pace
            env.step(0)
        one.die()
        env.close()


def test_who_does_nothing_gives_the_seat_back_and_is_told(person):
    with serve_gym(Paddle, limits=Limits(takeover_timeout=0.2)) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = sit_at(server, person, 5.0, name="Ann")
        answers = []

        def given_back():
            answers.append(one.ask(step=pb.StepRequest(requested_observations=[1, 3])))
            return answers[-1].WhichOneof("payload") == "error"

        until(given_back)
        error = answers[-1].error
        assert error.code == Code.FAILED_PRECONDITION
        assert "takeover_timeout=0.2 s, so the agent acts again; join again" in error.message
        left = [float(unpack_tensor(answer.step.observations[3])) for answer in answers[:-1]]
        assert left == sorted(left, reverse=True)
        assert all(0 <= seconds <= 0.2 for seconds in left)
        other = person(server).sit(name="Bob")  # the seat is free
        assert other.hold(1) is True
        assert env.step(-1)[4]["intervened_by"] == "Bob"
        env.close()


def test_a_program_that_takes_over_is_not_timed(person):
    with serve_gym(Paddle, limits=Limits(takeover_timeout=0.001)) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit()
        env.step(0)
        answer = one.ask(step=pb.StepRequest(requested_observations=[3]))
        assert float(unpack_tensor(answer.step.observations[3])) == np.inf
        env.close()


@pytest.mark.parametrize("pace", [0.5, -1.0, float("nan"), float("inf"), True, "fast", [30.0]])
def test_a_pace_that_is_none_is_refused(person, pace):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset()
        one = person(server)
        answer = one.ask(
            join_world=pb.JoinWorldRequest(
                settings={"role": pack_tensor("takeover"), "pace": pack_tensor(np.asarray(pace))}
            )
        )
        assert answer.error.code == Code.INVALID_ARGUMENT
        assert "steps a second, 1 or more" in answer.error.message
        env.close()


def test_a_name_is_told_without_what_is_invisible(person):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit(name="An\u202en\x1b[31m\u200b")
        one.hold(-1)
        assert env.step(1)[4]["intervened_by"] == "Ann[31m"
        env.close()
