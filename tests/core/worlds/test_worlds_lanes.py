"""Many lanes in one world, beside Gymnasium's own vector environments."""

import os
import subprocess
import sys
import textwrap

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import EVERY_SPACE, CountingEnv, FailingEnv, SpaceEnv
from tests.places import ROOT
from tests.support import (
    TAXI,
    Direct,
    assert_identical,
    direct_world,
    gym_source,
    keeping,
    lane_info,
    layout_of,
    sampled,
)


class Lanes(Direct):
    """A world of lanes, and its agent, that know their spaces."""

    spaces = None

    def of(self, observation_space, action_space, num_envs):
        self.spaces = layout_of(observation_space, "observation", num_envs), layout_of(action_space, "action", num_envs)
        return self

    def join(self, settings):
        agent = Lanes(Direct.__getattr__(self, "join")(settings).wrapped, self.runtime)
        agent.spaces = self.spaces
        return agent


def lanes_world(source, like):
    """A world of a source whose environment is like this one."""
    world = direct_world(source)
    return Lanes(world.wrapped, world.runtime).of(
        like.single_observation_space, like.single_action_space, like.num_envs
    )


def world_of(env):
    return lanes_world(gym_source(lambda: env), env)


def look(agent, *wanted):
    uids = {spec.name: uid for uid, spec in agent.observations.items()}
    found = agent.observe([uids[name] for name in wanted])
    return [np.array(found[uids[name]]) for name in wanted]


def observation_of(agent):
    layout, _ = agent.spaces
    return layout.unpack(look(agent, *(spec.name for spec in layout.specs)))


def info_of(agent):
    return values.decode(look(agent, "info")[0].tobytes())


def encoded(value):
    return pack_tensor(np.frombuffer(values.encode(value), np.uint8))


def act(agent, batch):
    _, layout = agent.spaces
    columns = layout.split(batch, layout.lanes)
    return agent.step(dict(zip(agent.actions, layout.pack_columns(columns, 0), strict=True)))


def refusal(function, *args):
    with pytest.raises(RequestError) as caught:
        function(*args)
    return caught.value


def beside(agent, local, result):
    """Hold what the agent has against what the local vector environment gave."""
    observation, *middle, infos = result
    assert_identical(observation_of(agent), observation)
    flags = look(agent, "reward", "terminated", "truncated", "discount")
    if middle:
        for mine, theirs in zip(flags, middle, strict=False):
            assert_identical(mine, theirs)
    else:
        assert not np.any(flags[:3])
    assert (flags[3] == 1.0 - flags[1]).all()  # D-21
    got = info_of(agent)
    if isinstance(got, dict):
        assert_identical(got, infos)
    else:
        assert_identical(got, alone(infos, local.num_envs))


def alone(infos, lanes):
    """The dicts of the lanes, out of what Gymnasium joined of object arrays."""
    return [
        {
            key: value[lane] if not isinstance(value, dict) else alone(value, lanes)[lane]
            for key, value in infos.items()
            if not key.startswith("_") and infos.get(f"_{key}", np.ones(lanes, bool))[lane]
        }
        for lane in range(lanes)
    ]


# Beside Gymnasium


@pytest.mark.parametrize("env_id", ["CartPole-v1", TAXI, "Blackjack-v1", "MountainCarContinuous-v0"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes_play_as_a_sync_vector_env_does(env_id, lanes):
    def make():
        return SyncVectorEnv([lambda: gymnasium.make(env_id, max_episode_steps=20)] * lanes)

    local, world = make(), world_of(make())
    agent = world.join({})
    agent.reset({"seed": pack_tensor(7)}, False)
    assert agent.begin() == pb.RUNNING
    beside(agent, local, local.reset(seed=7))
    local.action_space.seed(1)
    for _ in range(60):
        actions = local.action_space.sample()
        assert act(agent, actions) == pb.RUNNING
        beside(agent, local, local.step(actions))
    world.close()
    local.close()


# Gymnasium cannot batch the first ones, nor take batches of the others apart, which therefore are observations only.
UNBATCHED = {"dict_int_keys", "dict_int_and_text_keys"}
EMPTY = {"dict_empty", "tuple_empty", "tuple_of_empty_ones"}


@pytest.mark.parametrize("name", sampled([name for name in EVERY_SPACE if name not in UNBATCHED], 5))
def test_lanes_of_every_space_play_as_a_sync_vector_env_does(name):
    def make():
        action_space = spaces.Discrete(2) if name in EMPTY else EVERY_SPACE[name]()
        return SyncVectorEnv([lambda: SpaceEnv(EVERY_SPACE[name](), action_space, infos=False)] * 2)

    local, world = make(), world_of(make())
    agent = world.join({})
    agent.reset({"seed": pack_tensor([3, 8])}, False)
    agent.begin()
    observation, _ = local.reset(seed=[3, 8])
    assert_identical(observation_of(agent), observation)
    local.single_action_space.seed(0)
    for _ in range(15):
        drawn = [local.single_action_space.sample() for _ in range(2)]
        actions = gymnasium.vector.utils.concatenate(
            local.single_action_space, drawn, gymnasium.vector.utils.create_empty_array(local.single_action_space, 2)
        )
        act(agent, actions)
        observation, reward, *_ = local.step(actions)
        assert_identical(observation_of(agent), observation)
        assert_identical(look(agent, "reward")[0], reward)
    world.close()
    local.close()


def test_the_world_stays_running_and_a_finished_lane_resets_in_the_next_step():
    world = world_of(SyncVectorEnv([lambda: CountingEnv(2), lambda: CountingEnv(3, truncates=True)]))
    agent = world.join({})
    agent.begin()
    seen = []
    for _ in range(4):
        assert act(agent, np.zeros(2, np.int64)) == pb.RUNNING
        seen.append(
            [part.tolist() for part in (observation_of(agent), *look(agent, "terminated", "truncated", "discount"))]
        )
    assert seen == [
        [[[1, 1], [1, 1]], [False, False], [False, False], [1.0, 1.0]],
        [[[1, 2], [1, 2]], [True, False], [False, False], [0.0, 1.0]],
        [[[2, 0], [1, 3]], [False, False], [False, True], [1.0, 1.0]],
        [[[2, 1], [2, 0]], [False, False], [False, False], [1.0, 1.0]],
    ]
    world.close()


def test_the_lanes_own_vector_environment_is_served():
    source = gym_source("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    local = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    world = lanes_world(source, local)
    agent = world.join({})
    agent.reset({"seed": pack_tensor([5, 6, 7, 8])}, False)  # consecutive: its one seed
    agent.begin()
    observation, _ = local.reset(seed=5)
    assert_identical(observation_of(agent), observation)
    for _ in range(50):
        actions = local.action_space.sample()
        act(agent, actions)
        observation, reward, terminated, truncated, _ = local.step(actions)
        assert_identical(observation_of(agent), observation)
        assert_identical(look(agent, "reward", "terminated", "truncated")[1:], [terminated, truncated])
        assert (look(agent, "reward")[0] == reward).all()
    agent.reset({"seed": pack_tensor([-1, -1, -1, -1])}, True)
    agent.begin()
    for settings, words in (
        ({"seed": pack_tensor([5, 9, 7, 8])}, "takes one integer seed; expected consecutive seeds"),
        ({"seed": pack_tensor([-1, -1, 7, 8])}, "takes one integer seed; expected consecutive seeds"),
        ({"reset_mask": pack_tensor([True, False, True, True])}, "cannot reset some of its lanes alone"),
    ):
        error = refusal(agent.reset, settings, True)
        assert error.code == Code.INVALID_ARGUMENT
        assert words in error.message
    agent.reset({"reset_mask": pack_tensor([True] * 4)}, True)
    world.close()
    local.close()


# Seeds and masks


@pytest.fixture
def lanes():
    factory, made = keeping(SpaceEnv)
    world = world_of(SyncVectorEnv([factory] * 3))
    agent = world.join({})
    agent.made = made
    yield agent
    world.close()


def seeds_of(agent):
    return [env.np_random_seed for env in agent.made[-3:]]


def test_a_seed_for_all_lanes_and_one_for_each(lanes):
    lanes.reset({"seed": pack_tensor(10)}, False)
    lanes.begin()
    assert seeds_of(lanes) == [10, 11, 12]
    lanes.reset({"seed": pack_tensor([4, -1, 2**40])}, True)
    lanes.begin()
    assert seeds_of(lanes) == [4, 11, 2**40]
    lanes.reset({"seed": pack_tensor(np.uint64([1, 2, 3]))}, True)
    lanes.begin()
    assert seeds_of(lanes) == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": pack_tensor(-1)}, "expected a non-negative seed, got -1"),
        ({"seed": pack_tensor([1, 2])}, "an integer seed, or one for each of 3 lanes"),
        ({"seed": pack_tensor([1.0, 2.0, 3.0])}, "an integer seed, or one for each of 3 lanes"),
        ({"seed": pack_tensor([1, -2, 3])}, "expected non-negative seeds, or -1 for none"),
        ({"reset_mask": pack_tensor([True, False])}, "a reset_mask of 3 bools, one of them True"),
        ({"reset_mask": pack_tensor([1, 0, 0])}, "a reset_mask of 3 bools"),
        ({"reset_mask": pack_tensor([False] * 3)}, "one of them True"),
        ({"options": encoded([1])}, "options to be a dict"),
        ({"mask": pack_tensor(1)}, "the settings here are: seed, options, reset_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reset_settings_of_lanes_that_are_wrong_are_refused_at_the_reset(lanes, settings, words):
    # D-2, D-14: not only at the Step that follows
    error = refusal(lanes.reset, settings, False)
    assert error.code == Code.INVALID_ARGUMENT
    assert words in error.message


def test_a_mask_resets_its_lanes_alone():
    world = world_of(SyncVectorEnv([CountingEnv] * 3))
    agent = world.join({})
    agent.begin()
    act(agent, np.zeros(3, np.int64))
    agent.reset({"reset_mask": pack_tensor([False, True, False]), "seed": pack_tensor([-1, 9, -1])}, True)
    assert agent.begin() == pb.RUNNING
    assert observation_of(agent).tolist() == [[1, 1], [2, 0], [1, 1]]
    assert info_of(agent) == [{}, {"seed": 9}, {}] or info_of(agent)["_seed"].tolist() == [False, True, False]
    act(agent, np.zeros(3, np.int64))
    assert observation_of(agent).tolist() == [[1, 2], [2, 1], [1, 2]]
    agent.reset({"reset_mask": pack_tensor([True] * 3)}, True)
    agent.begin()
    assert observation_of(agent).tolist() == [[2, 0], [3, 0], [2, 0]]
    world.close()


def test_options_reach_every_lane_once(lanes):
    lanes.reset({"options": encoded({"level": 3})}, False)
    lanes.begin()
    info = info_of(lanes)
    options = [item["options"] for item in info] if isinstance(info, list) else info["options"]["level"].tolist()
    assert options in ([{"level": 3}] * 3, [3, 3, 3])
    lanes.begin()
    info = info_of(lanes)
    assert "options" not in (info[0] if isinstance(info, list) else info)


# Failures


def test_a_lane_that_raises_is_truncated_alone_and_begins_anew_in_the_next_step():
    world = world_of(SyncVectorEnv([lambda: FailingEnv(fail_in_step=2), CountingEnv]))
    agent = world.join({})
    agent.begin()
    act(agent, np.zeros(2, np.int64))
    assert act(agent, np.zeros(2, np.int64)) == pb.RUNNING
    assert observation_of(agent).tolist() == [[1, 1], [1, 2]]
    rewards, terminated, truncated = look(agent, "reward", "terminated", "truncated")
    assert (rewards[0], terminated.tolist(), truncated.tolist()) == (0.0, [False, False], [True, False])
    infos = [lane_info(info_of(agent), lane) for lane in range(2)]
    assert "TestFailure in step: step 2 fails on purpose" in infos[0]["error"]
    assert infos[1] == {}
    assert act(agent, np.zeros(2, np.int64)) == pb.RUNNING
    assert observation_of(agent).tolist() == [[2, 0], [1, 3]]
    assert not look(agent, "truncated")[0].any()
    world.close()


class NeverBegins(CountingEnv):
    """Its resets raise."""

    def reset(self, *, seed=None, options=None):
        raise ValueError("no level to begin with")


def test_a_lane_whose_every_reset_raises_is_told_while_it_has_no_observation():
    # D-2
    world = world_of(SyncVectorEnv([CountingEnv, NeverBegins]))
    agent = world.join({})
    error = refusal(agent.begin)
    assert error.code == Code.INTERNAL
    assert "ValueError in reset: no level to begin with" in error.message
    world.close()


def test_a_reset_that_was_asked_for_and_raises_is_tried_again_without_the_other_lanes():
    world = world_of(SyncVectorEnv([CountingEnv, lambda: FailingEnv(fail_in_reset=2)]))
    agent = world.join({})
    for episode in (1, 2):
        agent.reset({}, episode == 2)
        assert agent.begin() == pb.RUNNING
        assert observation_of(agent).tolist() == [[episode, 0], [episode, 0]]
        assert not look(agent, "truncated")[0].any()
    world.close()


def test_lanes_that_are_not_reset_by_themselves_are_refused():
    mode = AutoresetMode.DISABLED
    env = SyncVectorEnv([CountingEnv], autoreset_mode=mode)
    with pytest.raises(
        RequestError, match=f"mode is NEXT_STEP or SAME_STEP, got {mode}.*BlockingReset gives the other"
    ):
        world_of(env)
    env.close()


def test_attributes_and_methods_are_a_value_for_each_lane():
    world = world_of(SyncVectorEnv([CountingEnv, lambda: CountingEnv(9)]))
    tree = world.join({}).properties()

    def read(name):
        return values.decode(tree.read(f"world.attributes.{name}").uint8s.array)

    assert read("length") == [5, 9]
    tree.write("world.attributes.length", encoded([1, 2]))
    assert read("length") == [1, 2]
    assert refusal(tree.write, "world.attributes.length", encoded([1])).code == Code.INVALID_ARGUMENT
    assert tree.read("world.num_envs").int64s.array == [2]
    world.close()


# Infos


class InfoEnv(CountingEnv):
    """Its infos are given."""

    def __init__(self, infos):
        super().__init__(3)
        self.infos = infos

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.infos[0]

    def step(self, action):
        *result, _ = super().step(action)
        return *result, self.infos[self.steps % len(self.infos)]


UNIFORM = [
    [{"a": 1, "b": 0.5, "c": True, "d": "x", "e": None}, {"a": 2}],
    [{"array": np.arange(3, dtype=np.int8)}, {"array": np.ones(3, np.int8)}],
    [{"inner": {"k": 1, "deep": {"x": np.float32(1.5)}}}, {}],
    [{"items": [1, 2], "pair": (1, "x")}, {"items": []}],
    [{"scalar": np.uint8(200), "flag": np.bool_(True)}, {"scalar": np.uint8(1)}],
]


@pytest.mark.parametrize("infos", UNIFORM, ids=str)
def test_infos_of_one_type_are_joined_as_gymnasium_joins_them(infos):
    def make():
        return SyncVectorEnv([lambda: InfoEnv(infos), lambda: InfoEnv(infos[::-1])])

    local, world = make(), world_of(make())
    agent = world.join({})
    agent.begin()
    _, expected = local.reset()
    assert_identical(info_of(agent), expected)
    for _ in range(7):
        act(agent, np.zeros(2, np.int64))
        assert_identical(info_of(agent), local.step(np.zeros(2, np.int64))[-1])
    world.close()
    local.close()


@pytest.mark.parametrize(
    "infos",
    [
        [{"a": 1}, {"a": 2.7}],  # Gymnasium makes an int64 array of both
        [{"a": True}, {"a": 5}],
        [{"a": np.arange(2)}, {"a": np.arange(3)}],
        [{"a": np.int8([1])}, {"a": np.int64([2**40])}],
        [{"a": None}, {"a": 1}],
        [{"a": "x"}, {"a": {"b": 1}}],
        [{"a": {"b": 1}}, {"a": {"b": 1.5}}],
        [{"a": 2**70}, {"a": 1}],
    ],
    ids=str,
)
def test_infos_of_several_types_come_as_they_are_lane_by_lane(infos):
    world = world_of(SyncVectorEnv([lambda: InfoEnv([infos[0]]), lambda: InfoEnv([infos[1]])]))
    agent = world.join({})
    agent.begin()
    assert_identical(info_of(agent), infos)
    for mine, theirs in zip(info_of(agent), infos, strict=True):
        assert [type(value) for value in mine.values()] == [type(value) for value in theirs.values()]
    world.close()


# Processes


ASYNC = """
    import threading

    import numpy as np
    import psutil

    from bridge.core.encoding.tensors import pack_tensor
    from gymnasium.vector import SyncVectorEnv
    from tests.support import TAXI, Direct, assert_identical, direct_world, gym_source
    from tests.core.worlds.test_worlds_lanes import act, encoded, info_of, lanes_world, look, observation_of, refusal
    import gymnasium


    def main():
        local = SyncVectorEnv([lambda: gymnasium.make(TAXI, max_episode_steps=8)] * 2)
        source = gym_source(TAXI, num_envs=2, vectorization_mode="async", env_kwargs={"max_episode_steps": 8})
        world = lanes_world(source, local)
        print("pids", *(process.pid for process in world.env._host.env.processes), flush=True)
        agent = world.join({})
        agent.reset({"seed": pack_tensor([3, 11])}, False)
        agent.begin()
        observation, infos = local.reset(seed=[3, 11])
        local.action_space.seed(0)
        for step in range(30):
            assert_identical(observation_of(agent), observation)
            assert_identical(info_of(agent), infos)
            if step == 13:
                agent.reset({"reset_mask": pack_tensor([True, False]), "seed": pack_tensor([5, -1])}, True)
                agent.begin()
                observation, infos = local.reset(seed=[5, None], options={"reset_mask": np.array([True, False])})
                continue
            actions = local.action_space.sample()
            act(agent, actions)
            observation, reward, terminated, truncated, infos = local.step(actions)
            assert_identical(look(agent, "reward", "terminated", "truncated"), [reward, terminated, truncated])
        error = None
        try:
            direct_world(gym_source(TAXI), {"num_envs": pack_tensor(2), "kwargs.altitude": pack_tensor(1),
                                                "vectorization_mode": pack_tensor("async")})
        except Exception as caught:
            error = caught
        print("error", type(error).__name__, error.code.name, "altitude" in error.message, flush=True)
        world.close()
        children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        alive = [command for command in children if "spawn_main" in command]
        print("lanes left", len(alive), flush=True)


    if __name__ == "__main__":
        main()
"""


def test_lanes_in_processes_of_their_own_play_as_lanes_in_this_one_and_all_end(tmp_path):
    script = tmp_path / "lanes.py"
    script.write_text(textwrap.dedent(ASYNC))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "error RequestError INVALID_ARGUMENT True"
    assert lines[2] == "lanes left 0"
    assert not [pid for pid in lines[0].split()[1:] if psutil.pid_exists(int(pid))]


def test_a_space_that_lanes_hold_is_the_one_of_a_single_environment():
    world = world_of(SyncVectorEnv([lambda: CountingEnv(action_space=spaces.Box(-1, 1, (2,)))] * 3))
    agent = world.join({})
    assert agent.actions[1].describe() == "FLOAT of shape [3, 2], min -1., max 1."
    assert [agent.observations[uid].shape for uid in (1, 2, 3, 4, 5)] == [(3, 2), (3,), (3,), (3,), (3,)]
    world.close()
