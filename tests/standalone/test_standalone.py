"""The standalone server: its file, the protocol, and connections."""

import ast
import io
import runpy
import subprocess
import sys
import threading
import tokenize

import grpc
import numpy as np
import pytest
from dm_env_rpc.v1 import compliance, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1.error import DmEnvRpcError

import bridge
from bridge import TLS, make_remote, make_vec_remote
from bridge.core.encoding.values import encode
from bridge.errors import EnvironmentFailedError, RefusedError, RemoteError
from bridge.testing import CountingEnv, check_server, make_certificates
from tests.ends.compliance import INVALID, SPACES, least, methods, run, run_reset
from tests.peers import METHOD, SERVICE, PublicClient
from tests.standalone_server import DEADLINE, FILE, standalone
from tests.support import assert_identical, sampled, until

MOST_LINES = 1000


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


def test_a_plain_reset_after_one_that_failed_has_none_of_its_settings():
    with standalone("tests.core.client.test_reset_options:Busy") as server, make_remote(server.url) as env:
        with pytest.raises(EnvironmentFailedError, match="busy"):
            env.reset(seed=7, options={"level": 3})
        for _ in range(2):
            _, info = env.reset()
            assert (info["seed"], info["options"]) == (-1, {})
