"""`bridge.core.worlds.lane_vector`: a world's lanes play as Gymnasium's SyncVectorEnv does."""

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers import vector as vector_wrappers

from bridge.core.worlds.lane_vector import LaneVectorEnv, with_lanes_of_ours
from bridge.testing import EVERY_SPACE, CountingEnv, SpaceEnv
from tests.core.worlds.lane_tools import MODES, Objectives, in_each_mode
from tests.support import SmallNumbers, assert_identical, sampled


def both(make, lanes=3, mode=AutoresetMode.NEXT_STEP, **keywords):
    """A SyncVectorEnv, and a LaneVectorEnv of the same environments."""
    makers = make if isinstance(make, list) else [make] * lanes
    theirs, mine = (SyncVectorEnv(makers, autoreset_mode=mode, **keywords) for _ in range(2))
    return theirs, with_lanes_of_ours(mine, None)


def order_of(value):
    """The keys of nested dicts, in their order."""
    if isinstance(value, dict):
        return [(key, order_of(part)) for key, part in value.items()]
    return [order_of(part) for part in value] if isinstance(value, (list, tuple)) else None


def same(mine, theirs):
    assert type(mine) is type(theirs)
    assert_identical(mine, theirs)
    assert order_of(mine) == order_of(theirs)


def drawn(space, lanes):
    samples = [space.sample() for _ in range(lanes)]
    return concatenate(space, samples, create_empty_array(space, lanes))


def play_both(theirs, mine, steps=25, seed=5, options=None):
    """Reset and step both; in the mode DISABLED those lanes are reset that ended, else some now and then."""
    lanes = theirs.num_envs
    same(mine.reset(seed=seed, options=options), theirs.reset(seed=seed, options=options))
    theirs.single_action_space.seed(1)
    ended = np.zeros(lanes, np.bool_)
    for step in range(steps):
        mask = ended if theirs.autoreset_mode is AutoresetMode.DISABLED else np.arange(lanes) == step % lanes
        if mask.any() and (theirs.autoreset_mode is AutoresetMode.DISABLED or step % 7 == 3):
            seeds = [None if step % 2 else step + lane for lane in range(lanes)]
            given = [{"level": step, "reset_mask": mask.copy()} for _ in range(2)]
            same(mine.reset(seed=seeds, options=given[0]), theirs.reset(seed=seeds, options=given[1]))
        actions = drawn(theirs.single_action_space, lanes)
        result = theirs.step(actions)
        same(mine.step(actions), result)
        ended = result[2] | result[3]
    mine.close()
    theirs.close()


# Gymnasium cannot batch the first ones, nor take batches of the others apart, which therefore are observations only.
UNBATCHED = {"dict_int_keys", "dict_int_and_text_keys"}


EMPTY = {"dict_empty", "tuple_empty", "tuple_of_empty_ones"}


BATCHED = [name for name in EVERY_SPACE if name not in UNBATCHED]


@pytest.mark.parametrize(
    ("mode", "name"), sampled([(mode, name) for mode in MODES for name in BATCHED], 25, slow=15), ids=str
)
def test_every_space_is_played_as_a_sync_vector_env_plays_it(mode, name):
    def make():
        action_space = spaces.Discrete(2) if name in EMPTY else EVERY_SPACE[name]()
        return SmallNumbers(SpaceEnv(EVERY_SPACE[name](), action_space, max_steps=6))

    theirs, mine = both(make, mode=mode)
    assert type(mine) is LaneVectorEnv
    play_both(theirs, mine)


@in_each_mode
@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no copy"])
def test_options_seeds_and_masks_are_those_of_a_sync_vector_env(mode, copied):
    theirs, mine = both(lambda: SmallNumbers(SpaceEnv(max_steps=4)), 5, mode, copy=copied)
    play_both(theirs, mine, options={"level": 3}, seed=[3, 0, 5, 2**40, 9])


def test_observations_of_different_bounds_are_batched():
    class Bounds(CountingEnv):
        def __init__(self, high):
            super().__init__()
            self.observation_space = spaces.Box(0, high, (2,), np.int64)

    theirs, mine = both([lambda: Bounds(9), lambda: Bounds(99)], observation_mode="different")
    assert mine.observation_space == theirs.observation_space
    play_both(theirs, mine)


class SharesArrays(gymnasium.Env):
    """All of them write each observation, info and reward into the same objects."""

    observation_space = spaces.Box(-99, 99, (3,), np.float64)
    action_space = spaces.Discrete(2)
    observation, info = np.zeros(3), {"part": np.zeros(2), "inner": {"step": np.zeros(())}, "number": 0}

    def _seen(self):
        self.observation[:] = self.np_random.random(3)
        self.info["part"][:] = self.np_random.random(2)
        self.info["inner"]["step"][...] = self.steps
        self.info["number"] = self.steps
        return self.observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), self.info

    def step(self, action):
        self.steps += 1
        return self._seen(), self.steps / 8, self.steps > 3, False, self.info


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_objects_that_environments_share_are_told_as_a_sync_vector_env_tells_them(mode):
    play_both(*both(SharesArrays, mode=mode))


class OwnArray(SharesArrays):
    """Each has an observation of its own, and writes the next one into it."""

    def __init__(self):
        self.observation, self.info = np.zeros(3), copy.deepcopy(SharesArrays.info)


def test_a_final_observation_is_not_the_first_one_of_the_next_episode():
    # Of SyncVectorEnv it is, where an environment writes both into one array.
    envs = with_lanes_of_ours(SyncVectorEnv([OwnArray], autoreset_mode=AutoresetMode.SAME_STEP), None)
    alone = OwnArray()
    alone.reset(seed=5)
    envs.reset(seed=5)
    for _ in range(4):
        last, *_, told = (np.copy(part) if isinstance(part, np.ndarray) else copy.deepcopy(part)
                          for part in alone.step(0))  # fmt: skip
        *_, infos = envs.step(np.zeros(1, np.int64))
    assert_identical(infos["final_obs"][0], last)
    assert infos["final_info"]["number"][0] == told["number"] == 4
    assert_identical(infos["final_info"]["part"][0], told["part"])
    envs.close()


class Global(CountingEnv):
    """Draws from a generator that all environments have in common, so that the order of their calls shows."""

    generator = np.random.default_rng(0)

    def reset(self, **keywords):
        self.length = int(self.generator.integers(1, 5))
        return super().reset(**keywords)[0] + self.generator.integers(9), {"drawn": self.generator.random()}

    def step(self, action):
        observation, *rest, _ = super().step(action)
        return observation + self.generator.integers(9), *rest, {"drawn": self.generator.random()}


@in_each_mode
def test_environments_are_called_in_the_order_in_which_a_sync_vector_env_calls_them(mode):
    found = []
    for envs in both(Global, mode=mode):
        Global.generator = np.random.default_rng(0)
        results = [envs.reset(seed=1)]
        for _ in range(20):
            results.append(envs.step(np.zeros(3, np.int64)))
            ended = results[-1][2] | results[-1][3]
            if mode is AutoresetMode.DISABLED and ended.any():
                results.append(envs.reset(options={"reset_mask": ended}))
        found.append(results)
        envs.close()
    same(found[1], found[0])


class Odd(CountingEnv):
    """Its rewards and flags are of other types than most."""

    rewards = (1, np.float32(0.1), True, np.array(2.5), np.array(3), np.float16(0.5), np.int64(7))
    flags = (0, np.bool_(False), np.array(False), 0.0, np.int8(0))

    def step(self, action):
        observation, *_ = super().step(action)
        number, over = self.steps, self.steps == self.length
        return observation, self.rewards[number % 7], 1 if over else self.flags[number % 5], self.flags[0], {}


@in_each_mode
def test_rewards_and_flags_of_other_types_are_read_as_a_sync_vector_env_reads_them(mode):
    play_both(*both(lambda: Odd(11), mode=mode))


class Drawn(gymnasium.Wrapper):
    """Draws its steps."""

    render_mode = "rgb_array"

    def render(self):
        return np.full((2, 2, 3), self.env.unwrapped.steps, np.uint8)


def test_it_answers_as_a_sync_vector_env_beyond_reset_and_step():
    theirs, mine = both(lambda: Drawn(CountingEnv()))
    for envs in (theirs, mine):
        envs.reset(seed=3)
        envs.step(np.zeros(3, np.int64))
        envs.set_attr("length", [2, 3, 4])
        envs.set_attr("level", 7)
    assert isinstance(mine, SyncVectorEnv)
    same(mine.render(), theirs.render())
    for name in ("length", "level", "steps", "np_random_seed"):
        assert mine.get_attr(name) == theirs.get_attr(name) == mine.call(name)
    assert mine.np_random_seed == (3, 4, 5)
    assert mine.metadata == theirs.metadata
    assert (mine.num_envs, mine.render_mode, mine.spec) == (theirs.num_envs, theirs.render_mode, theirs.spec)
    assert str(mine.single_action_space) == str(theirs.single_action_space)
    with pytest.raises(ValueError, match="length equal to the number of environments"):
        mine.set_attr("length", [1])
    with pytest.raises(AttributeError):
        mine.call("nothing")
    envs = mine.envs
    mine.close()
    assert all(env.unwrapped.closed for env in envs)
    theirs.close()


def test_array_rewards_are_batched_and_those_of_a_reset_are_zero():
    envs = with_lanes_of_ours(SyncVectorEnv([Objectives, lambda: Objectives(4)]), Objectives.reward_space)
    envs.reset()
    rewards = [envs.step(np.zeros(2, np.int64))[1] for _ in range(5)]
    assert {(reward.dtype, reward.shape) for reward in rewards} == {(np.dtype(np.float32), (2, 2))}
    assert [reward.tolist() for reward in rewards[2:]] == [
        [[3, -3], [3, -3]],
        [[0, 0], [4, -4]],
        [[1, -1], [0, 0]],
    ]
    envs.close()


@pytest.mark.parametrize(
    "wrap",
    [
        vector_wrappers.RecordEpisodeStatistics,
        vector_wrappers.NormalizeReward,
        vector_wrappers.FlattenObservation,
        lambda envs: vector_wrappers.RescaleObservation(vector_wrappers.DtypeObservation(envs, np.float32), -1, 1),
    ],
    ids=["statistics", "reward", "flattened", "two"],
)
def test_wrappers_around_the_lanes_stay_around_them(wrap):
    def make():
        space = spaces.Box(np.float32(-1), np.float32(1), (2, 2), np.float32)
        return wrap(SyncVectorEnv([lambda: SpaceEnv(space, max_steps=5, infos=False)] * 3))

    theirs, mine = make(), with_lanes_of_ours(make(), None)
    assert type(mine.unwrapped) is LaneVectorEnv
    same(mine.reset(seed=3), theirs.reset(seed=3))
    for _ in range(20):
        actions = theirs.action_space.sample()
        result, other = mine.step(actions), theirs.step(actions)
        for infos in (result[-1], other[-1]):
            infos.get("episode", {}).pop("t", None)  # the time that it took
        same(result, other)
    mine.close()
    theirs.close()


def test_a_subclass_of_sync_vector_env_is_left_as_it_is():
    class Own(SyncVectorEnv):
        pass

    envs = Own([CountingEnv])
    assert with_lanes_of_ours(envs, None) is envs
    envs.close()


def test_closing_closes_every_environment_and_raises_what_the_first_one_raised():
    class Stuck(CountingEnv):
        def close(self):
            super().close()
            raise OSError("the window is stuck")

    envs = with_lanes_of_ours(SyncVectorEnv([CountingEnv, Stuck, Stuck, CountingEnv]), None)
    with pytest.raises(OSError, match="the window is stuck"):
        envs.close()
    assert [env.closed for env in envs.envs] == [True] * 4
    envs.closed = True  # else it is closed once more when nobody refers to it


def test_lanes_that_are_reset_alone_leave_the_others_as_they_were_told():
    """As worlds of their own do, also where environments write what they see into one array."""
    envs = with_lanes_of_ours(SyncVectorEnv([SharesArrays] * 3), None)
    envs.reset_lanes([5, 6, 7], None)
    before = envs.step_lanes(np.zeros(3, np.int64))[0].copy()
    after, infos = envs.reset_lanes(None, None, np.array([False, True, False]))
    assert_identical(after[[0, 2]], before[[0, 2]])
    assert_identical(after[1], SharesArrays.observation)
    assert list(infos) == [1]
    envs.close()


def test_a_mask_before_the_first_reset_is_refused_where_the_other_lanes_have_no_observation():
    envs = with_lanes_of_ours(SyncVectorEnv([CountingEnv] * 3), None)
    with pytest.raises((TypeError, ValueError)):
        envs.reset_lanes(None, None, np.array([False, True, False]))
    envs.close()
