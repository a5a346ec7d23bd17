"""A server that means harm: what it declares and says costs our client little, and ends in an error that says so."""

import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb

import bridge
from bridge.errors import Code, PeerError, RefusedError, RemoteError, TensorError
from tests.scripted_server import Refuse, ScriptedServer

ACTION = pb.TensorSpec(name="action", dtype=pb.INT64, min={"int64s": {"array": [0]}}, max={"int64s": {"array": [3]}})
REWARD = pb.TensorSpec(name="reward", dtype=pb.DOUBLE)


def specs_of(*observations):
    named = dict(enumerate(observations, start=10))
    return pb.ActionObservationSpecs(actions={1: ACTION}, observations={**named, 2: REWARD})


def observation(name="observation", shape=(), dtype=pb.FLOAT):
    return pb.TensorSpec(name=name, shape=shape, dtype=dtype)


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
    with ScriptedServer(specs) as server, pytest.raises((PeerError, TensorError), match=said):
        bridge.make_remote(server.url, timeout=20)


class Talks(ScriptedServer):
    """Refuses to make a world with a text of 3 MB that a terminal would obey."""

    def answer(self, kind, request):
        if kind == "join_world":
            raise Refuse(int(Code.INVALID_ARGUMENT), "gone \x1b[2J\u202e" + "x\x07" * 1_500_000)
        return super().answer(kind, request)


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


def test_an_error_of_many_lines_stays_one():
    error = RemoteError("grpc://a:1", "ValueError: no\n  File x\tline 1")
    assert str(error) == "grpc://a:1: ValueError: no\n  File x\tline 1"
