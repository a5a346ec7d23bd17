"""A person takes over from an agent, and gives back."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.worlds.watching import takeovers
from tests.peers import Stream
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
            assert info == {"intervention": True, "intervened_by": "Ann"}
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


def test_an_action_that_is_not_repeated_is_given_up(person, monkeypatch):
    with serve_gym(Paddle) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = person(server).sit()
        one.hold(-1)
        monkeypatch.setattr(takeovers, "HOLD", -1.0)
        assert env.step(1)[0].tolist() == [102]
        env.close()


def test_the_agent_of_a_real_time_world_is_taken_over_and_told(person):
    with serve_gym(Paddle, fps=100) as server:
        env = make_remote(f"{server.url}?world=", wait="next_frame")
        env.reset(seed=0)
        one = person(server).sit(name="Bob")
        one.hold(1)
        seen = [env.step(-1) for _ in range(20)]
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
        one.hold(1)
        seen = [(upper.step(-1), lower.step(-1)) for _ in range(30)][-1]
        assert seen[0][0] > 100 > seen[1][0]
        assert seen[0][4]["intervened_by"] == "Cyd"
        assert "intervention" not in seen[1][4]
        upper.close()
        lower.close()


def test_one_lane_of_a_world_of_lanes_is_taken_over(person):
    with serve_gym(Paddle, num_envs=3) as server:
        envs = make_vec_remote(f"{server.url}?world=")
        from bridge.wrappers import BlockingReset

        envs = BlockingReset(envs)
        envs.reset(seed=0)
        one = person(server).sit(lane=1, name="Dan")
        one.hold(-1)
        observations, *_, infos = envs.step(np.ones(3, np.int64))
        assert observations.reshape(-1).tolist() == [102, 98, 102]
        assert infos["intervention"].tolist() == [False, True, False]
        assert infos["intervened_by"][1] == "Dan"
        envs.close()


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
