"""Remote equals local, bit for bit: spaces, observations, rewards, both flags and infos."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.testing import EVERY_SPACE, CountingEnv, SpaceEnv
from bridge.wrappers import BlockingReset
from tests.side_by_side import ZOO, compare_many, compare_one, made, step_together
from tests.support import (
    NO_BOX2D,
    SmallNumbers,
    assert_identical,
    chosen,
    import_box2d,
    sampled,
)

# (slots, lanes of each world)
SHAPES = [(1, 1), (3, 1), (8, 1), (8, 4), (8, 8)]


pytestmark = [
    pytest.mark.usefixtures("in_tmp_path"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("name", sampled(ZOO, 3))
@pytest.mark.slow
def test_one_remote_environment_equals_the_local_one(name: str) -> None:
    function, steps, _ = ZOO[name]
    compare_one(function, steps)


@pytest.mark.parametrize(("name", "shape"), sampled(itertools.product(ZOO, SHAPES), 28, 1, slow=14))
def test_slots_equal_the_environments_of_sync_vector_env(name: str, shape: tuple[int, int]) -> None:
    function, _, steps = ZOO[name]
    compare_many(function, *shape, steps)


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 2, slow=True))
def test_every_space_arrives_exactly_as_that_of_observations_and_actions(name: str) -> None:
    # The reward and an info hold a digest of the action with its dtypes and shapes.
    compare_one(lambda: SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[name]()), 20)


@pytest.mark.parametrize("name", chosen(EVERY_SPACE, lambda name: name == "mixed"))
def test_every_observation_space_arrives_exactly(name: str) -> None:
    compare_one(lambda: SpaceEnv(EVERY_SPACE[name]()), 60)


@pytest.mark.parametrize("name", chosen(EVERY_SPACE, lambda name: name == "mixed"))
def test_every_action_space_arrives_exactly(name: str) -> None:
    # The reward and an info hold a digest of the action with its dtypes and shapes.
    compare_one(lambda: SpaceEnv(None, EVERY_SPACE[name]()), 60)


@pytest.mark.parametrize("lanes", sampled([1, 3], 2, 1, slow=True))
@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 6))
def test_every_space_arrives_exactly_in_slots_and_lanes(name: str, lanes: int) -> None:
    # Gymnasium's own vector environments cannot step over an action space without elements.
    actions = None if name in ("dict_empty", "tuple_empty", "tuple_of_empty_ones") else EVERY_SPACE[name]()
    compare_many(lambda: SmallNumbers(SpaceEnv(EVERY_SPACE[name](), actions)), 3, lanes, 40)


def test_worlds_of_one_and_of_several_lanes_mix_in_one_vector() -> None:
    function = ZOO["Taxi"][0]
    local = SyncVectorEnv([function] * 6)
    with serve_gym(function, num_envs=3) as many, serve_gym(function) as one:
        remote = BlockingReset(make_vec_remote([one.url, many.url, one.url, one.url]))
        step_together(remote, local, 400, seed=3)
        remote.close()
    local.close()


@pytest.mark.slow
@pytest.mark.skipif(not import_box2d(), reason=NO_BOX2D)
def test_three_drawn_worlds_on_one_server_keep_their_own_pixels() -> None:
    """pygame is not thread-safe: without one lock around all environment calls most frames were wrong."""
    function = made("CarRacing-v3")
    local = SyncVectorEnv([function] * 3)
    with serve_gym(function) as server:
        remote = BlockingReset(make_vec_remote(server.url, num_envs=3))
        step_together(remote, local, 40, seed=4)
        remote.close()
    local.close()


@pytest.mark.parametrize("name", ["CartPole", "Taxi", "Pendulum"])
def test_a_reset_mask_begins_the_masked_slots_and_leaves_the_others(name: str) -> None:
    function = ZOO[name][0]
    local = SyncVectorEnv([function] * 4)
    with serve_gym(function, num_envs=2) as lanes, serve_gym(function) as one:
        remote = BlockingReset(make_vec_remote([lanes.url, one.url, one.url]))
        local.action_space.seed(3)
        assert_identical(remote.reset(seed=1), local.reset(seed=1), "reset")
        for step in range(60):
            actions = local.action_space.sample()
            assert_identical(remote.step(actions), local.step(actions), f"step {step}")
            if step % 7 == 3:
                mask = np.array([True, False, False, True]) if step % 2 else np.array([False, True, True, False])
                mine = remote.reset(seed=step, options={"reset_mask": mask.copy()})
                assert_identical(mine, local.reset(seed=step, options={"reset_mask": mask.copy()}), f"mask {step}")
        remote.close()
    local.close()


def test_an_explicit_reset_right_after_an_episodes_end_resets_the_environment_once() -> None:
    # An eager reset would draw from the environment's generator twice.
    function = made("CartPole-v1")
    local = SyncVectorEnv([function] * 2)
    with serve_gym(function) as server:
        remote = BlockingReset(make_vec_remote(server.url, num_envs=2))
        assert_identical(remote.reset(seed=8), local.reset(seed=8), "reset")
        for _ in range(5):
            over = False
            while not over:
                actions = np.zeros(2, np.int64)
                mine, theirs = remote.step(actions), local.step(actions)
                assert_identical(mine, theirs, "step")
                over = bool(theirs[2].any())
            assert_identical(remote.reset(), local.reset(), "reset")
        remote.close()
    local.close()


def test_reset_options_arrive() -> None:
    local = gymnasium.make("CartPole-v1")
    with serve_gym("CartPole-v1") as server:
        remote = make_remote(server.url)
        options = {"low": -0.01, "high": 0.02}
        assert_identical(remote.reset(seed=1, options=dict(options)), local.reset(seed=1, options=dict(options)))
        remote.close()
    local.close()


def test_what_the_user_gets_is_theirs() -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server, serve_gym("CartPole-v1") as single:
        for urls in ([server.url], [single.url, single.url]):
            envs = BlockingReset(make_vec_remote(urls))
            kept: list[tuple[Any, Any]] = []
            observation, _ = envs.reset(seed=1)
            for _ in range(20):
                kept.append((observation, observation.copy()))
                observation, rewards, terminations, truncations, _ = envs.step(np.zeros(2, np.int64))
                for array in (observation, rewards, terminations, truncations):
                    assert array.flags.writeable
                assert rewards.dtype == np.float64
            for array, copy in kept:
                assert_identical(array, copy)  # no later step wrote into it
            assert not any(np.shares_memory(kept[0][0], array) for array, _ in kept[1:])
            envs.close()


@pytest.mark.parametrize("truncates", [False, True])
def test_an_episode_ends_at_the_client_as_it_ended(truncates: bool) -> None:
    """D-13: by termination or by truncation, of one environment, of several, of lanes and of one slot."""
    ends = [(False, False)] * 2 + [(not truncates, truncates)]
    function = lambda: CountingEnv(3, truncates=truncates)  # noqa: E731
    with serve_gym(function) as single, serve_gym(function, num_envs=2) as lanes:
        remote = make_remote(single.url)
        remote.reset()
        assert [remote.step(0)[2:4] for _ in range(3)] == ends
        remote.close()
        for urls in ([single.url, single.url], [lanes.url], [single.url]):  # one slot is read in another way
            envs = BlockingReset(make_vec_remote(urls))
            envs.reset()
            seen = [envs.step(np.zeros(envs.num_envs, np.int64))[2:4] for _ in range(3)]
            for slot in range(envs.num_envs):
                assert [(bool(t[slot]), bool(u[slot])) for t, u in seen] == ends
            envs.close()


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "Taxi", "Blackjack", "FrozenLake", "Hopper", "MiniGrid"])
def test_gymnasiums_own_checker_passes_on_a_remote_environment(name: str) -> None:
    with serve_gym(ZOO[name][0]) as server:
        remote = make_remote(server.url)
        check_env(remote, skip_render_check=name in ("Hopper", "MiniGrid"))
        remote.close()


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 3, 2))
def test_gymnasiums_own_checker_passes_over_every_space(name: str) -> None:
    local = SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[name](), min_steps=5)
    try:
        check_env(local)
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        pytest.skip(f"the checker does not take this space locally either: {error!r:.80}")
    with serve_gym(lambda: SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[name](), min_steps=5)) as server:
        remote = make_remote(server.url)
        check_env(remote)
        remote.close()


def test_an_environment_may_change_the_action_that_it_is_given() -> None:
    class Taking(CountingEnv):
        def __init__(self) -> None:
            super().__init__(50)
            self.action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2), b=gymnasium.spaces.Discrete(3))

        def step(self, action: Any) -> Any:
            return (*super().step(action.pop("a"))[:4], {"b": action.pop("b")})

    with serve_gym(Taking) as server:
        remote = make_remote(server.url)
        remote.reset()
        for _ in range(4):
            assert remote.step({"a": 1, "b": 2})[4] == {"b": 2}
        remote.close()
