"""dm_env's own test of environments, over `dm_env_rpc`'s adaptor: a served environment keeps dm_env's contract."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import numpy as np
import pytest
from absl.testing import absltest
from dm_env import test_utils
from dm_env_rpc.v1 import dm_env_adaptor
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.web.gateway import serve_gateway
from bridge.wrappers import BlockingReset
from tests.peers import PublicClient
from tests.support import until

EXTRA = {"info", "discount", "terminated", "truncated"}


class _Contract(test_utils.EnvironmentTestMixin):
    """All tests of `EnvironmentTestMixin`; the actions reach the end of an episode."""

    env_id = ""
    kwargs = None

    def setUp(self):
        self.server = serve_gym(self.env_id, env_kwargs=self.kwargs and dict(self.kwargs))
        self.addCleanup(self.server.stop)
        self.client = PublicClient(self.server)
        self.addCleanup(self.client.close)
        super().setUp()

    def make_object_under_test(self):
        return dm_env_adaptor.create_and_join_world(self.client.connection, {}, {})[0]

    def make_action_sequence(self):
        return itertools.repeat(self.make_action(), 30)


class TestCartPole(_Contract, absltest.TestCase):
    env_id = "CartPole-v1"


class TestPendulum(_Contract, absltest.TestCase):
    env_id = "Pendulum-v1"
    kwargs = MappingProxyType({"max_episode_steps": 12})


class TestMountainCarContinuous(_Contract, absltest.TestCase):
    env_id = "MountainCarContinuous-v0"
    kwargs = MappingProxyType({"max_episode_steps": 12})


def names_of(client):
    return set(client.observations)


def test_only_who_asks_for_them_gets_the_observations_of_gymnasium():
    with serve_gym("CartPole-v1") as server:
        for settings, extra in (({}, set()), ({"gymnasium": False}, set()), ({"gymnasium": True}, EXTRA)):
            client = PublicClient(server)
            assert names_of(client.join("", **settings)) == {"observation", "reward"} | extra
            client.send(public.LeaveWorldRequest())
            client.close()


def test_lanes_keep_their_flags_which_are_the_only_sign_of_an_end():
    with serve_gym("CartPole-v1", num_envs=2) as server:
        client = PublicClient(server)
        assert names_of(client.join("")) == {"observation", "reward", "discount", "terminated", "truncated"}
        client.close()


def test_a_hidden_observation_is_none_that_there_is():
    with serve_gym("CartPole-v1") as server:
        client = PublicClient(server).join("")
        client.observations["info"] = 6
        with pytest.raises(Exception, match="unknown observation UID 6"):
            client.step("info")
        client.close()


def test_a_setting_that_is_no_bool_is_refused():
    with serve_gym("CartPole-v1") as server:
        client = PublicClient(server)
        with pytest.raises(Exception, match="expected the setting gymnasium to be a bool"):
            client.join("", gymnasium="yes")
        client.close()


def test_a_gateway_tells_the_server_whose_client_it_is():
    with serve_gym("CartPole-v1") as server, serve_gateway([server.url]) as gateway:
        name = server.url.removeprefix("grpc://") + "/"
        client = PublicClient(gateway)
        assert names_of(client.join(name)) == {"observation", "reward"}
        client.send(public.LeaveWorldRequest())
        client.close()
        env = make_remote(f"{gateway.url}?world={name}")
        env.reset(seed=0)
        until(lambda: env.step(0)[2:4] == (True, False))
        env.close()


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_our_own_client_gets_all_of_them(transport):
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url, transport=transport)
        env.reset(seed=0)
        until(lambda: env.step(0)[2:4] == (True, False))
        env.close()
        envs = BlockingReset(make_vec_remote(server.url, num_envs=2))
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, np.int64))[2].dtype == np.bool_
        envs.close()
