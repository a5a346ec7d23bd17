"""The server that `bridge standalone` prints, in this Python: one file, without the package that prints it."""

import ast
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import tokenize
import warnings
from pathlib import Path

import grpc
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import compliance, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1.error import DmEnvRpcError
from gymnasium import spaces

import bridge
from bridge import TLS, make_remote, make_vec_remote
from bridge.core.encoding.values import encode
from bridge.errors import ConnectionLostError, EnvironmentFailedError, RefusedError, RemoteError
from bridge.testing import EVERY_SPACE, CountingEnv, check_server, make_certificates, make_info
from bridge.wrappers import BlockingReset
from tests.ends.test_compliance import INVALID, SPACES, least, methods, run, run_reset
from tests.peers import METHOD, SERVICE, PublicClient
from tests.preloaded import run as run_program
from tests.standalone_envs import Numbered, Remarkable, every_space
from tests.standalone_server import DEADLINE, FILE, Output, standalone
from tests.support import assert_identical, assert_same_space, sampled, until

ENVS = "tests.standalone_envs"
OLD = "tests.old_style_env"
MOST_LINES = 1000


@pytest.fixture(scope="module")
def cartpole():
    with standalone("CartPole-v1") as server:
        yield server


@pytest.fixture(scope="module")
def zoo():
    with standalone(f"{ENVS}:every_space", "--env-kwargs", "space=box_float32") as server:
        yield server


# The file


def test_the_command_prints_the_file():
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "standalone"], capture_output=True, timeout=DEADLINE, check=True
    )
    assert done.stdout.decode() == FILE.read_text()


def test_the_file_is_of_python_3_7_and_ascii_and_not_too_long():
    text = FILE.read_text("ascii")
    tree = ast.parse(text, feature_version=(3, 7))
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    assert 500 < len(lines) <= MOST_LINES


def test_the_file_needs_nothing_but_three_packages_and_says_the_version():
    tree = ast.parse(FILE.read_text())
    roots = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    roots |= {node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {root for root in roots if root not in sys.stdlib_module_names} == {"google", "grpc", "numpy"}
    assert f'VERSION = "{bridge.__version__}"' in FILE.read_text()


def test_it_shares_a_process_with_both_libraries():
    """Its messages are in a pool of their own."""
    code = (
        "import dm_env_rpc.v1.dm_env_rpc_pb2, bridge.pb.bridge_pb2, serve_env; print(serve_env.pb.Tensor().ByteSize())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, cwd=FILE.parent, check=True
    )
    assert done.stdout.strip() == "0", done.stderr


# The protocol


def test_it_passes_every_check_strictly(cartpole):
    """D-1 to D-21 and D-25."""
    report = check_server(cartpole.url, strict=True, required_actions=["action"])
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "name",
    [
        "box_per_element",
        "box_half_bounded",
        "discrete_start",
        "multi_discrete_2d",
        "multi_binary",
        "dict",
        "tuple_nested",
    ],
)
def test_it_passes_every_check_over_spaces(name, zoo):
    report = check_server(
        zoo.url,
        strict=True,
        create_settings={"kwargs.space": name},
        only=["D-7", "D-9", "D-10", "D-11", "D-19", "D-20"],
    )
    assert report.ok, str(report)


@pytest.fixture(scope="module")
def endless():
    with standalone("tests.ends.test_compliance:Endless") as server:
        yield server


@pytest.fixture
def client(endless):
    client = PublicClient(endless)
    yield client
    client.close()


def create(client, space):
    settings = {"kwargs.space": tensor_utils.pack_tensor(space)}
    return client.send(public.CreateWorldRequest(settings=settings)).world_name


@pytest.mark.parametrize("method", methods(compliance.CreateDestroyWorld))
def test_create_and_destroy_comply(method, client):
    """D-3, D-17."""
    settings = {"required_world_settings": {}, "invalid_world_settings": INVALID, "has_multiple_world_support": True}
    run(compliance.CreateDestroyWorld, method, connection=client, **settings)


@pytest.mark.parametrize("space", sampled(SPACES, 4))
@pytest.mark.parametrize("method", methods(compliance.JoinLeaveWorld))
def test_join_and_leave_comply(method, space, client):
    """D-6, D-7, D-16."""
    name = create(client, space)
    run(compliance.JoinLeaveWorld, method, connection=client, world_name=name, invalid_join_settings=INVALID)


# The public class casts the least double to float for an unbounded action.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("space", sampled(SPACES, 2))
@pytest.mark.parametrize("method", methods(compliance.Step))
def test_steps_comply(method, space, client):
    """D-9, D-10, D-11, D-19, D-20."""
    client.join(create(client, space))
    required = {uid: least(spec) for uid, spec in client.specs.actions.items()}
    if method == "test_first_step_actions_are_ignored":
        required = {}
    run(compliance.Step, method, connection=client, specs=client.specs, required_actions=required)


@pytest.mark.parametrize("space", sampled(SPACES, 4))
@pytest.mark.parametrize("method", methods(compliance.Reset))
def test_reset_complies(method, space, client):
    """D-8, D-14."""
    run_reset(method, client, create(client, space))


@pytest.mark.parametrize("method", methods(compliance.ResetWorld))
def test_reset_world_complies(method, client):
    """D-15."""
    run(compliance.ResetWorld, method, connection=client, world_name=create(client, "nested"))


def sessions(make, count, **limits):
    """Sessions of one server, without connections."""
    file = runpy.run_path(str(FILE))
    server = file["StandaloneServer"](file["maker_of"](make, False), limits=file["StandaloneLimits"](**limits))
    return [file["StandaloneSession"](server, False) for _ in range(count)]


def ask(session, **payload):
    return public.EnvironmentResponse.FromString(
        session.answer(public.EnvironmentRequest(**payload).SerializeToString())
    )


def test_a_reset_world_that_gave_up_takes_no_seed_from_one_that_still_waits():
    seeds = []

    class Seeded(CountingEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    player, one, other = sessions(Seeded, 3)

    def reset_world(session, seed):
        request = public.EnvironmentRequest(reset_world={"settings": {"seed": tensor_utils.pack_tensor(seed)}})
        return session.answer(request.SerializeToString())

    ask(player, join_world={})
    ask(player, step={})
    gives_up, waits = reset_world(one, 1), reset_world(other, 2)
    assert public.EnvironmentResponse.FromString(one.answer_late(gives_up)).HasField("error")
    ask(player, step={})
    assert public.EnvironmentResponse.FromString(other.answer_late(waits)).HasField("reset_world")
    ask(player, step={})
    assert seeds == [None, 2]


def test_a_reset_world_whose_client_has_gone_keeps_its_thread_no_longer():
    class Gone:
        """The gRPC context of a client that goes while its request waits."""

        def invocation_metadata(self):
            return ()

        def add_callback(self, callback):
            return True

        def send_initial_metadata(self, metadata):
            pass

        def is_active(self):
            return False

    (player,) = sessions(CountingEnv, 1, reset_world_timeout=600.0)
    server = player.server
    ask(player, join_world={})
    ask(player, step={})
    environments = threading.Thread(target=server.main.work, args=(lambda: None,))
    environments.start()
    answers = []
    request = public.EnvironmentRequest(reset_world={}).SerializeToString()
    waits = threading.Thread(target=lambda: answers.extend(server.process([request], Gone())), daemon=True)
    waits.start()
    waits.join(DEADLINE)
    server.main.interrupt()
    environments.join(DEADLINE)
    assert not waits.is_alive()
    assert public.EnvironmentResponse.FromString(answers[0]).HasField("error")
    assert player.world.waiting == []


def test_a_request_that_is_answered_after_the_end_of_its_connection_joins_no_world():
    """D-6: the thread of a connection may hold it while the connection ends."""
    gone, player = sessions(CountingEnv, 2)
    gone.close()
    assert ask(gone, join_world={}).HasField("error")
    assert ask(player, join_world={}).HasField("join_world")


def test_worlds_that_nobody_is_in_make_room_while_requests_come_without_a_pause():
    (session,) = sessions(CountingEnv, 1, max_worlds=1, idle_timeout=-1.0)
    for _ in range(2):
        assert ask(session, create_world={}).HasField("create_world")


@pytest.mark.parametrize(
    ("shape", "reason"), [([2, 2500], "does not hold 1 elements"), ([1] * 33, "expected 32 dimensions at most")]
)
def test_a_setting_of_a_few_bytes_does_not_announce_what_fills_the_memory(shape, reason):
    """D-11: one element fills the shape of a spec; a setting has none."""
    (session,) = sessions(CountingEnv, 1)
    ask(session, join_world={})
    seed = public.Tensor(int8s={"array": b"1"}, shape=shape)
    assert reason in ask(session, reset={"settings": {"seed": seed}}).error.message


@pytest.mark.parametrize("setting", ["env_id", "render_mode", "num_envs", "kwargs"])
def test_a_setting_of_create_world_that_is_of_another_kind_is_the_clients_fault(setting):
    """D-3."""
    (session,) = sessions(CountingEnv, 1)
    wrong = np.frombuffer(encode(3), np.uint8) if setting == "kwargs" else ["a", "b"]
    error = ask(session, create_world={"settings": {setting: tensor_utils.pack_tensor(wrong)}}).error
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], error.message
    assert setting in error.message


def test_an_environment_that_cannot_be_drawn_as_asked_is_closed():
    closed = []

    class Blind(CountingEnv):
        def close(self):
            closed.append(self)

    (session,) = sessions(Blind, 1)
    wanted = {"render_mode": tensor_utils.pack_tensor("rgb_array")}
    answer = ask(session, create_world={"settings": wanted})
    assert "expected an environment that takes render_mode='rgb_array'" in answer.error.message
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("settings", "lanes", "hidden"),
    [
        ({}, 1, {"discount", "terminated", "truncated", "info"}),
        ({"gymnasium": False}, 1, {"discount", "terminated", "truncated", "info"}),
        ({}, 2, {"info"}),
        ({"gymnasium": True}, 1, set()),
    ],
)
def test_other_clients_get_what_only_gymnasium_knows_where_they_ask_for_it(settings, lanes, hidden, cartpole):
    client = PublicClient(cartpole)
    asked = {"num_envs": tensor_utils.pack_tensor(lanes)}
    name = client.send(public.CreateWorldRequest(settings=asked)).world_name
    client.join(name, **settings)
    everything = {"observation", "reward", "discount", "terminated", "truncated", "info"}
    assert set(client.observations) == everything - hidden
    state, observed = client.step(*client.observations)
    assert state == public.RUNNING
    assert set(observed) == everything - hidden
    client.close()


def test_the_setting_is_a_bool(client):
    with pytest.raises(DmEnvRpcError, match="gymnasium to be a bool"):
        client.join(create(client, "nested"), gymnasium=3)


# Remote equals local


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


# Connections


def test_two_clients_play_at_a_time_and_one_that_is_gone_leaves_its_place():
    with standalone("CartPole-v1", "--max-worlds", "2") as server:
        first, second = make_remote(server.url), make_remote(server.url)
        assert_identical(first.reset(seed=0), second.reset(seed=0))
        assert_identical(first.step(1), second.step(1))
        with pytest.raises(RefusedError, match="max_worlds=2"):
            make_remote(server.url, env_id="CartPole-v1")
        first.close()
        with make_remote(server.url, env_id="CartPole-v1") as third:
            assert_identical(third.reset(seed=0)[0], second.reset(seed=0)[0])
        second.close()


@pytest.mark.parametrize("url", ["", "?world="])
def test_as_many_clients_play_as_max_worlds_says_the_one_in_the_default_world_included(url):
    with standalone("CartPole-v1", "--max-worlds", "1") as server:
        with make_remote(server.url + url) as first:
            first.reset(seed=0)
            for other in ("", "?num_envs=2"):
                with pytest.raises(RefusedError) as caught:
                    make_remote(server.url + other)
                assert "this server has max_worlds=1 worlds in use: close one of your env" in caught.value.reason
                assert "world ''" not in caught.value.reason
            with pytest.raises(RefusedError, match=r"full|max_worlds=1"):
                make_remote(f"{server.url}?world=")
            with pytest.raises(RefusedError, match="there is no world 'nope'"):
                make_remote(f"{server.url}?world=nope")
        with make_remote(f"{server.url}?world=") as second:
            second.reset(seed=0)
        with pytest.raises(RefusedError, match="max_worlds=1"):
            make_vec_remote(server.url, num_envs=2)


def test_without_worlds_of_their_own_clients_join_the_default_one():
    with standalone("CartPole-v1", "--max-worlds", "0") as server, make_remote(server.url) as first:
        first.reset(seed=0)
        with pytest.raises(RefusedError, match=r"max_worlds=0.*Nor is there room in its default world"):
            make_remote(server.url)


def test_a_full_world_tells_what_to_do():
    advice = "wait until it leaves, or create another world, if the server has room"
    with (
        standalone("CartPole-v1") as server,
        make_remote(f"{server.url}?world="),
        pytest.raises(RefusedError, match=advice),
    ):
        make_remote(f"{server.url}?world=")


def test_connections_have_a_limit():
    with standalone("CartPole-v1", "--max-connections", "1") as server:
        with make_remote(server.url), pytest.raises(RefusedError, match="max_connections=1"):
            make_remote(server.url)

        def is_free():
            try:
                make_remote(server.url).close()
            except RefusedError:
                return False
            return True

        until(is_free)


@pytest.mark.parametrize("how", ["option", "file", "variable"])
def test_a_token_is_asked_for(how, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    options = {"option": ["--token", "s3cret"], "file": ["--token-file", str(tmp_path / "token")]}.get(how, [])
    variables = {"BRIDGE_TOKEN": "s3cret"} if how == "variable" else {}
    with standalone("CartPole-v1", *options, **variables) as server:
        for wrong in (None, "other"):
            with pytest.raises(RefusedError, match=r"token is (required|wrong)"):
                make_remote(server.url, token=wrong)
        with make_remote(server.url, token="s3cret") as remote:
            remote.reset()
        # HTTP compares names of schemes without regard to case, and so do the other servers.
        for header, code in (("bearer s3cret", None), ("Basic s3cret", grpc.StatusCode.UNAUTHENTICATED)):
            with grpc.insecure_channel(server.url.removeprefix("grpc://")) as channel:
                call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter([]), metadata=[("authorization", header)])
                assert list(call) == [] if code is None else call.code() is code


def test_a_token_is_made_where_others_reach_the_port():
    with standalone("CartPole-v1", "--host", "0.0.0.0") as server:
        assert server.url.partition("?token=")[2].isalnum()  # which can follow an option
        with make_remote(server.url.replace("0.0.0.0", "127.0.0.1")) as remote:
            remote.reset()
        with pytest.raises(RefusedError, match="token is required"):
            make_remote(f"grpc://127.0.0.1:{server.port}")


@pytest.mark.parametrize("mutual", [False, True])
def test_it_speaks_tls(mutual, tmp_path):
    certs = make_certificates(tmp_path)
    options = ["--tls-certificate", str(certs["server.pem"]), "--tls-key", str(certs["server.key"])]
    options += ["--tls-client-ca", str(certs["ca.pem"])] if mutual else []
    own = {"certificate": certs["client.pem"], "key": certs["client.key"]} if mutual else {}
    with standalone("CartPole-v1", *options) as server:
        assert server.url.startswith("grpcs://")
        with make_remote(server.url, tls=TLS(ca=certs["ca.pem"], **own)) as remote:
            remote.reset()
        if mutual:
            with pytest.raises(RemoteError):
                make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)


# The command line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["NoSuchEnv-v0"], "no environment 'NoSuchEnv-v0'"),
        (["no_such_module:Env-v0"], "no_such_module:Env-v0 cannot be served: No module named 'no_such_module'"),
        (["bridge.no_such:Env-v0"], "bridge.no_such:Env-v0 cannot be served: No module named 'bridge.no_such'"),
        (["CartPole-v1", "--num-envs", "0"], "expected num_envs to be an integer from 1"),
        (["CartPole-v1", "--port", "99999"], "the port of 127.0.0.1:99999 is taken, or is no port of 1 to 65535"),
        (["CartPole-v1", "--port", "-1"], "the port of 127.0.0.1:-1 is taken, or is no port of 1 to 65535"),
        (["CartPole-v1", "--tls-key", "k.pem"], "both --tls-certificate and --tls-key"),
        (["CartPole-v1", "--env-kwargs", "gravity"], "KEY=VALUE"),
        (["CartPole-v1", "--token-file", os.devnull], "expected a token in"),
        ([f"{OLD}:WalkOverGraphs"], "observation is a Graph, which this server does not serve"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, reason):
    done = run_program(FILE, *arguments, cwd=FILE.parents[2], bare=True)
    assert done.returncode != 0
    assert reason in done.stderr, done.stderr
    assert "Traceback" not in done.stderr or "Graph" in done.stderr


@pytest.mark.parametrize("python", ["2.7", "3.5", "3.6"])
def test_an_older_python_is_told_what_is_needed(python):
    """Those before 3.6 print the line that they cannot read: it is the one that says so."""
    found = [
        *Path.home().glob(f".pyenv/versions/{python}.*/bin/python"),
        *filter(None, [shutil.which(f"python{python}")]),
    ]
    for interpreter in found[:1]:
        done = subprocess.run(
            [interpreter, str(FILE), "CartPole-v1"], capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 1
        assert "serve_env.py needs Python 3.7 or newer" in done.stderr
        assert "Traceback" not in done.stderr
    # Without the interpreter: nothing before the line is newer than Python 2.7.
    before = FILE.read_text("ascii").partition("    raise SystemExit(f")[0]
    assert not re.search(r"\bf\"|: \w+ = |:=|\basync\b|\bnonlocal\b|print\(", before)
    ast.parse(f"{before}    pass\n", feature_version=(3, 4))


def test_a_package_that_an_environment_lacks_is_named():
    """Also where a library raises an error of its own, as Gymnasium does without pygame."""
    said = "The server's Python has no module 'no_such_game': install the package that has it there."
    with standalone(f"{ENVS}:Needy") as server:
        env = make_remote(server.url)
        with pytest.raises(EnvironmentFailedError, match="DependencyNotInstalled in reset: the game is not") as caught:
            env.reset()
        assert str(caught.value).rstrip().endswith(said)
        env.close()
    command = [sys.executable, str(FILE), f"{ENVS}:Needy", "--env-kwargs", "where=construction"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=FILE.parents[2], check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(said)


def test_a_signal_while_a_result_is_handed_over_ends_the_server_in_order():
    lines = [
        "import os, signal",
        "from concurrent.futures import Future",
        "import serve_env",
        "from tests.old_style_env import Walk",
        "set_result = Future.set_result",
        "def interrupted(future, value):",
        "    set_result(future, value)",
        "    Future.set_result = set_result",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "Future.set_result = interrupted",
        "serve_env.serve(Walk, port=0)",
    ]
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as server:
        try:
            address = server.stdout.readline().strip()
            with pytest.raises(RemoteError):
                make_remote(f"grpc://{address}", timeout=5.0).close()
            _, problems = server.communicate(timeout=DEADLINE)
        finally:
            server.kill()
    assert (server.returncode, problems) == (0, "")


def test_a_connection_to_a_server_that_stops_is_told_so():
    file = runpy.run_path(str(FILE))
    server = file["StandaloneServer"](file["maker_of"](CountingEnv, False))
    server.main.end()

    class Context:
        def invocation_metadata(self):
            return ()

        def abort(self, code, text):
            raise ConnectionAbortedError(code, text)

    with pytest.raises(ConnectionAbortedError) as caught:
        list(server.process(iter(()), Context()))
    assert caught.value.args == (grpc.StatusCode.UNAVAILABLE, "this server is stopping")


def test_a_second_signal_ends_a_server_whose_environment_does_not_close():
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    code = f"import serve_env; from {ENVS} import NeverClosed; serve_env.serve(NeverClosed, port=0)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": path}) as server:
        output = Output(server)
        try:
            lines = iter(output)
            with make_remote(f"grpc://{next(lines).strip()}") as remote:  # a connection, whose thread waits
                remote.reset()
                server.send_signal(signal.SIGINT)
                assert next(lines).strip() == "closing"
                server.send_signal(signal.SIGINT)
                assert server.wait(DEADLINE) != 0
        finally:
            server.kill()
        output.close()


def test_an_engine_of_ones_own_is_served():
    """`serve` is what the file is an example of."""
    page = (FILE.parents[2] / "docs" / "environments.md").read_text()
    block = next(
        text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "serve(" in text
    )
    code = "from tests.old_style_env import Walk as MyEngine\n" + block.replace("50051", "0")
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as server:
        output = Output(server)
        try:
            with make_remote(f"grpc://{next(iter(output)).strip()}") as remote:
                remote.reset(seed=1)
                remote.step(1)
            server.send_signal(signal.SIGINT)
            assert server.wait(DEADLINE) == 0
        finally:
            server.kill()
        output.close()
