"""Pictures as an observation, and spectators of worlds that wait for their agents."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Limits, Web, errors, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, Inspector
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.support import everywhere, until, world_of
from tests.web.viewers import Painted, shade


@pytest.fixture(autouse=True)
def no_picture_is_drawn_yet(monkeypatch):
    monkeypatch.setattr(Painted, "drawn", 0)


# Watching in lock-step


@everywhere
def test_a_spectator_sees_the_picture_of_each_step_while_somebody_looks(viewers, isolation):
    class Counted(Painted):
        drawn = 0  # its own: a world of another test may still draw

    with serve_gym(Counted, web=True, isolation=isolation) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        viewer = viewers(server).join()
        state, seen = viewer.look()
        assert (state, shade(seen["frame"])) == (pb.RUNNING, 0)
        for _ in range(100):
            env.step(1)
        viewer.wants("frame", "watch")
        for _ in range(100):
            env.step(1)
        _, seen = viewer.seen("frame", "watch")
        assert 90 <= shade(seen["frame"]) <= 200
        assert seen["watch"]["picture"] == 2
        assert seen["watch"]["viewers"] == 1
        assert 0 <= seen["watch"]["age"] < 20
        if isolation is None:
            assert Counted.drawn == 2
        env.close()


def test_without_viewers_nothing_is_drawn_and_the_environment_is_the_world_s_own(viewers):
    with serve_gym(Painted, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        world = world_of(server)
        own = world.env
        viewer = viewers(server).join()
        assert world.env is not own
        viewer.look()
        viewer.die()
        until(lambda: world.env is own)
        drawn = Painted.drawn
        for _ in range(100):
            env.step(1)
        assert Painted.drawn == drawn
        assert server.status()["viewers"] == 0
        env.close()


@pytest.mark.slow
def test_viewers_share_pictures_and_drawing_takes_its_share_of_the_time(viewers, monkeypatch):
    monkeypatch.setattr(Painted, "slow", 0.02)
    with serve_gym(Painted, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        several = [viewers(server).join() for _ in range(5)]
        for viewer in several:
            viewer.look()
        drawn, began = Painted.drawn, time.monotonic()
        stop = threading.Event()

        def step():
            while not stop.is_set():
                env.step(1)

        stepping = threading.Thread(target=step)
        stepping.start()
        for _ in range(4):
            for viewer in several:
                viewer.wants("frame", "watch")
            numbers = [viewer.seen("frame", "watch")[1]["watch"]["picture"] for viewer in several]
            assert max(numbers) - min(numbers) <= 1
        spent = time.monotonic() - began
        stop.set()
        stepping.join(20)
        assert (Painted.drawn - drawn) * 0.02 <= 0.07 * spent + 2 * 0.02
        env.close()


class Noisy(Painted):
    """Shows noise, which takes long to encode."""

    picture = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)

    def render(self):
        return self.picture


def test_the_encoding_of_all_views_counts_for_their_share_of_the_time(viewers):
    views = [lanes for count in (1, 2, 3) for lanes in itertools.permutations(range(3), count)]
    with serve_gym(Noisy, web=True, num_envs=3) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        envs.reset(seed=0)
        several = [viewers(server).join(lanes=np.array(lanes), frame="png") for lanes in views]
        for _ in range(2):
            for viewer in several:
                viewer.wants("watch", "frame")
            for viewer in several:
                viewer.take()
            envs.step(np.zeros(3, np.int64))
        # The pictures of one round take at least 0.2 s, which is 7 % of 3 s: a viewer does not wait so long.
        seen = []
        for _ in range(3):
            seen.append(several[0].look("frame")[1]["frame"])
            envs.step(np.zeros(3, np.int64))
        assert any(frame is None for frame in seen)
        envs.close()


@pytest.mark.slow
def test_pictures_take_more_of_the_time_while_the_world_waits_for_a_person(viewers, monkeypatch):
    monkeypatch.setattr(Painted, "slow", 0.2)  # else the next picture is due later than a viewer waits for it
    with serve_gym(Painted, web=True) as server, contextlib.ExitStack() as stack:
        env = make_remote(f"{server.url}?world=")
        stack.callback(env.close)
        env.reset(seed=0)
        seat = viewers(server)
        Stream.join(seat, role="takeover", pace=50.0)
        over = threading.Event()

        def sit():  # as a page does that is heard of
            while not over.is_set():
                seat.ask(step=pb.StepRequest())
                over.wait(0.1)

        sitting = threading.Thread(target=sit)
        sitting.start()
        stack.callback(sitting.join)
        stack.callback(over.set)
        until(lambda: "takeover_fps" in env.step(1)[4])
        viewer = viewers(server).join()
        viewer.look()
        for _ in range(3):
            steps = env.step(1)[0]
            _, seen = viewer.look()
            assert seen["frame"] is not None
            assert shade(seen["frame"]) == pytest.approx(int(steps[0]) % 256, abs=2)


def test_a_spectator_neither_acts_nor_delays_nor_keeps_a_world_alive(viewers):
    with serve_gym(Painted, web=True) as server:
        env = make_remote(server.url)  # a world of its own
        env.reset(seed=0)
        (name,) = [name for name in server.worlds if name]
        viewer = viewers(server).join(name)
        assert world_of(server, name).agents == 1
        viewer.wants("frame", "observation")  # and does not read
        other = viewers(server).join(name)
        assert other.refused(reset_world=pb.ResetWorldRequest(world_name="nothing")).code == Code.NOT_FOUND
        env.step(2)
        env.reset(seed=1)
        assert viewer.seen("frame", "observation")[0] == pb.RUNNING
        for action in (0, 1, 2):
            _, seen = other.look("observation", action=action)  # the first begins, the others are dropped
        assert seen["observation"].tolist() == [0]
        env.close()
        until(lambda: name not in server.worlds)
        viewer.wants("frame")
        assert viewer.take().error.code == Code.FAILED_PRECONDITION


def test_reset_world_does_not_wait_for_spectators(viewers):
    with serve_gym(Painted, web=True, limits=Limits(reset_world_timeout=20)) as server:
        player = Stream(server, own_connection=True).join()
        player.ask(step=pb.StepRequest())
        viewer = viewers(server).join()
        viewer.look()
        began = time.monotonic()
        answer = player.ask(reset_world=pb.ResetWorldRequest())
        assert answer.WhichOneof("payload") == "reset_world"
        assert time.monotonic() - began < 10
        player.close()


def test_our_own_client_looks_on_and_sees_what_the_player_sees():
    with serve_gym(lambda: CountingEnv(5)) as server:
        env = make_remote(f"{server.url}?world=")
        first, _ = env.reset(seed=3)
        seen = make_remote(f"{server.url}?world=", role="spectator", wait="now")
        observation, _ = seen.reset()
        assert np.array_equal(observation, first)
        rewards = 0.0
        for action in (1, 0, 1):
            observation, reward, *_ = env.step(action)
            rewards += reward
        looked, reward, terminated, truncated, _ = seen.step(0)
        assert np.array_equal(looked, observation)
        assert (reward, terminated, truncated) == (rewards, False, False)
        assert seen.step(0)[1] == 0.0
        while not (ended := env.step(1))[2]:
            pass
        env.reset(seed=4)  # the next episode begins before the spectator has heard of the end
        last = seen.step(0)
        assert np.array_equal(last[0], ended[0])
        assert last[2] is True
        observation, _ = seen.reset()
        assert env.step(1)[0].tolist() != observation.tolist()
        seen.close()
        env.close()


def test_a_spectator_waits_for_the_next_step_unless_told_otherwise():
    with serve_gym(lambda: CountingEnv(50)) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        seen = make_remote(f"{server.url}?world=", role="spectator")
        seen.reset()
        results = []
        looking = threading.Thread(target=lambda: results.append(seen.step(0)))
        looking.start()
        observation = env.step(1)[0]
        looking.join(20)
        assert np.array_equal(results[0][0], observation)
        seen.close()
        env.close()


def test_a_spectator_of_lanes_sees_all_of_them_and_chooses_which_are_drawn(viewers):
    with serve_gym(Painted, web=True, num_envs=6) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        envs.reset(seed=0)
        viewer = viewers(server).join(lanes=np.array([4, 1]))
        _, seen = viewer.look("frame", "observation", "reward")
        assert seen["observation"].shape == (6, 1)
        assert seen["frame"].shape[:2] == (200, 602)
        assert Painted.drawn == 2
        whole = viewers(server).join()
        assert whole.look()[1]["frame"].shape[:2] == (402, 904)
        envs.close()


def test_pictures_that_nobody_looks_at_any_more_are_not_kept(viewers):
    with serve_gym(Painted, web=True, num_envs=2) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        envs.reset(seed=0)
        viewers(server).join(lanes=np.array([0])).look()
        left = viewers(server).join(lanes=np.array([1]))
        assert shade(left.look()[1]["frame"]) < 3
        left.ask(leave_world=pb.LeaveWorldRequest())
        for _ in range(50):
            envs.step(np.zeros(2, np.int64))
        assert shade(viewers(server).join(lanes=np.array([1])).look()[1]["frame"]) == pytest.approx(50, abs=2)
        envs.close()


def test_the_world_s_failure_to_draw_is_told_to_the_viewer_alone(viewers):
    with serve_gym(Painted, env_kwargs={"render_mode": None}) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        viewer = viewers(server).join()
        error = viewer.refused(step=pb.StepRequest(requested_observations=[viewer.uids["frame"]]))
        assert error.code == Code.FAILED_PRECONDITION
        assert "render_mode='rgb_array'" in error.message
        env.step(1)
        env.close()


def test_of_a_world_that_has_not_begun_there_is_no_picture_yet(viewers):
    with serve_gym(Painted, web=True) as server:
        player = Stream(server, own_connection=True).join()
        viewer = viewers(server).join()
        viewer.wants("frame", "watch")
        player.ask(step=pb.StepRequest())
        state, seen = viewer.seen("frame", "watch")
        assert state == pb.RUNNING
        _, seen = viewer.look()
        _, seen = viewer.look()  # nothing has changed
        assert seen["frame"] is None
        player.close()


def test_a_player_in_lock_step_has_the_picture_of_its_own_step_whatever_it_takes(viewers, monkeypatch):
    monkeypatch.setattr(Painted, "slow", 0.01)
    with serve_gym(Painted, web=True) as server:
        player = viewers(server).join(role="player")
        for number in range(0, 200, 1):
            state, seen = player.look("frame", "observation", action=1 if number else None)
            assert abs(shade(seen["frame"]) - seen["observation"][0]) <= 2
            assert state == pb.RUNNING
            if number == 20:
                break
        assert Painted.drawn == 21


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"frame": "webp"}, "the setting frame to be one of jpeg, png"),
        ({"frame": "jpeg", "lanes": np.array([3])}, "different integers from 0 to 0"),
        ({"frame": "jpeg", "lanes": np.array([0, 0])}, "different integers"),
        ({"frame": "jpeg", "lanes": np.array([0.5])}, "different integers"),
        ({"lanes": np.array([0])}, "with frame=jpeg"),
        ({"role": "referee"}, "the setting role to be one of player, spectator"),
        ({"role": "spectator", "agent": "x"}, "unknown JoinWorld settings agent"),
        ({"role": "player", "wait": "now"}, "unknown JoinWorld settings wait"),
        ({"frame": "jpeg", "color": "red"}, "unknown JoinWorld settings color"),
    ],
)
def test_settings_that_are_none_are_refused(settings, said, viewers):
    with serve_gym(Painted, web=True) as server:
        packed = {name: pack_tensor(value) for name, value in settings.items()}
        error = viewers(server).refused(join_world=pb.JoinWorldRequest(settings=packed))
        assert error.code == Code.INVALID_ARGUMENT
        assert said in error.message
        make_remote(f"{server.url}?world=").close()  # and the world has its one seat still


@everywhere
def test_a_world_that_its_agent_has_left_is_seen_as_it_is(viewers, isolation):
    with serve_gym(Painted, web=True, isolation=isolation) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        for _ in range(50):
            env.step(1)
        env.close()
        viewer = viewers(server).join()
        state, seen = viewer.look("frame", "watch")
        assert (state, shade(seen["frame"])) == (pb.RUNNING, 50)
        # Who asks for what an agent sees waits until there is one, and has the pictures of its episode then.
        viewer.wants("frame", "observation")
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        state, seen = viewer.seen("frame", "observation")
        assert (state, seen["observation"].tolist()) == (pb.RUNNING, [0])
        env.step(1)
        until(lambda: viewer.look("observation")[1]["observation"].tolist() == [1])
        env.close()


def test_a_viewer_that_dies_while_it_waits_leaves_nothing_behind(viewers):
    with serve_gym(Painted, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        viewer = viewers(server).join()
        viewer.look()
        viewer.wants("frame", "watch")
        viewer.die()
        until(lambda: server.status()["viewers"] == 0)
        env.step(1)
        env.close()


def test_a_spectator_of_several_agents_in_lock_step_has_pictures_alone(viewers):
    class Drawn(Relay):
        def render(self):
            return np.full((20, 20, 3), 9, np.uint8)

    with serve_parallel(Drawn, web=True) as server:
        players = [Stream(server, own_connection=True).join(agent=name) for name in ("ann", "bob", "cyd")]
        for player in players:
            player.send(step=pb.StepRequest())
        for player in players:
            assert player.take().step.state == pb.RUNNING
        viewer = viewers(server).join()
        assert set(viewer.uids) == {"frame", "watch"}
        assert viewer.look()[1]["frame"][0, 0].tolist() == [9, 9, 9]
        for player in players:
            player.close()


def test_the_page_gets_json_where_a_return_is_no_number(viewers):
    class Lost(Relay):
        def render(self):
            return np.full((20, 20, 3), 9, np.uint8)

        def step(self, actions):
            observations, _, _, _, infos = super().step(actions)
            self.agents, over = [], (dict.fromkeys(actions, True), dict.fromkeys(actions, False))
            return observations, dict.fromkeys(actions, -np.inf), *over, infos

    with serve_parallel(Lost, web=True) as server:
        viewer = viewers(server).join()
        env = make_parallel_remote(f"{server.url}?world=", timeout=20)
        env.reset(seed=1)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        (world,) = json.loads(viewer.read_property("server.web"), parse_constant=pytest.fail)["worlds"]
        env.close()
        assert world["returns"] == {agent: [None, None] for agent in ("ann", "bob", "cyd")}


# In real time


def test_a_player_and_spectators_in_real_time_get_pictures(viewers):
    with serve_gym(Painted, web=True, fps=50) as server:
        player = viewers(server).join(role="player")
        player.look("frame", "watch")
        viewer = viewers(server).join()
        shades = []
        for _ in range(5):
            _, seen = viewer.look()
            shades.append(shade(seen["frame"]))
            _, mine = player.look("frame", "watch", "timing", action=1)
        assert shades == sorted(shades)
        assert shades[-1] > shades[0]
        assert mine["watch"]["steps"] > 0


def test_a_spectator_keeps_no_world_of_real_time_alive_either(viewers):
    with serve_gym(Painted, web=True, fps=30) as server:
        env = make_remote(server.url)
        env.reset()
        (name,) = [name for name in server.worlds if name]
        viewer = viewers(server).join(name)
        viewer.look()
        env.close()
        until(lambda: name not in server.worlds)
    with serve_gym(Painted, web=True, fps=30, limits=Limits(idle_timeout=0.5)) as server:
        viewer = viewers(server).join()
        until(lambda: server.worlds == [])


def test_the_end_of_an_episode_and_a_reset_world_are_told_with_pictures_too(viewers):
    with serve_gym(lambda **kw: Painted(length=10, **kw), fps=200, env_kwargs={"render_mode": "rgb_array"}) as server:
        player = viewers(server).join(role="player", gymnasium=True)
        states = [player.look("frame", "terminated", action=1)[0] for _ in range(60)]
        assert pb.TERMINATED in states
        assert all(one == pb.RUNNING or two == pb.RUNNING for one, two in itertools.pairwise(states))
        viewer = viewers(server).join()
        viewer.look("frame")
        answer = player.ask(reset_world=pb.ResetWorldRequest())
        assert answer.WhichOneof("payload") == "reset_world"  # it did not wait for the spectator
        until(lambda: player.look("frame", action=1)[0] == pb.RUNNING)


# Keys, and what the page is told


@everywhere
def test_the_page_is_told_the_worlds_and_the_keys(viewers, isolation):
    def text(stream, key):
        return json.loads(stream.read_property(key))

    with serve_gym(Painted, web=True, fps=30, isolation=isolation) as server:
        viewer = viewers(server)
        assert text(viewer, "server.web")["worlds"] == []
        player = viewers(server).join(role="player")
        found = text(viewer, "server.web")
        assert (found["realtime"], found["fps"]) == (True, 30)
        (world,) = found["worlds"]
        assert (world["name"], world["seats"], world["fps"], world["lanes"]) == ("", {"agent": True}, 30, None)
        assert text(player, "world.controls")["n"] == 3


@everywhere
def test_the_page_is_told_how_many_lanes_a_world_has(isolation):
    with serve_gym("CartPole-v1", num_envs=3, web=True, isolation=isolation) as server:
        env = make_vec_remote(f"{server.url}?world=", num_envs=3)
        with Inspector(server.url, 20.0) as inspector:
            found = json.loads(unpack_tensor(inspector.read_property("server.web"))[()])
        assert [world["lanes"] for world in found["worlds"]] == [3]
        env.close()


def test_a_server_without_a_page_tells_nobody_of_the_worlds_that_others_made_for_themselves():
    with serve_gym(Painted) as server, Inspector(server.url, 20.0) as inspector:
        own, everybody_s = make_remote(server.url), make_remote(f"{server.url}?world=")
        assert len(server.worlds) == 2
        found = json.loads(unpack_tensor(inspector.read_property("server.web"))[()])
        assert [world["name"] for world in found["worlds"]] == [""]
        own.close()
        everybody_s.close()


def test_a_server_with_a_page_has_its_url_and_files():
    with serve_gym(Painted, web=True) as server:
        assert server.web_url == f"http://127.0.0.1:{server.port}/"
    with serve_gym(Painted) as server:
        assert server.web_url is None
    with pytest.warns(RuntimeWarning):
        server = serve_gym(Painted, web=True, host="0.0.0.0")
    with server:
        assert "/#token=" in server.web_url
    with pytest.raises(errors.SettingError):
        serve_gym(Painted, web=Web(hosts=":"))


class Disturbed(Painted):
    """Draws at once, but for every second picture, in whose middle other programs run."""

    def render(self):
        type(self).slow = 0.25 if self.drawn % 2 else 0.0
        return super().render()


def test_a_picture_that_others_have_disturbed_delays_no_later_ones(viewers):
    with serve_gym(Disturbed, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        viewer = viewers(server).join()
        for _ in range(4):
            # The disturbed ones took 0.25 s, which is 7 % of 3.6 s: a viewer does not wait so long.
            assert viewer.look("frame")[1]["frame"] is not None
            env.step(0)
        env.close()


class Motor(CountingEnv):
    """Remembers the actions of its steps."""

    def __init__(self):
        super().__init__(10**9, action_space=spaces.Box(-1, 1, (1,), np.float32))
        self.actions = []

    def step(self, action):
        self.actions.append(float(action[0]))
        return super().step(0)


@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
def test_a_motor_gets_the_default_action_before_its_world_rests(dies):
    """The clock of a server with a page stands while nobody is there: not with the last action of a client."""
    motor = Motor()
    with serve_gym(lambda: motor, web=True, fps=50) as server:
        if dies:
            program = (
                "import os, sys, numpy as np, bridge\n"
                "env = bridge.make_remote(sys.argv[1])\n"
                "env.reset()\n"
                "while env.step(np.full(1, 0.5, np.float32))[0][1] < 5: pass\n"
                "os._exit(1)"
            )
            subprocess.run([sys.executable, "-c", program, f"{server.url}?world="], check=False, timeout=60)
        else:
            env = make_remote(f"{server.url}?world=")
            env.reset()
            while env.step(np.full(1, 0.5, np.float32))[0][1] < 5:
                pass
            env.close()
        until(lambda: 0.5 in motor.actions and motor.actions[-1] == 0.0)
