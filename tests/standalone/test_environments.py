"""The standalone server: environments at the other end equal local ones, also those of older interfaces."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, make_vec_remote
from bridge.errors import ConnectionLostError, EnvironmentFailedError, RefusedError
from bridge.testing import EVERY_SPACE, make_info
from bridge.wrappers import BlockingReset
from tests.standalone.served import ENVS, OLD
from tests.standalone_envs import Numbered, Remarkable, every_space
from tests.standalone_server import DEADLINE, FILE, standalone
from tests.support import assert_identical, assert_same_space, sampled


def play(remote, local, steps, seed=3):
    """Hold two environments against each other, step by step."""
    local.action_space.seed(seed)
    assert_identical(remote.reset(seed=seed), local.reset(seed=seed))
    for _ in range(steps):
        action = local.action_space.sample()
        mine, theirs = remote.step(action), local.step(action)
        assert_identical(mine, theirs)
        if mine[2] or mine[3]:
            assert_identical(remote.reset(), local.reset())


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1"])
def test_a_remote_environment_equals_the_local_one(env_id):
    with (
        standalone(f"gymnasium:{env_id}") as server,
        make_remote(server.url) as remote,
        gymnasium.make(env_id) as local,
    ):
        assert_same_space(remote.observation_space, local.observation_space)
        assert_same_space(remote.action_space, local.action_space)
        assert remote.spec.id == local.spec.id
        play(remote, local, 200)


def is_served(space):
    """True if a space is of the kinds that the file names, all through."""
    if isinstance(space, spaces.Dict):
        return all(isinstance(key, (str, int)) and is_served(item) for key, item in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(map(is_served, space.spaces))
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)
    return isinstance(space, kinds)


SERVED_SPACES = [name for name, make in EVERY_SPACE.items() if is_served(make())]


@pytest.mark.parametrize("name", sampled(SERVED_SPACES, 3))
def test_spaces_are_exact_and_samples_equal(name, zoo):
    local = every_space(name)
    with make_remote(zoo.url, env_kwargs={"space": name}) as remote:
        assert_same_space(remote.observation_space, local.observation_space)
        assert_same_space(remote.action_space, local.action_space)
        play(remote, local, 12)


@pytest.mark.parametrize("kind", ["Sequence", "Graph", "OneOf"])
def test_a_space_that_is_not_served_is_refused_by_name(kind, zoo):
    name = next(name for name, make in EVERY_SPACE.items() if type(make()).__name__ == kind)
    with pytest.raises(
        RefusedError, match=rf"observation is a {kind}, which this server does not serve; it serves Box"
    ):
        make_remote(zoo.url, env_kwargs={"space": name})


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_equal_local_ones(lanes, cartpole):
    envs = BlockingReset(make_vec_remote(f"{cartpole.url}?num_envs={lanes}"))
    local = gymnasium.make_vec("CartPole-v1", lanes, vectorization_mode="sync")
    local.action_space.seed(0)
    assert_same_space(envs.single_observation_space, local.single_observation_space)
    for seed in (5, list(range(7, 7 + lanes))):
        assert_identical(envs.reset(seed=seed), local.reset(seed=seed))
        for _ in range(100):
            actions = local.action_space.sample()
            mine, theirs = envs.step(actions), local.step(actions)
            assert_identical(mine[:4], theirs[:4])
    envs.close()
    local.close()


def test_lanes_of_the_command_line_and_some_of_them_reset():
    with standalone("CartPole-v1", "--num-envs", "3") as server:
        envs, local = make_vec_remote(server.url), gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
        assert envs.num_envs == 3
        envs, mask = BlockingReset(envs), np.array([False, True, False])
        assert_identical(envs.reset(seed=1), local.reset(seed=1))
        assert_identical(envs.step(np.array([0, 1, 0]))[:4], local.step(np.array([0, 1, 0]))[:4])
        options = {"reset_mask": mask}
        assert_identical(
            envs.reset(seed=[None, 8, None], options=options), local.reset(seed=[None, 8, None], options=options)
        )
        assert_identical(envs.step(np.array([1, 1, 1]))[:4], local.step(np.array([1, 1, 1]))[:4])
        envs.close()
        local.close()


@pytest.mark.parametrize("name", ["text", "dict", "tuple_nested", "multi_discrete_2d", "box_uint16"])
def test_lanes_of_other_spaces_equal_local_ones(name, zoo):
    remote = make_vec_remote(f"{zoo.url}?num_envs=2", env_kwargs={"space": name})
    envs, local = BlockingReset(remote), gymnasium.vector.SyncVectorEnv([lambda: every_space(name)] * 2)
    local.action_space.seed(0)
    assert_identical(envs.reset(seed=1)[0], local.reset(seed=1)[0])
    for _ in range(20):
        actions = local.action_space.sample()
        assert_identical(envs.step(actions)[:4], local.step(actions)[:4])
    envs.close()


def test_infos_options_seeds_and_the_order_of_keys_travel():
    options = make_info(np.random.default_rng(0), 1)
    with standalone(f"{ENVS}:Remarkable") as server, make_remote(server.url) as remote:
        local = Remarkable()
        for seed in (0, 2**62, 2**63, 2**70):
            mine, theirs = (env.reset(seed=seed, options=options) for env in (remote, local))
            assert_identical(mine, theirs)
            assert list(mine[0]) == list(theirs[0])
            assert type(mine[0]["a"]) is type(theirs[0]["a"]) is int
        for _ in range(5):
            mine, theirs = remote.step(0), local.step(0)
            assert_identical(mine, theirs)
            assert [type(item) for item in mine[1:4]] == [float, bool, bool]
        assert remote.metadata["render_fps"] == 7
        assert "a class" not in remote.metadata


def test_infos_and_frames_of_lanes_travel():
    with standalone(f"{ENVS}:Numbered", "--num-envs", "2") as server:
        envs = make_vec_remote(server.url, render_mode="rgb_array")
        local, blocking = gymnasium.vector.SyncVectorEnv([Numbered, Numbered]), BlockingReset(envs)
        assert_identical(blocking.reset(seed=1), local.reset(seed=1))
        for _ in range(7):
            assert_identical(blocking.step(np.array([0, 1])), local.step(np.array([0, 1])))
        assert [frame.shape for frame in envs.render()] == [(4, 5, 3)] * 2
        envs.close()


def test_frames_are_drawn():
    with standalone(f"{ENVS}:Remarkable") as server, make_remote(server.url, render_mode="rgb_array") as remote:
        assert remote.render_mode == "rgb_array"
        with pytest.raises(RefusedError, match="no frame before the first Step"):
            remote.render()
        remote.reset()
        remote.step(1)
        assert_identical(remote.render(), np.full((4, 5, 3), 1, np.uint8))


def test_what_does_not_travel_is_told_once():
    with standalone(f"{ENVS}:Talkative") as server, make_remote(server.url) as remote:
        with pytest.warns(RuntimeWarning, match="is of type float64, and comes as an array of float32"):
            observation, _ = remote.reset()
        assert_identical(observation, np.array([0, 0.1], np.float32))
        with pytest.warns(RuntimeWarning) as told:
            info = remote.step(0)[4]
        assert len(told) == 2
        assert info == {"list": [1, None], "kept": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            remote.step(0)


def test_the_log_has_nothing_that_a_terminal_would_obey(capfd):
    arguments = ["--env-kwargs", r"text='\x1b]0;title\x07'"]
    with standalone(f"{ENVS}:Failing", *arguments) as server, make_remote(server.url) as remote:
        remote.reset()
        with pytest.raises(EnvironmentFailedError, match="title"):
            remote.step(0)
    told = capfd.readouterr().err
    assert "?]0;title?" in told
    assert all(each.isprintable() or each == "\n" for each in told)


@pytest.mark.parametrize(("text", "told"), [("on purpose", "on purpose"), ("a lone \udcff", r"a lone \\udcff")])
def test_the_error_of_an_environment_is_named_and_the_server_goes_on(text, told):
    """D-2."""
    arguments = ["--env-kwargs", f"text={text!a}"]
    with standalone(f"{ENVS}:Failing", *arguments) as server, make_remote(server.url) as remote:
        remote.reset()
        for _ in range(2):
            with pytest.raises(EnvironmentFailedError, match=f"ZeroDivisionError in step: {told}"):
                remote.step(0)
        remote.reset()


def test_an_environment_that_is_interrupted_ends_the_connection_and_not_the_server():
    with standalone(f"{ENVS}:Interrupted") as server, make_remote(server.url) as remote:
        for _ in range(2):
            remote.reset()
            with pytest.raises(ConnectionLostError, match="the environment was interrupted"):
                remote.step(0)


def test_lanes_that_cannot_all_be_made_leave_none_open(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    with standalone(f"{ENVS}:TwoAtATime", "--env-kwargs", f"folder={folder}") as server:
        with pytest.raises(EnvironmentFailedError, match="there are two already"):
            make_vec_remote(f"{server.url}?num_envs=3")
        assert [path.name for path in folder.iterdir()] == ["first"], "only the server's own environment is open"
        make_vec_remote(server.url).close()


def test_a_limit_with_a_wrong_name_is_refused():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import serve_env; serve_env.serve(None, limits=serve_env.StandaloneLimits(max_envs=1))",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=FILE.parent,
        check=False,
    )
    assert "unexpected keyword argument 'max_envs'" in done.stderr


# Older interfaces


def test_four_values_seed_and_a_reset_without_info_are_translated():
    with standalone(f"{OLD}:Walk") as server, make_remote(server.url) as remote:
        generator = np.random.RandomState(11)
        assert_identical(remote.reset(seed=11), (np.array([0, generator.uniform(-1, 1)]), {}))
        for position, ends in ((2, False), (4, False), (6, True)):
            observation, reward, terminated, truncated, info = remote.step(2)
            assert_identical(observation, np.array([position, generator.uniform(-1, 1)]))
            assert (reward, terminated, truncated, info) == (1.0, ends, False, {"seeds": [11]})
        remote.reset(options={})
        with pytest.raises(EnvironmentFailedError, match="unexpected keyword argument 'options'"):
            remote.reset(options={"level": 3})


def test_the_wrapper_says_what_is_truncation():
    with standalone(f"{OLD}:limited_walk") as server, make_remote(server.url) as remote:
        remote.reset(seed=1)
        flags = [remote.step(1)[2:4] for _ in range(4)]
        assert flags == [(False, False)] * 3 + [(False, True)]
        remote.reset()
        assert [remote.step(2)[2:4] for _ in range(3)][-1] == (True, False)
    with standalone(f"{OLD}:limited_walk", "--env-kwargs", "steps=3") as server, make_remote(server.url) as remote:
        remote.reset()
        *_, (*flags, info) = [remote.step(2)[2:] for _ in range(3)]
        assert flags == [True, False]  # it would have ended by itself
        assert info["TimeLimit.truncated"] is False


def test_lanes_of_older_environments_begin_anew_by_themselves():
    with standalone(f"{OLD}:limited_walk", "--num-envs", "2") as server:
        envs = BlockingReset(make_vec_remote(server.url))
        observations, _ = envs.reset(seed=[4, 9])
        assert_identical(observations[:, 1], np.array([np.random.RandomState(seed).uniform(-1, 1) for seed in (4, 9)]))
        found = [envs.step(np.array([1, 2])) for _ in range(5)]
        assert [list(step[0][:, 0]) for step in found] == [[1, 2], [2, 4], [3, 6], [4, 0], [0, 2]]
        assert [list(step[2]) for step in found][2:] == [[False, True], [False, False], [False, False]]
        assert [list(step[3]) for step in found][2:] == [[False, False], [True, False], [False, False]]
        envs.close()


def test_an_older_render_is_given_its_mode():
    with standalone(f"{OLD}:limited_walk") as server:
        for mode in (None, "rgb_array"):
            with make_remote(server.url, render_mode=mode) as remote:
                assert remote.metadata["render_modes"] == ["rgb_array"]
                remote.reset()
                assert_identical(remote.render(), np.full((2, 3, 3), 7, np.uint8))
