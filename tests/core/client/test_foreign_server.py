"""Our client on a server that is not ours: on the public `dm-env-rpc` messages, without our properties (D-24)."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import SpaceEnv
from bridge.wrappers import BlockingReset
from tests.public_server import PublicServer


def test_nested_specs_become_dict_spaces_and_ranges_become_boxes_and_discretes() -> None:
    """D-24, D-20: bounds come out inclusive, per element where they were given so."""
    with PublicServer(kind="full", properties=False) as server:
        remote = make_remote(server.url)
        assert remote.server_version is None
        action_space, observation_space = remote.action_space, remote.observation_space
        assert isinstance(action_space, spaces.Dict)
        assert isinstance(observation_space, spaces.Dict)
        assert action_space["move"] == spaces.Discrete(4, dtype=np.int32)
        arm = action_space["arm"]
        assert isinstance(arm, spaces.Dict)
        assert arm["torque"].low.tolist() == [-1, -2, -3]
        assert arm["torque"].high.tolist() == [1, 2, 3]
        assert isinstance(action_space["say"], spaces.Text)
        camera = observation_space["camera"]
        assert camera["rgb"] == spaces.Box(0, 255, (4, 3, 3), np.uint8)
        assert list(camera["pose"].spaces) == ["angles"]
        assert isinstance(observation_space["events"], spaces.Sequence)
        assert observation_space["danger"] == spaces.Box(0, 1, (), np.bool_)
        assert observation_space["temperature"] == spaces.Box(-100, 100, (), np.int8)
        assert "reward" not in observation_space.spaces
        assert server.requests["extension"] == 0  # it may not bear what it does not know
        remote.close()


@pytest.mark.parametrize("create", [True, False])
def test_nested_observations_and_actions_are_played_through_whole_episodes(create: bool) -> None:
    """D-4, D-13: where no world can be created, the default one is joined."""
    with PublicServer(kind="full", create=create, properties=False) as server:
        remote = make_remote(server.url)
        remote.action_space.seed(3)
        ends = []
        for _ in range(4):
            observation, info = remote.reset()
            assert remote.observation_space.contains(observation)
            assert info == {}
            over = False
            while not over:
                observation, reward, terminated, truncated, _ = remote.step(remote.action_space.sample())
                assert remote.observation_space.contains(observation)
                assert isinstance(reward, float)
                over = terminated or truncated
            ends.append((terminated, truncated))
        # Its odd sequences terminate and its even ones are interrupted.
        assert ends == [(True, False), (False, True)] * 2
        remote.close()


def test_a_server_without_reward_gives_zero_and_says_so_once() -> None:
    with PublicServer(kind="bare", properties=False) as server:
        with pytest.warns(RuntimeWarning, match="no observation named reward: every reward is 0.0"):
            remote = make_remote(server.url)
        remote.reset()
        assert remote.step({"move": 1})[1] == 0.0
        remote.close()


def test_foreign_remotes_and_ours_make_one_vector() -> None:
    observation, action = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(4)
    with (
        PublicServer(kind="discrete", properties=False) as theirs,
        serve_gym(lambda: SpaceEnv(observation, action, infos=False), num_envs=2) as ours,
    ):
        envs = BlockingReset(make_vec_remote([theirs.url, ours.url, theirs.url]))
        batch, _ = envs.reset(seed=[None, 1, 2, None])
        assert batch.shape == (4, 4)
        assert batch.dtype == np.float32
        ended = np.zeros(4, np.int64)
        for _ in range(40):
            batch, _, terminations, truncations, _ = envs.step(np.array([0, 1, 2, 3]))
            assert batch.shape == (4, 4)
            ended += terminations | truncations
        assert (ended >= 2).all()
        envs.close()


def test_what_a_foreign_server_refuses_is_told_in_its_own_words() -> None:
    with PublicServer(kind="discrete", properties=False) as server:
        remote = make_remote(server.url)
        remote.reset()
        with pytest.raises(errors.RefusedError) as caught:
            remote.call("gravity")
        assert caught.value.code == errors.Code.UNIMPLEMENTED
        remote.step(0)
        with pytest.raises(errors.RefusedError):
            remote.reset(seed=5)  # it knows no such setting
        remote.reset()
        assert server.opened == 1, "the connection goes on (D-2)"
        remote.close()


def play(url: str, timeout: float = 20.0) -> None:
    """Connect, and step through a few episodes."""
    remote = make_remote(url, timeout=timeout)
    try:
        for _ in range(3):
            remote.reset()
            remote.step(remote.action_space.sample())
    finally:
        remote.close()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no_dtype", "full"),
        ("odd_dtype", "full"),
        ("duplicate_names", "full"),
        ("parent_has_value", "full"),
        ("ragged", "full"),
        ("other_dtype", "full"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_named(fault: str, kind: str) -> None:
    """D-7."""
    with PublicServer([fault], kind=kind, properties=False) as server:
        with pytest.raises(errors.PeerError) as caught:
            play(server.url)
        assert caught.value.url == server.url


@pytest.mark.parametrize("fault", ["two_answers", "empty_request_ends_stream", "error_ends_stream", "lawful_refused"])
def test_a_server_with_a_fault_never_makes_the_client_hang(fault: str) -> None:
    with PublicServer([fault], kind="vector", properties=False) as server, contextlib.suppress(errors.BridgeError):
        play(server.url, timeout=3.0)


class ByPeer(PublicServer):
    """Keeps state by the address that a stream comes from, as remote-gym does; a second stream ends in an error."""

    def __init__(self, **keywords):
        self.peers = []
        super().__init__(**keywords)

    def Process(self, request_iterator, context):  # noqa: N802 - the service's name
        peer = context.peer()
        if peer in self.peers:
            raise KeyError(peer)
        self.peers.append(peer)
        yield from super().Process(request_iterator, context)


def test_a_server_that_keeps_state_by_its_peers_address_gets_a_connection_for_each_slot() -> None:
    with ByPeer(kind="discrete", properties=False) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=5))
        envs.reset()
        envs.step(np.zeros(5, np.int64))
        assert len(set(server.peers)) == 5
        envs.close()


def test_slots_on_a_server_of_ours_share_a_connection() -> None:
    with serve_gym("CartPole-v1") as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=5))
        assert len(established(server.port)) == 1
        envs.close()


def established(port: int) -> list[Any]:
    """The connections of this process to a port."""
    found = psutil.Process().net_connections("tcp")
    return [each for each in found if each.status == "ESTABLISHED" and each.raddr and each.raddr.port == port]
