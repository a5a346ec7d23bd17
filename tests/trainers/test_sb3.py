"""SB3VecEnv keeps the contract of Stable-Baselines3's VecEnv: what it gives is what DummyVecEnv gives."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import (
    AlreadyPendingError,
    ClosedError,
    EnvironmentFailedError,
    InvalidActionError,
    NothingPendingError,
    RemoteTimeoutError,
    ResetNeededError,
)
from bridge.recording.reader import read_folder
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset, SB3VecEnv, Throttle
from tests.support import assert_identical

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's and Stable-Baselines3's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1", render_mode="rgb_array")


class SomeOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes empty options as none: a lane that is reset alone is given empty ones."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options or None)


def mixed() -> Any:
    space = gymnasium.spaces.Dict({"image": EVERY_SPACE["box_image"](), "number": gymnasium.spaces.Discrete(4)})
    return SomeOptions(SpaceEnv(space, EVERY_SPACE["box_float32"]()))


ENVIRONMENTS = {"CartPole": cartpole, "Dict": mixed, "FrozenLake": lambda: gymnasium.make("FrozenLake-v1")}


@pytest.fixture(params=["CartPole", "Dict", "FrozenLake"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SB3VecEnv, DummyVecEnv]]:
    """Three environments of each: a world of two lanes and one of one, and three local ones."""
    function = ENVIRONMENTS[request.param]
    with serve_gym(function, num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote([server.url, f"{server.url}?num_envs=1"]))
        local = DummyVecEnv([function] * 3)
        yield remote, local
        remote.close()
        local.close()


def without_times(infos: Any) -> Any:
    return [{key: value for key, value in info.items() if key != "episode"} for info in infos]


def test_steps_resets_seeds_and_infos_are_those_of_dummy_vec_env(pair: tuple[SB3VecEnv, DummyVecEnv]) -> None:
    remote, local = pair
    assert remote.observation_space == local.observation_space
    assert remote.action_space == local.action_space
    local.action_space.seed(3)
    for each in pair:
        assert each.seed(17) == [17, 18, 19]
    truncated = ended = 0
    for episode in range(3):
        assert_identical(remote.reset(), local.reset(), "reset")
        assert_identical(remote.reset_infos, local.reset_infos, "reset_infos")
        for step in range(60):
            actions = np.array([local.action_space.sample() for _ in range(3)])
            mine, theirs = remote.step(actions), local.step(actions)
            assert_identical(mine[:3], theirs[:3], f"step {step}")
            assert mine[1].dtype == np.float32
            assert_identical(without_times(mine[3]), without_times(theirs[3]), f"infos {step}")
            assert_identical(remote.reset_infos, local.reset_infos, "reset_infos")
            ended += int(theirs[2].sum())
            truncated += sum(info["TimeLimit.truncated"] for info in theirs[3])
            for slot in np.flatnonzero(theirs[2]):
                assert "terminal_observation" in mine[3][slot]
        if episode == 1:
            remote.seed(4)
            local.seed(4)
    assert ended
    if "image" in getattr(local.observation_space, "spaces", {}):
        assert truncated


def test_options_count_once_and_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url, num_envs=2))
        local = DummyVecEnv([cartpole] * 2)
        for options in ({"low": 0.02, "high": 0.03}, [{"low": 0.0, "high": 0.01}, {}], None):
            for each in (remote, local):
                each.seed(5)
                each.set_options(copy.deepcopy(options))
            assert_identical(remote.reset(), local.reset(), f"options {options}")
        remote.close()
        local.close()


def test_lanes_of_one_world_refuse_options_that_differ() -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote(server.url))
        remote.set_options([{"low": 0.0, "high": 0.01}, {}])
        with pytest.raises(ValueError, match="same options for all 2 lanes"):
            remote.reset()
        remote.close()


@pytest.mark.parametrize("name", ["CartPole"])
def test_attributes_and_methods_of_chosen_slots(name: str) -> None:
    with serve_gym(lambda: Monitor(cartpole()), num_envs=2) as server:
        remote = SB3VecEnv(make_vec_remote([server.url, f"{server.url}?num_envs=1"]))
        assert remote.get_attr("length") == [0.5, 0.5, 0.5]
        remote.set_attr("length", 2.0, indices=[1])
        assert remote.get_attr("length") == [0.5, 2.0, 0.5]
        assert remote.get_attr("length", indices=[2, 1]) == [0.5, 2.0]
        remote.set_attr("length", 3.0)
        assert remote.get_attr("length", indices=0) == [3.0]
        assert remote.has_attr("length")
        assert not remote.has_attr("no_such_thing")
        remote.reset()
        found = remote.env_method("has_wrapper_attr", "length", indices=[2, 0])
        assert found == [True, True]
        assert remote.env_method("has_wrapper_attr", "nothing") == [False] * 3
        assert remote.env_is_wrapped(Monitor) == [True] * 3
        assert remote.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices=1) == [True]
        assert remote.env_is_wrapped(gymnasium.wrappers.FlattenObservation) == [False] * 3
        assert remote.env_is_wrapped(gymnasium.Wrapper, indices=[0]) == [True]
        remote.close()


def test_frames_are_tiled_as_those_of_local_environments() -> None:
    with serve_gym(cartpole, num_envs=2) as server:
        remote, local = SB3VecEnv(make_vec_remote(server.url)), DummyVecEnv([cartpole] * 2)
        for each in (remote, local):
            each.seed(1)
            each.reset()
            each.step(np.array([0, 1]))
        assert remote.render_mode == "rgb_array"
        assert_identical(list(remote.get_images()), list(local.get_images()))
        assert_identical(remote.render(), local.render())
        remote.close()
        local.close()


def test_a_step_that_is_under_way_is_given_up_by_a_reset() -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url, num_envs=2))
        remote.seed(1)
        first = remote.reset()
        remote.step_async(np.array([0, 1]))
        remote.seed(1)
        assert_identical(remote.reset(), first)
        remote.step(np.array([0, 1]))
        remote.close()
        remote.close()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda envs: pickle.loads(pickle.dumps(envs))], ids=["copy", "pickle"]
)
def test_a_copy_plays_by_itself_and_waits_as_long(copied: Any) -> None:
    free = threading.Event()

    class Stuck(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            assert free.wait(20)
            return self.env.step(action)

    with serve_gym(lambda: Stuck(cartpole())) as server:
        remote = SB3VecEnv(BlockingReset(make_vec_remote(server.url), 2.0))
        twin = copied(remote)
        assert twin.reset().shape == (1, 4)
        with pytest.raises(RemoteTimeoutError, match=r"within 2 s|2\.0 s"):
            twin.step(np.array([0]))
        free.set()
        twin.close()
        remote.close()


def test_what_it_takes() -> None:
    with pytest.raises(ValueError, match="make_vec_remote"):
        SB3VecEnv(cartpole())


@pytest.mark.parametrize("wrap", [VecNormalize, lambda e: VecFrameStack(e, 2), VecCheckNan, VecMonitor])
def test_wrappers_of_stable_baselines3_cannot_tell(wrap: Any) -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        remote, local = wrap(SB3VecEnv(make_vec_remote(server.url))), wrap(DummyVecEnv([cartpole] * 2))
        for each in (remote, local):
            each.seed(6)
        assert_identical(remote.reset(), local.reset())
        for _ in range(60):
            actions = np.array([0, 1])
            mine, theirs = remote.step(actions), local.step(actions)
            assert_identical(mine[:3], theirs[:3])
            for left, right in zip(mine[3], theirs[3], strict=True):
                assert left.get("episode", {}).get("r") == right.get("episode", {}).get("r")
        remote.close()
        local.close()


def learn(kind: Any, envs: Any, **kwargs: Any) -> tuple[list[Any], list[float]]:
    model = kind("MlpPolicy", envs, seed=3, device="cpu", **kwargs)
    model.learn(1500)
    returns = [float(episode["r"]) for episode in model.ep_info_buffer]
    return [parameter.detach().numpy().copy() for parameter in model.policy.parameters()], returns


@pytest.mark.parametrize(
    ("kind", "slots", "kwargs"),
    [(PPO, 4, {"n_steps": 64, "batch_size": 64}), (DQN, 1, {"learning_starts": 100, "buffer_size": 2000})],
    ids=["PPO", "DQN"],
)
def test_training_is_the_same_as_locally_bit_for_bit(kind: Any, slots: int, kwargs: Any) -> None:
    weights, returns = learn(kind, VecMonitor(DummyVecEnv([cartpole] * slots)), **kwargs)
    with serve_gym("CartPole-v1") as server:
        remote = VecMonitor(SB3VecEnv(make_vec_remote(server.url, num_envs=slots)))
        mine, remote_returns = learn(kind, remote, **kwargs)
        remote.close()
    assert remote_returns == returns
    assert_identical(mine, weights)


def test_monitor_statistics_come_from_where_the_environments_run() -> None:
    with serve_gym(lambda: Monitor(cartpole()), num_envs=4) as server:
        remote = SB3VecEnv(make_vec_remote(server.url))
        model = PPO("MlpPolicy", remote, n_steps=64, batch_size=64, seed=0, device="cpu").learn(512)
        assert len(model.ep_info_buffer) > 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # evaluate_policy warns where it finds no Monitor
            mean, _ = evaluate_policy(model, remote, n_eval_episodes=4)
        assert 5 < mean <= 500
        remote.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_subproc_vec_env_holds_remote_environments(method: str) -> None:
    with serve_gym("CartPole-v1") as server:
        url = server.url
        held = SubprocVecEnv([lambda: make_remote(url)] * 2, start_method=method)
        local = DummyVecEnv([cartpole] * 2)
        for each in (held, local):
            each.seed(2)
        assert_identical(held.reset(), local.reset())
        for _ in range(40):
            actions = np.array([1, 0])
            mine, theirs = held.step(actions), local.step(actions)
            assert_identical((mine[0], mine[2]), (theirs[0], theirs[2]))
            assert mine[1].tolist() == theirs[1].tolist()
        held.close()
        local.close()


def test_a_single_remote_environment_trains() -> None:
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        PPO("MlpPolicy", env, n_steps=64, batch_size=64, device="cpu").learn(128)
        env.close()


def test_a_recording_holds_the_steps_that_were_made_and_no_others(tmp_path: Any) -> None:
    """Each lane that ends is reset alone, which is no step of the others."""
    lanes, steps = 8, 150
    with serve_gym("CartPole-v1", num_envs=lanes, record=tmp_path) as server:
        envs = SB3VecEnv(make_vec_remote(server.url))
        envs.seed(1)
        envs.reset()
        rewards = np.zeros(lanes)
        for _ in range(steps):
            rewards += envs.step(np.ones(lanes, np.int64))[1]
        envs.close()
    episodes = read_folder(tmp_path).episodes()
    assert sum(episode.length for episode in episodes) == lanes * steps
    assert sum(episode.total for episode in episodes) == rewards.sum()


SLOTS = 3
COMPOSITES = {
    "Dict": gymnasium.spaces.Dict({"move": gymnasium.spaces.Discrete(3), "aim": EVERY_SPACE["box_float32"]()}),
    "Tuple": gymnasium.spaces.Tuple([EVERY_SPACE["box_float32"](), gymnasium.spaces.MultiDiscrete([2, 3])]),
    "Tuple of as many parts as slots": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(4)] * SLOTS),
    "nested": gymnasium.spaces.Dict(
        {
            "where": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.MultiBinary(2)]),
            "what": gymnasium.spaces.Dict({"word": gymnasium.spaces.Text(3), "count": gymnasium.spaces.Discrete(5)}),
        }
    ),
}


class Echo(gymnasium.Env[Any, Any]):
    """Tells in its infos which actions came."""

    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return np.zeros(1, np.float32), 0.0, False, False, {"action": action}


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_sequence_with_an_action_for_each_slot_is_applied_as_dummy_vec_env_applies_it(name: str, lanes: bool) -> None:
    space = COMPOSITES[name]
    space.seed(4)
    with serve_gym(lambda: Echo(space)) as server:
        url = f"{server.url}?num_envs={SLOTS}" if lanes else server.url
        remote = SB3VecEnv(make_vec_remote(url, num_envs=SLOTS))
        local = DummyVecEnv([lambda: Echo(space)] * SLOTS)
        local.reset()
        remote.reset()
        for kind in (list, tuple, lambda items: np.fromiter(items, object, SLOTS)):
            actions = kind([space.sample() for _ in range(SLOTS)])
            assert_identical(remote.step(actions)[3], local.step(actions)[3], name)
        for actions in ([space.sample()] * (SLOTS - 1), [space.sample()] * SLOTS + [{}], [None] * SLOTS):
            with pytest.raises(InvalidActionError):
                remote.step(actions)
        batch = gymnasium.vector.utils.batch_space(space, SLOTS).sample()
        told = [info["action"] for info in remote.step(batch)[3]]
        expected = list(gymnasium.vector.utils.iterate(gymnasium.vector.utils.batch_space(space, SLOTS), batch))
        if "word" not in str(space) and "Tuple" in name:  # Gymnasium iterates no batch of texts
            assert_identical([[*map(np.asarray, one)] for one in told], [[*map(np.asarray, one)] for one in expected])
        remote.close()


class Knobs(gymnasium.Env[Any, Any]):
    """Has attributes and methods to ask for, and counts what was called."""

    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    level = 1

    def __init__(self) -> None:
        self.calls = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def count(self, by: int = 1) -> int:
        self.calls += by
        return self.calls


@pytest.fixture(params=["lanes", "lanes and a world", "worlds", "blocking"])
def knobs(request: pytest.FixtureRequest) -> Iterator[tuple[SB3VecEnv, DummyVecEnv]]:
    """Three environments, of which only the second is in a TimeLimit."""

    def wrapped() -> Any:
        return gymnasium.wrappers.TimeLimit(Knobs(), 9)

    made = itertools.cycle([Knobs, wrapped, Knobs])
    with (
        serve_gym(lambda: next(made)(), num_envs=SLOTS if request.param == "lanes" else 2) as lanes,
        contextlib.ExitStack() as stack,
    ):
        singles = [stack.enter_context(serve_gym(each)) for each in (Knobs, wrapped, Knobs)]
        urls = {"lanes": [lanes.url], "lanes and a world": [lanes.url, singles[2].url]}
        envs = urls.get(request.param, [server.url for server in singles])
        remote = SB3VecEnv(make_vec_remote(envs, blocking=request.param == "blocking"))
        yield remote, DummyVecEnv([Knobs, wrapped, Knobs])
        remote.close()


@pytest.mark.parametrize(
    "indices", [None, 0, -1, -3, [-1], [0, -1], (2, 0), [1, 1], [-1, 2, 0, 2], [], range(2), np.array([2, -2])], ids=str
)
def test_indices_count_as_those_of_dummy_vec_env(knobs: tuple[SB3VecEnv, DummyVecEnv], indices: Any) -> None:
    remote, local = knobs
    for each in knobs:
        each.reset()
        each.set_attr("fresh", 5)
        each.set_attr("fresh", {"a": [1]}, indices=indices)
        each.env_method("set_wrapper_attr", "level", 3, indices=indices)
    for ask in (
        lambda each: each.get_attr("fresh"),
        lambda each: each.get_attr("fresh", indices=indices),
        lambda each: each.get_attr("level"),
        lambda each: each.env_method("count", 2, indices=indices),
        lambda each: each.env_method("count", by=3, indices=indices),
        lambda each: each.get_attr("calls"),
        lambda each: each.env_is_wrapped(gymnasium.wrappers.TimeLimit),
        lambda each: each.env_is_wrapped(gymnasium.Wrapper, indices=indices),
        lambda each: each.get_attr("action_space", indices=indices),
    ):
        assert ask(remote) == ask(local)


@pytest.mark.parametrize("indices", [3, -4, [0, 3], [-4, 1]], ids=str)
def test_an_index_out_of_range_is_an_index_error(knobs: tuple[SB3VecEnv, DummyVecEnv], indices: Any) -> None:
    for each in knobs:
        with pytest.raises(IndexError):
            each.get_attr("level", indices)
        with pytest.raises(IndexError):
            each.set_attr("level", 9, indices)
        with pytest.raises(IndexError):
            each.env_method("count", indices=indices)
        with pytest.raises(IndexError):
            each.env_is_wrapped(gymnasium.Wrapper, indices)


def test_an_attribute_that_only_some_slots_have_is_set_and_read_there_alone(
    knobs: tuple[SB3VecEnv, DummyVecEnv],
) -> None:
    for each in knobs:
        each.set_attr("only_here", 7, indices=[-1])
        assert each.get_attr("only_here", indices=2) == [7]
        assert not each.has_attr("only_here")
        with pytest.raises(AttributeError):
            each.get_attr("only_here", indices=[0])


def test_a_method_is_an_attribute_that_is_not_called_until_it_is_asked_to(
    knobs: tuple[SB3VecEnv, DummyVecEnv],
) -> None:
    for each in knobs:
        assert each.has_attr("count")
        first, last = each.get_attr("count", indices=[0, -1])
        assert each.get_attr("calls") == [0, 0, 0]
        assert [last(4), last(by=1), first()] == [4, 5, 1]
        assert each.get_attr("calls") == [1, 0, 5]
        assert not each.has_attr("nothing_of_the_kind")
        assert not each.has_attr("_private")


def test_what_a_blocking_reset_was_told_of_lost_servers_and_failures_counts() -> None:
    class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise ValueError("no step")

    with serve_gym(lambda: Failing(cartpole())) as server:
        remote = SB3VecEnv(make_vec_remote(server.url, blocking=True, max_failures=2))
        remote.reset()
        remote.step(np.array([0]))
        with pytest.raises(EnvironmentFailedError, match="the last 2 episodes"):
            remote.step(np.array([0]))
        remote.close()
        masked = make_vec_remote(server.url, blocking=True, on_lost="continue")
        with pytest.raises(ValueError, match="'wait' or 'raise', got 'continue'"):
            SB3VecEnv(masked)
        SB3VecEnv(masked, on_lost="wait").close()


def test_wrappers_of_ours_between_hand_on_what_some_slots_are_asked() -> None:
    with serve_gym(Knobs, num_envs=2) as server:
        remote = SB3VecEnv(BlockingReset(Throttle(make_vec_remote(server.url), fps=1000)))
        remote.set_attr("level", 4, indices=-1)
        assert remote.get_attr("level") == [1, 4]
        assert remote.env_method("count", indices=[1]) == [1]
        assert remote.env_is_wrapped(gymnasium.Wrapper) == [False, False]
        remote.reset()
        remote.close()


def test_options_for_another_number_of_slots_are_refused() -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url, num_envs=3))
        remote.set_options([{"low": 0.0}, {}])
        with pytest.raises(ValueError, match="one for each of 3 slots, got 2"):
            remote.reset()
        remote.close()


def test_steps_that_are_out_of_order_raise() -> None:
    with serve_gym("CartPole-v1") as server:
        remote = SB3VecEnv(make_vec_remote(server.url))
        with pytest.raises(ResetNeededError):
            remote.step(np.array([0]))
        remote.reset()
        with pytest.raises(NothingPendingError):
            remote.step_wait()
        remote.step_async(np.array([0]))
        with pytest.raises(AlreadyPendingError):
            remote.step_async(np.array([0]))
        remote.step_wait()
        remote.close()
        with pytest.raises(ClosedError):
            remote.step(np.array([0]))


def test_image_and_video_wrappers_of_stable_baselines3_cannot_tell(tmp_path: Any) -> None:
    def images() -> Any:
        return SpaceEnv(gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8), gymnasium.spaces.Discrete(3))

    with serve_gym(images, num_envs=2) as server, serve_gym(cartpole) as films:
        pair = VecTransposeImage(SB3VecEnv(make_vec_remote(server.url))), VecTransposeImage(DummyVecEnv([images] * 2))
        for each in pair:
            each.seed(3)
        assert_identical(pair[0].reset(), pair[1].reset())
        for _ in range(20):
            assert_identical(*(each.step(np.array([1, 2]))[:3] for each in pair))
        pair[0].close()
        found = []
        for name, envs in (("remote", SB3VecEnv(make_vec_remote(films.url))), ("local", DummyVecEnv([cartpole]))):
            recorder = VecVideoRecorder(envs, str(tmp_path / name), lambda step: step == 0, video_length=5)
            recorder.seed(1)
            recorder.reset()
            for step in range(6):
                recorder.step(np.array([step % 2]))
            recorder.close()
            found.append([path.read_bytes() for path in (tmp_path / name).glob("*.mp4")])
        assert len(found[0]) == 1
        assert found[0] == found[1]
