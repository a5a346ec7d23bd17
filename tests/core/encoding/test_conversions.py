"""Values outside of an environment's declared spaces arrive as they are locally, or the client is warned once."""

import contextlib
import dataclasses
import enum
import os
import re
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import EnvironmentFailedError, RefusedError
from bridge.wrappers import BlockingReset
from tests.places import ROOT
from tests.support import assert_identical, without_readers

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about unusual environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ISOLATION = pytest.mark.parametrize("isolation", [None, "process"])


class Scripted(gymnasium.Env):
    """Returns what functions of the step's number give; episodes end after 10 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.steps = 0

    def observation(self):
        return np.full(2, self.steps, np.float32)

    def reward(self):
        return float(self.steps)

    def info(self):
        return {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), self.info()

    def step(self, action):
        self.steps += 1
        return self.observation(), self.reward(), False, self.steps == 10, self.info()


def exact(mine, theirs):
    """Hold values against each other with their Python types and orders of keys."""
    assert_identical(mine, theirs)
    if isinstance(theirs, (dict, tuple, list)):
        assert type(mine) is type(theirs)
        if isinstance(theirs, dict):
            assert list(mine) == list(theirs)
        for key in theirs if isinstance(theirs, dict) else range(len(theirs)):
            exact(mine[key], theirs[key])
    elif not isinstance(theirs, np.ndarray):
        assert type(mine) is type(theirs)


def compare(function, steps=25, **options):
    """Step a remote environment and a local one side by side."""
    local = function()
    with serve_gym(function, **options) as server, make_remote(server.url) as remote:
        exact(remote.reset(seed=3), local.reset(seed=3))
        for _ in range(steps):
            mine, theirs = remote.step(1), local.step(1)
            exact(mine[0], theirs[0])
            exact(mine[1], theirs[1])
            exact(mine[4], theirs[4])
            assert mine[2:4] == theirs[2:4]
            if theirs[3]:
                exact(remote.reset(), local.reset())


# Observations


class Goals(Scripted):
    """As FetchReach: a Dict whose order of keys is not the space's, and changes."""

    observation_space = spaces.Dict(
        achieved=spaces.Box(-1, 99, (1,)), desired=spaces.Discrete(20), observation=spaces.Dict(b=spaces.Discrete(20))
    )

    def observation(self):
        parts = {
            "observation": {"b": self.steps},
            "achieved": np.full(1, self.steps, np.float32),
            "desired": np.int64(self.steps),
        }
        return parts if self.steps < 7 else dict(sorted(parts.items()))


class Cells(Scripted):
    """As Taxi: a plain int for a Discrete; NumPy's in between."""

    observation_space = spaces.Discrete(20)

    def observation(self):
        return self.steps if self.steps % 3 else np.int64(self.steps)


@ISOLATION
@pytest.mark.parametrize("kind", [Goals, Cells])
def test_the_order_of_keys_and_plain_integers_are_those_of_the_environment(kind, isolation):
    compare(kind, isolation=isolation)


def test_a_rollout_has_the_order_of_keys_of_the_environment():
    local = Goals()
    with serve_gym(Goals) as server, make_remote(server.url) as remote:
        for answer in remote.rollout([1] * 24):
            exact(answer.observation, (local.reset() if answer.first else local.step(1))[0])


class Doubles(Scripted):
    def observation(self):
        return np.full(2, self.steps + 0.1)


class Listed(Scripted):
    def observation(self):
        return [float(self.steps), 0.5]


class Masked(Scripted):
    def observation(self):
        return np.ma.masked_equal(np.float32([self.steps, 0.5]), 0)


@ISOLATION
@pytest.mark.parametrize(("kind", "got"), [(Doubles, "float64"), (Listed, "list"), (Masked, "MaskedArray")])
def test_an_observation_of_another_type_than_its_space_comes_as_the_space_says_and_is_told_once(kind, got, isolation):
    with serve_gym(kind, isolation=isolation) as server, make_remote(server.url) as remote:
        with pytest.warns(RuntimeWarning, match=f"'observation' is of type {got}, and comes as .* float32") as caught:
            observation, _ = remote.reset()
        assert len(caught) == 1
        assert str(caught[0].message).startswith(server.url)
        assert caught[0].filename == __file__, "the place of a warning is the user's line"
        assert_identical(observation, np.asarray(kind().observation(), np.float32))
        for _ in range(3):
            remote.step(0)  # a second warning would be an error


# Infos


class Side(enum.Enum):
    LEFT = 0
    RIGHT = "right"


@dataclasses.dataclass
class Report:
    side: Side
    values: tuple


class Infos(Scripted):
    def info(self):
        return {1: 2, "side": Side.RIGHT, "set": {1, 2}, "z": 1j * self.steps, "report": Report(Side.LEFT, (1, 2.5))}


@ISOLATION
def test_infos_carry_keys_of_any_kind_enums_sets_complex_numbers_and_dataclasses(isolation):
    with serve_gym(Infos, isolation=isolation) as server, make_remote(server.url) as remote:
        _, info = remote.reset()
        assert info == {1: 2, "side": "right", "set": {1, 2}, "z": 0j, "report": {"side": 0, "values": (1, 2.5)}}
        assert remote.step(0)[4]["z"] == 1j


class BadInfos(Scripted):
    def info(self):
        return {"engine": object(), "listed": [1, object(), 3], "good": self.steps}


@ISOLATION
def test_what_does_not_travel_is_told_to_the_client_by_key_once(isolation):
    with serve_gym(BadInfos, isolation=isolation) as server, make_remote(server.url) as remote:
        with (
            pytest.warns(RuntimeWarning, match=r"info\['engine'\] is of type object"),
            pytest.warns(RuntimeWarning, match=r"info\['listed'\]\[1\] is of type object") as caught,
        ):
            assert remote.reset()[1] == {"listed": [1, None, 3], "good": 0}
        assert len(caught) == 2
        assert remote.step(0)[4] == {"listed": [1, None, 3], "good": 1}


class LargeNumbers(BadInfos):
    """Its observations from the first step on are Python's own integers, of two bytes on the wire."""

    observation_space = spaces.Discrete(1000)

    def observation(self):
        return 500 if self.steps else np.int64(500)

    def info(self):
        return super().info() if self.steps == 2 else {}


def test_an_observation_that_takes_more_bytes_than_others_costs_neither_its_type_nor_a_warning():
    with serve_gym(LargeNumbers) as server, make_remote(server.url) as remote:
        assert type(remote.reset()[0]) is np.int64
        assert type(remote.step(0)[0]) is int
        with (
            pytest.warns(RuntimeWarning, match=r"info\['engine'\] is of type object"),
            pytest.warns(RuntimeWarning, match=r"info\['listed'\]\[1\] is of type object"),
        ):
            observation, reward, *_, info = remote.step(0)
        assert (type(observation), observation, type(reward), reward) == (int, 500, float, 2.0)
        assert info == {"listed": [1, None, 3], "good": 2}


def test_a_vector_tells_of_each_world_what_does_not_travel_once():
    with serve_gym(BadInfos, num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        with pytest.warns(RuntimeWarning, match="does not travel") as caught:
            envs.reset()
        assert len(caught) == 2
        envs.step(np.array([0, 0]))
        envs.close()


def test_an_attribute_with_integer_keys_can_be_read():
    with serve_gym("Taxi-v4") as server:
        envs = make_vec_remote(server.url)
        local = gymnasium.make("Taxi-v4").unwrapped
        assert_identical(envs.get_attr("P")[0], local.P)
        envs.close()


# Rewards


class Objectives(Scripted):
    """As MO-Gymnasium's: a reward for each objective."""

    reward_space = spaces.Box(-100, 100, (2,), np.float32)

    def reward(self):
        return np.array([self.steps, -0.5], np.float32)


class LinearReward(gymnasium.Wrapper):
    """As MO-Gymnasium's, which leaves the `reward_space` of the environment as it is."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, float(reward.sum()), *rest


@ISOLATION
def test_an_array_reward_arrives_as_the_array_that_it_is(isolation):
    compare(Objectives, isolation=isolation)
    with serve_gym(Objectives, isolation=isolation) as server, make_remote(server.url) as remote:
        assert remote.get_wrapper_attr("reward_space") == Objectives.reward_space
        remote.reset()
        first = remote.step(0)[1]
        remote.step(0)
        assert first.flags.writeable
        assert first.tolist() == [1, -0.5]


@pytest.mark.parametrize(("slots", "lanes"), [(1, 1), (3, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vectors_give_array_rewards_of_each_slot_as_mo_gymnasium_does(slots, lanes, mode):
    with serve_gym(Objectives, num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=slots), autoreset_mode=mode)
        assert envs.env.reward_space == Objectives.reward_space
        envs.reset()
        for step in range(1, 14):
            rewards = envs.step(np.zeros(slots, np.int64))[1]
            count = step if step <= 10 else step - 10 - (mode == "NextStep")
            expected = [count, -0.5] if count else [0, 0]
            assert_identical(rewards, np.array([expected] * slots, np.float32))
        envs.close()


def test_send_and_recv_give_array_rewards():
    with serve_gym(Objectives) as server:
        envs = make_vec_remote(server.url, num_envs=2)
        envs.reset(seed=1)
        while any(observation is None for observation in envs.step(np.zeros(2, np.int64))[0]):
            pass
        envs.send(np.zeros(2, np.int64))
        slots, _, rewards, *_ = envs.recv(2)
        assert slots.tolist() == [0, 1]
        assert (rewards.shape, rewards.dtype) == ((2, 2), np.float32)
        assert rewards[:, 1].tolist() == [-0.5, -0.5]
        envs.close()


def test_a_wrapper_that_makes_the_reward_a_number_gives_numbers():
    compare(lambda: LinearReward(Objectives()))
    with serve_gym(lambda: LinearReward(Objectives()), num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        assert_identical(envs.step(np.zeros(2, np.int64))[1], np.array([0.5, 0.5]))
        envs.close()


class Wide(Objectives):
    def reward(self):
        return np.array([self.steps, -0.1])


def test_an_array_reward_of_another_dtype_than_its_space_is_told_once():
    with serve_gym(Wide) as server, make_remote(server.url) as remote:
        remote.reset()
        with pytest.warns(RuntimeWarning, match="reward is float64, and comes as float32"):
            assert_identical(remote.step(0)[1], np.array([1, -0.1], np.float32))
        remote.step(0)


class Team(Scripted):
    def reward(self):
        return (0.5, 1.0)


@pytest.mark.parametrize(("isolation", "lanes"), [(None, 1), (None, 2), ("process", 1), ("process", 2)])
def test_the_rewards_of_several_agents_name_what_serves_them(isolation, lanes):
    with serve_gym(Team, num_envs=lanes, isolation=isolation) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        infos = envs.step(np.zeros(lanes, np.int64))[4]
        assert "serve_parallel" in infos["error"][0]
        assert "LinearReward" in infos["error"][0]
        assert "/worlds/" not in infos["error"][0]
        envs.close()


class OldInterface(Scripted):
    def step(self, action):
        return super().step(action)[:4]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_of_four_values_is_told_what_a_step_gives(lanes):
    with serve_gym(OldInterface, num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        error = envs.step(np.zeros(lanes, np.int64))[4]["error"][0]
        assert "step() of " in error
        assert FORM in error
        assert "Traceback" not in error
        assert "LinearReward" not in error
        envs.close()


class OldInnerInterface(gymnasium.Wrapper):
    """A wrapper of Gymnasium around an environment that returns four values."""

    def __init__(self):
        super().__init__(gymnasium.wrappers.TimeLimit(OldInterface(), 5))


FORM = "expected (observation, reward, terminated, truncated, info)"


@ISOLATION
@pytest.mark.parametrize("make", [OldInterface, OldInnerInterface])
def test_a_single_environment_whose_step_gives_four_values_is_told_what_a_step_gives(make, isolation):
    with serve_gym(make, isolation=isolation) as server, make_remote(server.url) as remote:
        remote.reset()
        with pytest.raises(EnvironmentFailedError, match=r"step\(\) of \w.* returned .*4 values") as caught:
            remote.step(0)
        assert FORM in str(caught.value)
        assert "Traceback" not in str(caught.value)


@ISOLATION
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "one value of type int"),
        (None, "None"),
        (np.zeros(3, np.float32), "an ndarray of shape (3,)"),
        ((0, 0.0, {}), "a tuple of 3 values (int, float, dict)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fps", [None, 1000.0])
def test_a_reset_of_another_form_is_told_what_it_returned_and_what_a_reset_gives(value, said, isolation, fps):
    class OldReset(Scripted):
        def reset(self, *, seed=None, options=None):
            return value

    with (
        serve_gym(OldReset, isolation=isolation, fps=fps) as server,
        make_remote(server.url) as remote,
        pytest.raises(EnvironmentFailedError) as caught,
    ):
        remote.reset()
    assert f"returned {said}, expected (observation, info)" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("lanes", [1, 2])
def test_after_a_reset_that_raised_nobody_is_advised_just_to_reset(lanes):
    class Locked(Scripted):
        def reset(self, *, seed=None, options=None):
            raise RuntimeError("the door is locked")

    with (
        serve_gym(Locked, num_envs=lanes) as server,
        contextlib.closing(make_vec_remote(server.url, blocking=True)) as envs,
        pytest.raises(EnvironmentFailedError, match="the door is locked") as caught,
    ):
        envs.reset()
    assert "Fix its reset()." in str(caught.value)
    assert "or call reset()" not in str(caught.value)


class OwnErrors(Scripted):
    """Fails in its own code, in ways that look like a wrong form of its results or of its rewards."""

    failures = (
        lambda self: self.raises("cannot unpack the level"),
        lambda self: self.pair(5),
        lambda self: self.pair((1, 2, 3)),
        lambda self: self.lanes().step([0]),  # zip() argument 2 is longer than argument 1
        lambda self: self.lanes(OldInterface).step([0, 0]),
        lambda self: self.lanes(Team).step([0, 0]),
    )

    def raises(self, text):
        raise ValueError(text)

    def pair(self, value):
        _one, _other = value

    def lanes(self, kind=Scripted):
        envs = gymnasium.vector.SyncVectorEnv([kind] * 2)
        envs.reset()
        return envs

    def step(self, action):
        if action:
            self.failures[self.failure](self)
        return super().step(action)

    def fail(self, failure):
        self.failures[failure](self)

    failure = 0


@pytest.mark.parametrize("failure", range(6))
def test_an_error_of_a_single_environments_own_code_names_neither_rewards_nor_a_form(failure):
    with serve_gym(OwnErrors) as server, make_remote(server.url) as remote:
        remote.reset()
        remote.set_wrapper_attr("failure", failure)
        with pytest.raises(EnvironmentFailedError) as in_step:
            remote.step(1)
        with pytest.raises(EnvironmentFailedError) as in_call:
            remote.call("fail", failure)
    for caught, where in ((in_step, "step"), (in_call, "call of fail")):
        assert f"Error in {where}: " in str(caught.value)
        assert "Traceback" in str(caught.value)
        assert "expected a number as" not in str(caught.value)
        assert "LinearReward" not in str(caught.value)
        # An environment that steps others of four values is told the form of these.
        assert ("reset() gives (observation, info), step() (obs" in str(caught.value)) is (failure == 4)


@pytest.mark.slow
@pytest.mark.parametrize("failure", range(4))
def test_an_error_of_an_async_lanes_own_code_names_neither_rewards_nor_a_form(failure):
    with (
        serve_gym(OwnErrors, num_envs=2, vectorization_mode="async") as server,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Gymnasium's own remarks about the lane
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        envs.set_attr("failure", failure)
        error = envs.step(np.array([0, 1]))[4]["error"][0]
        envs.close()
    assert "Error in step: " in error
    assert "expected a number as" not in error
    assert FORM not in error


def test_a_text_as_a_reward_of_lanes_that_step_together_is_named_as_a_reward():
    class Texts(gymnasium.vector.VectorEnv):
        num_envs = 2
        single_observation_space = spaces.Discrete(2)
        observation_space = spaces.MultiDiscrete([2, 2])
        single_action_space = spaces.Discrete(2)
        action_space = spaces.MultiDiscrete([2, 2])

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.int64), {}

        def step(self, actions):
            return np.zeros(2, np.int64), ["good", "bad"], np.zeros(2, np.bool_), np.zeros(2, np.bool_), {}

    with serve_gym(Texts) as server:
        envs = BlockingReset(make_vec_remote(server.url), autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        envs.reset()
        error = envs.step(np.zeros(2, np.int64))[4]["error"][0]
        envs.close()
    assert "expected a number as the reward of each lane, got ['good', 'bad']" in error


def test_a_reward_of_several_numbers_is_shown():
    with serve_gym(Team) as server, make_remote(server.url) as remote:
        remote.reset()
        with pytest.raises(EnvironmentFailedError, match=r"got a tuple of 2: \(0\.5, 1\.0\)"):
            remote.step(0)


def test_a_reward_that_is_an_array_of_one_number_is_that_number():
    class One(Scripted):
        def reward(self):
            return np.array([[self.steps + 0.5]], np.float32)

    with serve_gym(One) as server, make_remote(server.url) as remote:
        remote.reset()
        assert remote.step(0)[1] == 1.5


def test_a_real_time_world_refuses_array_rewards_with_the_remedy():
    with serve_gym(Objectives, fps=50.0) as server, pytest.raises(RefusedError, match=r"adds rewards up.*LinearReward"):
        make_remote(server.url)


@pytest.mark.slow
def test_array_rewards_of_async_lanes_name_the_mode_that_takes_them():
    with serve_gym(Objectives, num_envs=2, vectorization_mode="async") as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        infos = envs.step(np.zeros(2, np.int64))[4]
        assert "vectorization_mode='sync'" in infos["error"][0]
        envs.close()


# What environments do that Gymnasium's wrappers do not expect


class Bare(Scripted):
    metadata = None

    def reset(self, seed=None):
        self.steps = 0
        return self.observation(), {"seed": seed}


@ISOLATION
def test_an_environment_without_metadata_whose_reset_takes_no_options_is_served(isolation):
    compare(Bare, isolation=isolation)
    with serve_gym(Bare, isolation=isolation) as server, make_remote(server.url) as remote:
        assert remote.metadata["render_modes"] == []


@ISOLATION
def test_options_for_a_reset_that_takes_none_name_the_environments_error(isolation):
    with serve_gym(Bare, isolation=isolation) as server, make_remote(server.url) as remote:
        with pytest.raises(EnvironmentFailedError, match="unexpected keyword argument 'options'"):
            remote.reset(options={"a": 1})
        assert remote.reset(seed=5)[1] == {"seed": 5}


# Lanes in processes of their own


class Fragile(Scripted):
    """Raises in its third step."""

    def step(self, action):
        if self.steps == 2 and action == 1:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)

    def pull(self):
        raise RuntimeError("the rope is torn")

    def crash(self):
        os._exit(1)


@pytest.mark.slow
@ISOLATION
def test_an_async_lane_that_raises_ends_the_episode_and_the_next_one_runs(isolation):
    with (
        serve_gym(Fragile, num_envs=2, vectorization_mode="async", isolation=isolation) as server,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Gymnasium's own remarks about the lane
        envs = BlockingReset(make_vec_remote(server.url))
        for _ in range(2):
            envs.reset(seed=1)
            actions = np.array([0, 0])
            for _ in range(2):
                assert not envs.step(actions)[3].any()
            *_, truncations, infos = envs.step(np.array([0, 1]))
            assert truncations.all()
            assert "RuntimeError in step: the gripper is stuck" in infos["error"][0]
            observations, _, _, truncations, _ = envs.step(actions)
            assert observations.tolist() == [[0, 0], [0, 0]]
            assert not truncations.any()
            assert envs.get_attr("steps") == (0, 0)  # of the new lanes
        envs.close()


@pytest.mark.parametrize(("method", "error"), [("pull", "the rope is torn"), ("crash", "EOFError")])
@ISOLATION
@pytest.mark.slow
def test_an_async_lane_that_raises_or_crashes_in_a_method_is_made_anew_at_the_next_reset(isolation, method, error):
    with (
        serve_gym(Fragile, num_envs=2, vectorization_mode="async", isolation=isolation) as server,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        envs = make_vec_remote(server.url)
        BlockingReset(envs).reset(seed=1)
        with pytest.raises(EnvironmentFailedError, match=error):
            envs.call(method)
        refused = f"cannot be used since one of them failed, reset all of them: .*{error}"
        with pytest.raises(RefusedError, match=refused):
            envs.call(method)
        observations, _ = BlockingReset(envs).reset(seed=1)
        assert observations.tolist() == [[0, 0], [0, 0]]
        envs.close()


# Spaces of classes of one's own


@pytest.mark.parametrize("env_id", ["MiniGrid-Fetch-5x5-N2-v0", "MiniGrid-LavaCrossingS9N1-v0"])
def test_the_reader_of_the_documentation_makes_minigrids_mission_space(env_id, monkeypatch):
    from minigrid.core.mission import MissionSpace

    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    without_readers(monkeypatch)
    scope = {}
    exec(compile(code, "limits.md", "exec"), scope)
    local = gymnasium.make(env_id)
    with serve_gym(env_id) as server, make_remote(server.url) as remote:
        mission = remote.observation_space["mission"]
        assert type(mission) is MissionSpace
        assert mission.ordered_placeholders == local.observation_space["mission"].ordered_placeholders
        for mine, theirs in zip(remote.reset(seed=4), local.reset(seed=4), strict=True):
            exact(mine, theirs)
        assert remote.observation_space.contains(remote.step(2)[0])
    for name in ("os:system", "minigrid.envs.empty:EmptyEnv.step", "minigrid.envs.x:os.system"):
        with pytest.raises(ValueError, match="no mission function"):
            scope["read_mission"]({"mission_func": {"name": name}}, spaces.Text(5))
    local.close()


def test_a_client_without_a_reader_is_told_of_the_text():
    import minigrid  # noqa: F401 - it registers its environments

    with serve_gym("MiniGrid-Empty-5x5-v0") as server:
        with pytest.warns(RuntimeWarning, match=r"MissionSpace' is a Text .*register_space"):
            remote = make_remote(server.url)
        assert type(remote.observation_space["mission"]) is spaces.Text
        remote.close()
