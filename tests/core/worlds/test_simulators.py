"""Batched simulators as worlds of lanes, whatever their classes, beside the same simulator stepped without a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.core.worlds.simulators_beside import play_beside
from tests.simulators import DuckLanes, IsaacDouble, ManiSkillDouble
from tests.support import assert_identical

DOUBLES = [IsaacDouble, ManiSkillDouble, DuckLanes]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")
@pytest.mark.parametrize("isolation", [None, "process"])
@pytest.mark.parametrize("make", DOUBLES)
def test_a_simulator_plays_as_it_does_without_a_server(make: Any, isolation: str | None) -> None:
    with serve_gym(make, isolation=isolation) as server:
        assert play_beside(server, make()) > 20


def test_lanes_that_gymnasium_resets_in_the_same_step_are_served_so() -> None:
    def make() -> SyncVectorEnv:
        return SyncVectorEnv([lambda: CountingEnv(3)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    local = make()
    with serve_gym(make) as server:
        envs = BlockingReset(make_vec_remote(server.url), autoreset_mode=AutoresetMode.SAME_STEP)
        assert_identical(envs.reset(seed=1)[0], local.reset(seed=1)[0])
        for _ in range(20):
            actions = np.zeros(2, np.int64)
            *result, infos = envs.step(actions)
            *expected, expected_infos = local.step(actions)
            assert_identical(result, expected)
            assert_identical(infos, expected_infos)
        envs.close()
    local.close()


def test_the_plain_vector_gives_the_new_episode_with_the_flags_of_the_old_one() -> None:
    local = ManiSkillDouble()
    with serve_gym(ManiSkillDouble) as server:
        envs = make_vec_remote(server.url)
        observations = envs.reset(seed=5)[0]
        actions, ended = np.zeros((4, 3), np.float32), np.zeros(4, np.bool_)
        while observations[0] is None:  # the lanes reset
            observations = envs.step(actions)[0]
        local.reset(seed=5)
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        while not ended.any():
            observations, _, terminated, truncated, infos = envs.step(actions)
            expected = local.step(actions)
            ended = terminated | truncated
        lane = int(np.flatnonzero(ended)[0])
        assert_identical(observations[lane], expected[0][lane])
        assert_identical(infos["final_obs"][lane], expected[4]["final_observation"][lane])
        assert not np.array_equal(observations[lane], infos["final_obs"][lane])
        envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_another_mode_is_refused_by_name(mode: AutoresetMode) -> None:
    with serve_gym(IsaacDouble) as server:
        envs = make_vec_remote(server.url)
        with pytest.raises(errors.SettingError, match=f"autoreset_mode={mode.name}.*in the same step.*SAME_STEP"):
            BlockingReset(envs, autoreset_mode=mode)
        envs.close()


def test_a_simulator_without_final_observations_says_so_once() -> None:
    with serve_gym(IsaacDouble) as server, pytest.warns(RuntimeWarning) as caught:
        assert play_beside(server, IsaacDouble(), steps=60) > 5
    (told,) = [str(warning.message) for warning in caught]
    assert "IsaacDouble resets a lane in the step that ends it, and gives no final observation (final_obs" in told


class CallableLanes(DuckLanes):
    """A simulator with attributes and methods of its own, some of which have an item a lane, and a picture of all."""

    render_mode = "rgb_array"

    def __init__(self) -> None:
        super().__init__()
        self.heights = [1.0, 2.0, 3.0, 4.0]
        self.label = "four"  # as long as there are lanes, but no batch
        self.closed = False

    def gravity(self, scale: float = 1.0) -> float:
        return 9.5 * scale

    def seeds(self) -> Any:
        return np.arange(4)

    def render(self) -> Any:
        return np.full((2, 3, 3), 7, np.uint8)


class Logs(IsaacDouble):
    """As Isaac Lab, whose infos hold a log of all lanes beside what has a row for each."""

    def step(self, action: Any) -> Any:
        *told, extras = super().step(action)
        return *told, {**extras, "log": {"return": 0.5, "curve": [1, 2]}, "level": np.int64(3)}


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")
def test_what_a_simulator_logs_is_of_each_of_its_lanes() -> None:
    with serve_gym(lambda: Logs(2)) as one, serve_gym(lambda: IsaacDouble(2)) as other:
        envs = BlockingReset(make_vec_remote([one.url, other.url]), autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset(seed=0)
        infos = envs.step(envs.action_space.sample())[4]
        assert infos["log"]["return"].tolist() == [0.5, 0.5, None, None]
        assert infos["log"]["curve"].tolist() == [[1, 2], [1, 2], None, None]
        assert infos["level"].tolist() == [3, 3, None, None]
        assert infos["_level"].tolist() == infos["_log"].tolist() == [True, True, False, False]
        assert infos["_time_outs"].all()
        envs.close()
        plain_envs = make_vec_remote(one.url)
        plain_envs.reset()
        while (own := plain_envs.step(plain_envs.action_space.sample())[4]["n"])[1].get("level") != 3:
            pass
        assert own[0]["log"] == own[1]["log"] == {"return": 0.5, "curve": [1, 2]}
        plain_envs.close()


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_simulator_is_asked_for_all_lanes_at_once(isolation: str | None) -> None:
    """A value with an item for each lane is a batch; a number or a text is every lane's."""
    with serve_gym(CallableLanes, isolation=isolation) as server:
        envs = make_vec_remote(server.url)
        assert envs.get_attr("heights") == (1.0, 2.0, 3.0, 4.0)
        assert envs.get_attr("label") == ("four",) * 4
        assert envs.call("gravity", 2.0) == (19.0,) * 4
        assert [int(seed) for seed in envs.call("seeds")] == [0, 1, 2, 3]
        with pytest.raises(AttributeError, match="'CallableLanes' object has no attribute 'mass'"):
            envs.get_attr("mass")
        envs.close()


def test_a_picture_of_all_lanes_is_each_lanes() -> None:
    with serve_gym(CallableLanes) as server:
        envs = make_vec_remote(server.url)
        envs.reset(seed=1)
        frames = envs.render()
        assert frames is not None
        assert_identical(list(frames), [np.full((2, 3, 3), 7, np.uint8)] * 4)
        envs.close()


class DuckEnv:
    """One environment of no class of Gymnasium."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-10, 10, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.metadata: dict[str, Any] = {"render_modes": []}
        self.total = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.total = seed or 0
        return np.array([self.total], np.float32), {"seed": seed}

    def step(self, action: Any) -> Any:
        self.total += int(action)
        return np.array([self.total], np.float32), float(action), self.total > 8, False, {}


def test_one_environment_of_no_class_of_gymnasium_is_served() -> None:
    with serve_gym(DuckEnv) as server, make_remote(server.url) as env:
        local = DuckEnv()
        assert_identical(env.reset(seed=2), local.reset(seed=2))
        for _ in range(4):
            assert_identical(env.step(1), local.step(1))
        assert env.get_wrapper_attr("total") == 6


def test_what_an_object_lacks_is_listed() -> None:
    class Half:
        num_envs = 3
        single_observation_space = spaces.Discrete(2)

        def reset(self) -> None:
            pass

    with serve_gym(Half) as server, pytest.raises(errors.RemoteError, match=r"returned a Half, .* it has no step, si"):
        make_remote(server.url)


def test_a_wrapper_that_unbatches_a_simulator_of_one_lane_makes_one_environment() -> None:
    class Unbatched(gymnasium.Wrapper[Any, Any, Any, Any]):
        """As ManiSkill's CPUGymWrapper."""

        def __init__(self) -> None:
            super().__init__(IsaacDouble(1))
            self.observation_space = self.env.get_wrapper_attr("single_observation_space")
            self.action_space = self.env.get_wrapper_attr("single_action_space")

        def reset(self, **given: Any) -> Any:
            observation, info = self.env.reset(**given)
            return {"policy": observation["policy"][0]}, info

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, _ = self.env.step(action[None])
            return {"policy": observation["policy"][0]}, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    with serve_gym(Unbatched) as server, make_remote(server.url) as env:
        local = Unbatched()
        assert_identical(env.reset(seed=1), local.reset(seed=1))
        action = np.full(3, 0.5, np.float32)
        assert_identical(env.step(action), local.step(action))


def test_a_library_of_arrays_that_is_not_there_or_unknown_is_refused() -> None:
    with pytest.raises(errors.SettingError, match="expected array to be one of 'numpy', 'torch', 'jax', got 'cupy'"):
        serve_gym(IsaacDouble, array="cupy")  # type: ignore[arg-type]
    with pytest.raises(errors.SettingError, match="device='cuda:0' is for array='torch' or 'jax'"):
        serve_gym(IsaacDouble, device="cuda:0")


class Lanes3(DuckLanes):
    """A simulator with attributes and methods of its own."""

    difficulty = "hard"

    def __init__(self) -> None:
        super().__init__(3)
        self.heights = np.array([1.5, 2.5, 3.5])
        self.closed = False

    def scaled(self, factor: float, *, offset: float = 0.0) -> Any:
        return self.heights * factor + offset

    def close(self) -> None:
        self.closed = True


def test_methods_and_attributes_of_a_simulator_are_called_once_for_all_lanes() -> None:
    made = []

    def make() -> Lanes3:
        made.append(Lanes3())
        return made[-1]

    with serve_gym(make) as server:
        envs = make_vec_remote(server.url)
        assert envs.call("scaled", 2.0, offset=1.0) == (4.0, 6.0, 8.0)
        assert envs.get_attr("heights") == (1.5, 2.5, 3.5)  # an item for each lane
        assert envs.get_attr("difficulty") == ("hard",) * 3  # one value, which all share
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            envs.get_attr("missing")
        with pytest.raises(errors.RefusedError, match="public method"):
            envs.call("_secret")
        envs.close()
    assert made[-1].closed


def test_a_reward_space_that_is_no_box_is_refused() -> None:
    class Odd(DuckEnv):
        reward_space = spaces.Discrete(3)

    with (
        serve_gym(Odd) as server,
        pytest.raises(errors.RemoteError, match=r"expected the reward_space to be a Box, got Discrete\(3\)"),
    ):
        make_remote(server.url)


class PlainLanes(IsaacDouble):
    """A `gymnasium.Env` of several environments, as Isaac Lab's, with arrays as observations and a picture of all."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def __init__(self, num_envs: int = 2) -> None:
        super().__init__(num_envs)
        self.single_observation_space = self.single_observation_space["policy"]  # type: ignore[index]
        self.observation_space = self.observation_space["policy"]  # type: ignore[index]

    def _observation(self) -> Any:
        return self.physics.place.copy()

    def render(self) -> Any:
        return np.full((4, 5, 3), 9, np.uint8)


@pytest.fixture
def batched_id() -> Iterator[str]:
    """The id of a simulator that was registered as if it were one environment, with a time limit."""
    gymnasium.register("bridge-tests/Batched-v0", entry_point=PlainLanes, max_episode_steps=6)
    yield "bridge-tests/Batched-v0"
    del gymnasium.registry["bridge-tests/Batched-v0"]


def refusal_of(make: Any, **options: Any) -> str:
    """Return what a client is told that joins a server of an environment which cannot be served."""
    with serve_gym(make, **options) as server, pytest.raises(errors.RefusedError) as caught:
        make_vec_remote(server.url)
    return str(caught.value)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_time_limit_around_a_simulator_is_refused(lanes: int, batched_id: str) -> None:
    refusal = refusal_of(lambda: gymnasium.make(batched_id, num_envs=lanes))
    assert "TimeLimit<OrderEnforcing<" in refusal
    assert "register it without max_episode_steps, or make it with max_episode_steps=-1" in refusal
    assert refusal_of(batched_id, env_kwargs={"num_envs": lanes}).count("max_episode_steps") == 2


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning", "ignore:.*WARN.*")
def test_a_simulator_whose_time_limit_is_left_out_plays_as_without_a_server(batched_id: str) -> None:
    kwargs = {"num_envs": 3, "max_episode_steps": -1}
    with serve_gym(batched_id, env_kwargs=kwargs) as server:
        assert play_wrapped_beside(server, gymnasium.make(batched_id, **kwargs)) > 5


class LimitOfOne(gymnasium.wrappers.TimeLimit):
    """Derives from Gymnasium's, and calls its `step`."""

    def step(self, action: Any) -> Any:
        *told, info = super().step(action)
        return *told, {**info, "steps": 1}


class ShortLimit(gymnasium.wrappers.TimeLimit):
    """Derives from Gymnasium's, and has its `step`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, 3)


class LimitOfEach(gymnasium.wrappers.TimeLimit):
    """Derives from Gymnasium's, but counts the steps of each environment."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, 6)
        self.ages = np.zeros(env.num_envs, np.int64)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.ages += 1
        truncated = truncated | (self.ages >= 6)
        self.ages[terminated | truncated] = 0
        return observation, reward, terminated, truncated, info


WRAPPERS_OF_ONE: dict[str, Any] = {
    "Autoreset": (),
    "DelayObservation": (2,),
    "FrameStackObservation": (2,),  # of two environments, its observations have the shape of a batch
    "MaxAndSkipObservation": (4,),
    "NormalizeReward": (),
    "RecordEpisodeStatistics": (),
    "RepeatAction": (2,),
    "StickyAction": (0.5,),
    "TimeLimit": (6,),
}


@pytest.mark.parametrize("name", WRAPPERS_OF_ONE)
def test_a_wrapper_that_counts_or_keeps_something_for_one_environment_is_refused(name: str) -> None:
    wrapper = getattr(gymnasium.wrappers, name, None)
    if wrapper is None:
        pytest.skip(f"this Gymnasium has no {name}")
    assert f"{name} is for one: it" in refusal_of(lambda: wrapper(PlainLanes(2), *WRAPPERS_OF_ONE[name]))
    # Also below a harmless one, and where another adds its own.
    outer = gymnasium.wrappers.OrderEnforcing
    assert f"{name} is for one: it" in refusal_of(lambda: outer(wrapper(PlainLanes(1), *WRAPPERS_OF_ONE[name])))


@pytest.mark.parametrize("wrapper", [ShortLimit, lambda env: LimitOfOne(env, 6)])
def test_a_wrapper_that_derives_from_one_of_those_is_refused(wrapper: Any) -> None:
    assert "max_episode_steps" in refusal_of(lambda: wrapper(PlainLanes()))


def play_wrapped_beside(served: Any, local: Any, steps: int = 60) -> int:
    """As `play_beside`, for a simulator in wrappers that do not tell how many environments it has."""
    envs = BlockingReset(make_vec_remote(served.url), autoreset_mode=AutoresetMode.SAME_STEP)
    ends = 0
    try:
        assert envs.action_space == local.action_space
        assert envs.observation_space == local.observation_space
        envs.action_space.seed(3)
        assert_identical(envs.reset(seed=5)[0], local.reset(seed=5)[0])
        for _ in range(steps):
            actions = envs.action_space.sample()
            *told, _ = envs.step(actions)
            observation, reward, *flags, _ = local.step(actions)
            assert_identical(told, [observation, np.asarray(reward, np.float64), *flags])
            ends += int((flags[0] | flags[1]).sum())
    finally:
        envs.close()
        local.close()
    return ends


HARMLESS: dict[str, Any] = {
    "OrderEnforcing": gymnasium.wrappers.OrderEnforcing,
    "PassiveEnvChecker": gymnasium.wrappers.PassiveEnvChecker,
    "TransformReward": lambda env: gymnasium.wrappers.TransformReward(env, lambda reward: reward * 2),
    "ClipReward": lambda env: gymnasium.wrappers.ClipReward(env, -0.5, 0.5),
    "NormalizeObservation": gymnasium.wrappers.NormalizeObservation,
    "DtypeObservation": lambda env: gymnasium.wrappers.DtypeObservation(env, np.float64),
    "ClipAction": gymnasium.wrappers.ClipAction,
    "RescaleAction": lambda env: gymnasium.wrappers.RescaleAction(env, np.float32(-3), np.float32(3)),
    "RenderCollection": gymnasium.wrappers.RenderCollection,
    "LimitOfEach": LimitOfEach,
}


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning", "ignore:.*WARN.*")
@pytest.mark.parametrize("name", HARMLESS)
def test_a_wrapper_that_does_the_same_for_each_environment_plays_as_without_a_server(name: str) -> None:
    def make() -> Any:
        return HARMLESS[name](PlainLanes(3))

    with serve_gym(make) as server:
        assert play_wrapped_beside(server, make()) > 5


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")
def test_a_part_of_the_observations_of_a_simulator_is_served() -> None:
    class Poses(gymnasium.ObservationWrapper[Any, Any, Any]):
        """Adds a part to each environment's observation, and knows the space of all of them alone."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            more = spaces.Box(0, 1, (3, 2), np.uint8)
            self.observation_space = spaces.Dict({**env.observation_space.spaces, "more": more})

        def observation(self, observation: Any) -> Any:
            return {**observation, "more": np.ones((3, 2), np.uint8)}

    with serve_gym(lambda: Poses(IsaacDouble(3))) as server:
        assert play_wrapped_beside(server, Poses(IsaacDouble(3))) > 5


def test_a_wrapper_that_mixes_the_observations_of_all_environments_is_refused() -> None:
    refusal = refusal_of(lambda: gymnasium.wrappers.FlattenObservation(PlainLanes(2)))
    assert "changes the observation_space to Box(-inf, inf, (6,), float32)" in refusal
    assert "give the wrapper a single_observation_space, or leave it out" in refusal


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")
@pytest.mark.parametrize("flag", [True, np.True_, np.ones(1, np.bool_)], ids=["bool", "numpy", "array of one"])
def test_one_flag_for_all_environments_is_no_end_of_each(flag: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Limit(gymnasium.Wrapper[Any, Any, Any, Any]):
        """A time limit of a user's own, for one environment."""

        steps = 0

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self.steps += 1
            return observation, reward, terminated, flag if self.steps >= 3 else truncated, info

    with serve_gym(lambda: Limit(PlainLanes(2))) as server:
        envs = BlockingReset(make_vec_remote(server.url), autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset(seed=0)
        for _ in range(2):
            assert not envs.step(envs.action_space.sample())[3].any()
        envs.step(envs.action_space.sample())
        envs.close()
    assert "expected truncated as an array of shape (2,) from Limit<PlainLanes>" in caplog.text


def test_num_envs_of_an_environment_that_steps_several_itself_says_how_to_give_it(batched_id: str) -> None:
    refusal = refusal_of(batched_id, num_envs=2)
    assert "which steps several at once itself: leave num_envs out" in refusal
    assert "env_kwargs={'num_envs': 4}" in refusal


@pytest.mark.filterwarnings("ignore:.*missing AutoresetMode")
def test_vector_wrappers_around_a_simulators_vector_entry_point_go_on() -> None:
    def entry_point(num_envs: int, **kwargs: Any) -> Any:
        """Make one, as `gymnasium.make_vec` does, which gives it the time limit."""
        return gymnasium.wrappers.vector.TransformReward(ManiSkillDouble(num_envs), lambda rewards: rewards * 2)

    gymnasium.register("bridge-tests/Vector-v0", vector_entry_point=entry_point, max_episode_steps=50)
    try:
        with serve_gym("bridge-tests/Vector-v0", num_envs=3, vectorization_mode="vector_entry_point") as server:
            assert play_wrapped_beside(server, entry_point(3)) > 5
    finally:
        del gymnasium.registry["bridge-tests/Vector-v0"]
