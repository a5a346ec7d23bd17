"""Seeds: every one that Gymnasium takes locally works remotely, and gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding.seeds import pack_seed, unpack_seed, unpack_seeds
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.encoding.values import MAX_DIGITS
from bridge.errors import SeedError, TensorError
from bridge.recording.reader import read_folder
from bridge.wrappers import BlockingReset

SEEDS = [0, True, 7, 2**31, 2**63 - 1, 2**63, 2**64 + 5, 2**128 - 1, 10**200]


@pytest.fixture(scope="module")
def url() -> Any:
    with serve_gym("CartPole-v1") as server:
        yield server.url


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_any_size_gives_what_it_gives_locally(url: str, seed: int) -> None:
    local, remote = gymnasium.make("CartPole-v1"), make_remote(url)
    expected = local.reset(seed=seed)[0]
    np.testing.assert_array_equal(remote.reset(seed=seed)[0], expected)
    assert remote.get_wrapper_attr("np_random_seed") == local.np_random_seed
    assert remote.np_random_seed == local.np_random_seed
    local.close()
    remote.close()


@pytest.mark.parametrize("isolation", [None, "process"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("seed", [2**63 - 2, 2**90, [5, None, 2**70]], ids=["across 2**63", "large", "of each slot"])
def test_seeds_of_vectors_are_those_of_gymnasium(seed: Any, lanes: int, isolation: str | None) -> None:
    local = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    expected = local.reset(seed=seed)[0]
    with serve_gym("CartPole-v1", num_envs=lanes, isolation=isolation) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=3))
        found = envs.reset(seed=seed)[0]
        seeded = [True, seed is None or not isinstance(seed, list), True]
        np.testing.assert_array_equal(found[seeded], expected[seeded])
        envs.close()
    local.close()


def test_a_large_seed_works_in_real_time_and_in_a_recording(tmp_path: Path) -> None:
    with serve_gym("CartPole-v1", num_envs=2, record=tmp_path) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=2**80)
        for _ in range(3):
            envs.step(envs.action_space.sample())
        envs.close()
    episodes = read_folder(tmp_path).episodes()
    assert [episode.seed for episode in episodes] == [2**80, 2**80 + 1]
    with serve_gym("CartPole-v1", fps=100) as server:
        env = make_remote(server.url)
        expected = gymnasium.make("CartPole-v1").reset(seed=2**80)[0]
        np.testing.assert_array_equal(env.reset(seed=2**80)[0], expected)
        env.close()


def test_a_lane_outside_of_a_resets_mask_keeps_the_seed_that_it_has() -> None:
    found = []
    for beside in (None, 77):
        with serve_gym("CartPole-v1", num_envs=2) as server, serve_gym("CartPole-v1", num_envs=2) as other:
            envs = BlockingReset(make_vec_remote([server.url], spares=other.url))
            envs.reset(seed=[3, 4])
            envs.reset(seed=[9, beside], options={"reset_mask": np.array([True, False])})
            server.stop()
            while not envs.step(np.zeros(2, np.int64))[3].all():
                pass
            # In another world than the one that was seeded, episodes begin with seeds made of the user's.
            found.append(envs.step(np.zeros(2, np.int64))[0])
            envs.close()
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("seed", [-1, -(2**80), 1.5, "7"])
def test_what_is_no_seed_gets_the_error_that_it_gets_locally(url: str, seed: Any) -> None:
    with pytest.raises(gymnasium.error.Error) as local:
        gymnasium.make("CartPole-v1").reset(seed=seed)
    env = make_remote(url)
    with pytest.raises(gymnasium.error.Error) as remote:
        env.reset(seed=seed)
    assert str(remote.value) == str(local.value)
    assert isinstance(remote.value, errors.SettingError)
    env.close()


def test_a_seed_that_cannot_travel_is_refused_by_its_size(url: str) -> None:
    env = make_remote(url)
    with pytest.raises(SeedError, match="expected a seed of at most 4000 digits"):
        env.reset(seed=10**MAX_DIGITS)
    env.reset(seed=10**MAX_DIGITS - 1)
    env.close()


def test_seeds_of_64_bits_travel_as_the_integers_that_any_client_sends() -> None:
    assert pack_seed(7) == pack_tensor(7)
    assert pack_seed([1, None, 3]) == pack_tensor(np.array([1, -1, 3], np.int64))
    assert unpack_tensor(pack_seed(2**63))[()] == str(2**63)
    assert unpack_seeds(unpack_tensor(pack_seed([2**64, None])), 2) == [2**64, None]


@pytest.mark.parametrize("value", [-1, "-5", "1.5", "", "0x10", "²", "9" * (MAX_DIGITS + 1), [1, 2], 0.5])
def test_a_server_refuses_what_is_no_seed(value: Any) -> None:
    with pytest.raises(TensorError, match="non-negative integer scalar"):
        unpack_seed(unpack_tensor(pack_tensor(value)))
    with pytest.raises(TensorError, match="expected"):
        unpack_seeds(unpack_tensor(pack_tensor(value)), 3)
