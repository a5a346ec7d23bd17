"""A server that means harm: what it declares and says costs our client little, and ends in an error that says so."""

import contextlib
import itertools
import re
import warnings

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb

import bridge
from bridge import serve_gym
from bridge.cli import main
from bridge.core.encoding import values
from bridge.errors import PeerError, RefusedError, RemoteError, TensorError
from bridge.pb import bridge_pb2
from bridge.testing import CountingEnv
from tests.hostile_servers import HOSTILE, Foreign, Relay, Talks, misdescribed, misreported, observation, specs_of
from tests.support import sampled


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        (specs_of(observation(shape=[10**8])), r"at most 512 MiB, got one of shape \[100000000\] and dtype float32"),
        (specs_of(observation(shape=[5 * 10**8], dtype=pb.UINT8)), "at most 512 MiB"),
        (specs_of(observation(shape=[2**20, 2**20, 2**20])), "at most 512 MiB"),
        (specs_of(*(observation(f"x.{index}", [2**14]) for index in range(4000))), "at most 512 MiB"),
        (specs_of(*(observation(f"x{index}") for index in range(5000))), "at most 4096 specs .* got 5000"),
        (specs_of(observation(".".join("a" * 5000))), "has more than 64 levels"),
    ],
    ids=["large", "larger", "too large for an index", "many large", "many", "deep"],
)
def test_what_it_declares_is_refused_before_memory_is_taken(specs, said):
    with Foreign(specs) as server, pytest.raises((PeerError, TensorError), match=said):
        bridge.make_remote(server.url, timeout=20)


def test_what_it_says_is_short_and_harmless_to_a_terminal():
    with Talks(specs_of(observation())) as server, pytest.raises(RefusedError) as caught:
        bridge.make_remote(server.url, timeout=20)
    text = str(caught.value)
    assert len(text) < 10_000
    assert "gone \N{REPLACEMENT CHARACTER}[2J" in text
    assert "more characters" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    "reward", [pb.Tensor(protos={"array": [{"type_url": "x"}]}), pb.Tensor(strings={"array": "x"})]
)
def test_a_reward_that_is_no_number_is_told_as_the_servers_mistake(reward):
    def step(request, number):
        return pb.StepResponse(state=pb.RUNNING, observations={10: pb.Tensor(floats={"array": [0.5]}), 2: reward})

    with Foreign(specs_of(observation()), step=step) as server:
        env = bridge.make_remote(server.url, timeout=20)
        with pytest.raises(PeerError, match="its observations cannot be read"):
            env.reset()
        env.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_envs", "many"),
        ("num_envs", -3),
        ("num_envs", 10**9),
        ("metadata", [1]),
        ("spec", [1]),
        ("reward_space", "no space"),
        ("fps", ["fast"]),
        ("episode_uid", "one"),
        ("episode_uid", -1),
        ("episode_uid", 0),
        ("episode_uid", 1),  # the action of the specs
        ("episode_uid", 2.0),
        ("episode_uid", [1]),
    ],
)
def test_a_world_that_cannot_be_is_told_as_the_servers_mistake(key, value):
    with (
        # So fast that a round trip is longer than a frame, and Steps are to be in flight.
        serve_gym("CartPole-v1", fps={"fps": 50, "episode_uid": 10_000}.get(key)) as server,
        misdescribed(server.url, f"world.{key}", value) as relay,
        pytest.raises(PeerError, match="cannot be read"),
    ):
        bridge.make_vec_remote(relay.url, timeout=20)


@pytest.mark.parametrize("results", [0, 3])
def test_a_call_that_has_not_one_result_for_each_lane_is_told_as_the_servers_mistake(results):
    def change(kind, response):
        if kind == "extension":
            answer = bridge_pb2.CallResponse(results=[values.to_value(1)] * results)
            response.extension.value = answer.SerializeToString()

    with serve_gym("CartPole-v1", num_envs=2) as server, Relay(server.url, change) as relay:
        envs = bridge.make_vec_remote(relay.url, timeout=20)
        with pytest.raises(PeerError, match=f"a result for each of 2 lanes, got {results}"):
            envs.call("gravity")
        envs.close()
    with serve_gym("CartPole-v1") as server, Relay(server.url, change) as relay:
        env = bridge.make_remote(relay.url, timeout=20)
        env.reset()
        with pytest.raises(PeerError, match=f"a result for each of 1 lanes, got {results}"):
            env.call("gravity")
        env.close()


OUTSIDE, NO_OBSERVATION = {"episode": 1, "lane": 7}, {"episode": 1, "lane": 0, "final_obs": 1}


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("records", ["text", [1], ["text"], [OUTSIDE], [NO_OBSERVATION]])
def test_records_that_cannot_be_read_cost_the_other_servers_nothing(lanes, records):
    options = {"num_envs": lanes, "fps": 200}
    with (
        serve_gym("CartPole-v1", **options) as one,
        serve_gym("CartPole-v1", **options) as two,
        misreported(two.url, "episodes", records) as relay,
    ):
        options = {"on_lost": "continue", "wait": "now", "timeout": 20}
        envs = bridge.make_vec_remote([one.url, relay.url], blocking=True, **options)
        envs.reset()
        told = {}
        while "error" not in told:
            told = envs.step(envs.action_space.sample())[4]
        assert "its ended episodes cannot be read" in told["error"][-1]
        assert told["error"][0] is None
        for _ in range(3):  # drops answers that hold such records
            envs.reset()
            envs.step_async(envs.action_space.sample())
            envs.env.cancel()
        envs.close()


def test_notes_without_end_are_told_a_hundred_times():
    notes = bridge_pb2.Value(notes=[f"{number} " + "x" * 5000 for number in range(70)])
    with (
        serve_gym("CartPole-v1") as server,
        misreported(server.url, "info", values.with_remarks(values.encode({}), notes)) as relay,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        env = bridge.make_remote(relay.url, timeout=20)
        env.reset(seed=0)
        for _ in range(6):
            env.step(0)
        env.close()
    found = [str(warning.message) for warning in told if issubclass(warning.category, RuntimeWarning)]
    assert len(found) == 100
    assert max(map(len, found)) < 1100


def test_an_error_of_many_lines_stays_one():
    error = RemoteError("grpc://a:1", "ValueError: no\n  File x\tline 1")
    assert str(error) == "grpc://a:1: ValueError: no\n  File x\tline 1"


MIB = 1 << 20
UNREAD = "read none of 10000 answers"
ENDS = {
    "pings, never reads": UNREAD,
    "SETTINGS, never reads": UNREAD,
    "WebSocket pings, never reads": UNREAD,
    "an HTTP head without end": "no WebSocket server",
    "header fields without end": "a header block of more than 65536 bytes",
    "a table bomb": "header fields of more than 65536 bytes",
    "a compressed bomb": r"larger than max_message_bytes=\d+ once it is uncompressed",
    "an answer that dribbles": "no answer to join a world within 1 s",
    "frames of no meaning": "no answer to join a world within 1 s",
    "answers to nothing": "more characters",
}
"""How a client leaves a server that speaks to its socket."""
SLOW = ("an answer that dribbles", "frames of no meaning")
"""Servers of which only the timeout says that they mean harm."""


@pytest.mark.parametrize("name", sampled(ENDS, 2, slow=True))
def test_what_it_sends_without_end_ends_in_an_error(name):
    options = {"compression": "gzip"} if name == "a compressed bomb" else {}
    with HOSTILE[name]() as server:
        with pytest.raises(RemoteError, match=ENDS[name]) as caught:
            bridge.make_remote(server.url, timeout=1 if name in SLOW else 60, max_message_bytes=32 * MIB, **options)
        assert len(str(caught.value)) < 10_000
        if ENDS[name] == UNREAD:  # it is left soon
            assert server.left.wait(60)
            assert server.sent < 64 * MIB


@pytest.mark.parametrize(
    "name",
    [
        *sampled(ENDS, 3),  # the texts are those of the test above
        "a spec of shape [10⁸]",
        pytest.param("200,000 specs", marks=pytest.mark.slow),
        "an error of 30 MB",
    ],
)
def test_bridge_info_says_in_few_words_why_it_ends(name, capsys):
    with HOSTILE[name]() as server:
        assert main(["info", server.url, "--all", "--timeout", "1" if name in SLOW else "60"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("gymnasium-bridge: ")
    assert len(said.err) < 10_000
    assert len(said.out) < 10_000
    assert "\x1b" not in said.err + said.out


@pytest.mark.slow
def test_bridge_info_reads_no_properties_without_end(capsys):
    with HOSTILE["properties without end"]() as server:
        assert main(["info", server.url, "--all"]) == 1
    assert "it lists more than 1000 properties" in capsys.readouterr().err


def test_bridge_info_says_that_a_server_talks_nonsense(capsys):
    with HOSTILE["nonsense"]() as server:
        assert main(["info", server.url]) == 1
    error = capsys.readouterr().err
    assert "what it says of its world cannot be read" in error
    assert len(error) < 10_000


def beginnings_changed(url, change):
    """Relay a server, and change what the info of each Step says: `change(value, number)`, from number 1 on."""
    numbers, uids = itertools.count(1), []

    def relayed(kind, response):
        if kind == "join_world":
            specs = response.join_world.specs.observations
            uids.extend(uid for uid, spec in specs.items() if spec.name == "info")
        elif kind == "step":
            tensor = response.step.observations[uids[0]]
            message = bridge_pb2.Value.FromString(tensor.uint8s.array)
            change(message, next(numbers))
            tensor.uint8s.array = message.SerializeToString()
            tensor.shape[:] = [len(tensor.uint8s.array)]

    return Relay(url, relayed)


def step_until_told(envs):
    """Step CountingEnv until a step tells a mistake of the server; return what it says of it.

    A step that truncates the slot's rows says it in its infos. With `on_lost="raise"` one raises it, unless the slot
    has connected again by then. No observation is one of the episode 99, whose beginning nobody asked for.
    """
    actions = np.zeros(envs.num_envs, np.int64)
    for _ in range(50):  # slots that wait for none may have their first observations in a later step
        try:
            observations, _, terminations, truncations, infos = envs.step(actions)
        except PeerError as error:
            return [str(error)]
        assert 99 not in [row[0] for row in observations if row is not None]
        told = infos.get("final_info", infos).get("error")
        if told is not None:
            assert (terminations | truncations).all()
            return list(told)
    raise AssertionError("no step told a mistake of the server")


# What is said of the lanes 0 and 2, whose episodes ended.
BEGINNINGS = {
    "out of range": {"lanes": [0, 99]},
    "twice": {"lanes": [0, 0]},
    "another": {"lanes": [0, 1]},
    "one that goes on": {"lanes": [0, 1, 2]},
    "none": {"lanes": []},
    "the other order": {"lanes": [2, 0]},
    "no rows": {"rows": []},
    "rows of one lane": {"rows": [bytes(8)]},
    "rows of too many observations": {"rows": [bytes(16), bytes(16)]},
    "rows cut short": {"rows": [bytes(15)]},
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_beginnings_of_wrong_lanes_cost_the_world_and_change_no_observation(name):
    """A server says with a Step how lanes began their next episodes."""
    made = itertools.count()

    def change(begun):
        for field, items in BEGINNINGS[name].items():
            begun.ClearField(field)
            getattr(begun, field).extend(items)

    with (
        # Of three lanes the first and the last end in their second step.
        serve_gym(lambda: CountingEnv(2 if next(made) % 3 != 1 else 9), num_envs=3) as server,
        beginnings_changed(
            server.url, lambda message, number: message.HasField("begun") and change(message.begun)
        ) as relay,
        contextlib.closing(
            bridge.make_vec_remote(relay.url, blocking=True, autoreset_mode="SameStep", on_lost="raise", timeout=20)
        ) as envs,
    ):
        envs.reset()
        zeros = np.zeros(3, np.int64)
        assert envs.step(zeros)[0].tolist() == [[1, 1]] * 3

        observations, _, terminations, truncations, infos = envs.step(zeros)
        # Of the episodes that were cut, and none of those that the server says have begun.
        assert {episode for episode, _ in observations.tolist()} == {1}
        assert (terminations | truncations).all()
        assert re.search(r"how (the )?lanes", infos["error"][1])


def say_begun(message, lanes):
    """Say in an info that some lanes of CountingEnv have begun an episode of the number 99."""
    rows = np.array([[99, 0]] * len(lanes), np.int64).tobytes()
    message.begun.CopyFrom(bridge_pb2.Value.Begun(lanes=lanes, rows=[rows]))


# How environments are made and stepped that ask for no such thing; what comes of it is told by the step, or raised.
UNASKED = {
    "in the next step": {"blocking": True, "on_lost": "raise"},
    "in the next step, and waits": {"blocking": True},
    "by a reset of the caller": {"blocking": True, "autoreset_mode": "Disabled", "on_lost": "raise"},
    "in the same step by two requests": {
        "blocking": True,
        "autoreset_mode": "SameStep",
        "on_lost": "continue",
        "step_timeout": 15.0,
    },
    "by slots that wait for none": {},
}


@pytest.mark.parametrize(
    ("way", "lanes"),
    [*((way, [0, 1, 2]) for way in UNASKED), *(("in the next step", lanes) for lanes in ([0], [], [7]))],
)
def test_beginnings_that_nobody_asked_for_are_told_as_the_servers_mistake(way, lanes):
    """A server of ours tells no beginnings to who has not asked for them."""
    said = rf"expected no lanes that begin anew within this answer, got the lanes {re.escape(str(lanes))}"
    options = UNASKED[way]
    with (
        serve_gym(lambda: CountingEnv(9), num_envs=3) as server,
        beginnings_changed(server.url, lambda message, number: number == 3 and say_begun(message, lanes)) as relay,
        contextlib.closing(bridge.make_vec_remote(relay.url, timeout=20, **options)) as envs,
    ):
        zeros = np.zeros(3, np.int64)
        envs.reset()
        envs.step(zeros)
        assert all(re.search(said, error) for error in step_until_told(envs))


def test_beginnings_told_to_a_single_environment_are_told_as_the_servers_mistake():
    with (
        serve_gym(lambda: CountingEnv(9)) as server,
        beginnings_changed(server.url, lambda message, number: number == 3 and say_begun(message, [0])) as relay,
    ):
        env = bridge.make_remote(relay.url, timeout=20)
        env.reset()
        env.step(0)
        with pytest.raises(
            PeerError, match=r"expected no lanes that begin anew within this answer, got the lanes \[0\]"
        ):
            env.step(0)
        env.close()


def test_beginnings_told_in_real_time_are_told_as_the_servers_mistake():
    with (
        serve_gym(lambda: CountingEnv(10**6), num_envs=2, fps=100) as server,
        beginnings_changed(server.url, lambda message, number: number == 4 and say_begun(message, [0, 1])) as relay,
    ):
        envs = bridge.make_vec_remote(relay.url, blocking=True, on_lost="raise", timeout=20)
        envs.reset()
        said = r"expected no lanes that begin anew within this answer, got the lanes \[0, 1\]"
        assert all(re.search(said, error) for error in step_until_told(envs))
        envs.close()


@pytest.mark.parametrize("lanes", [[], [1], [0, 1, 2]])
def test_beginnings_without_an_end_are_told_as_the_servers_mistake(lanes):
    """The client has asked for beginnings in the step that ends an episode, but none has ended."""
    with (
        serve_gym(lambda: CountingEnv(9), num_envs=3) as server,
        beginnings_changed(server.url, lambda message, number: number == 3 and say_begun(message, lanes)) as relay,
        contextlib.closing(
            bridge.make_vec_remote(relay.url, blocking=True, autoreset_mode="SameStep", on_lost="raise", timeout=20)
        ) as envs,
    ):
        zeros = np.zeros(3, np.int64)
        envs.reset()
        envs.step(zeros)

        observations, _, _, truncations, infos = envs.step(zeros)
        assert {episode for episode, _ in observations.tolist()} == {1}
        assert truncations.all()
        said = rf"how the lanes {re.escape(str(lanes))} began, where \[\] have ended"
        assert all(re.search(said, error) for error in infos["error"])


def test_beginnings_told_with_a_reset_are_told_as_the_servers_mistake():
    """Also where the steps before it have asked for them."""
    with (
        serve_gym(lambda: CountingEnv(9), num_envs=3) as server,
        beginnings_changed(server.url, lambda message, number: number == 3 and say_begun(message, [0, 1, 2])) as relay,
    ):
        envs = bridge.make_vec_remote(relay.url, blocking=True, autoreset_mode="SameStep", timeout=20)
        envs.reset()
        envs.step(np.zeros(3, np.int64))
        observations, infos = envs.reset()
        assert observations.tolist() == [[1, 1]] * 3, "the last ones, and none of an episode numbered 99"
        said = r"expected no lanes that begin anew within this answer, got the lanes \[0, 1, 2\]"
        assert all(re.search(said, error) for error in infos["error"])
        envs.close()


def test_beginnings_within_beginnings_are_told_as_the_servers_mistake():
    def change(message, number):
        if message.HasField("begun"):
            inner = bridge_pb2.Value.FromString(message.begun.info or values.EMPTY_DICT)
            say_begun(inner, [0])
            message.begun.info = inner.SerializeToString()

    with (
        serve_gym(lambda: CountingEnv(2), num_envs=3) as server,
        beginnings_changed(server.url, change) as relay,
    ):
        envs = bridge.make_vec_remote(relay.url, blocking=True, autoreset_mode="SameStep", on_lost="raise", timeout=20)
        envs.reset()
        said = r"expected no lanes that begin anew within this answer, got the lanes \[0\]"
        assert all(re.search(said, error) for error in step_until_told(envs))
        envs.close()
