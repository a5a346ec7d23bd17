"""Ends of episodes, and resets."""

import numpy as np
import pytest

from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.server.session_states import SessionState
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import FailingEnv
from tests.core.server.sessions.peers import Server, WildEnv


@pytest.mark.parametrize(
    ("terminated", "truncated", "state", "discount"),
    [
        (True, False, "TERMINATED", 0.0),
        (False, True, "INTERRUPTED", 1.0),
        (True, True, "TERMINATED", 0.0),
        (False, False, "RUNNING", 1.0),
    ],
)
def test_ends_are_told_apart(terminated, truncated, state, discount):
    # D-13, D-21: the discount is 0.0 only when terminated
    server = Server(WildEnv)
    peer = server.connect()
    peer.join()
    peer.play(None, [])
    env = server.envs[0]
    env.result = (env.good(), 2.5, terminated, truncated, {})
    assert peer.play(0, ["reward", "discount", "terminated", "truncated"]) == (
        *(state, 2.5, discount),
        *(terminated, truncated),
    )
    assert peer.play(0, [])[0] == "RUNNING"


def test_an_episode_begins_by_itself_after_an_end_with_reward_zero(server, peer):
    # D-9, D-13
    peer.join()
    seen = [peer.play() for _ in range(13)]
    assert seen[0] == ("RUNNING", [1, 0], 0.0, 1.0)
    assert seen[5] == ("TERMINATED", [1, 5], 5.0, 0.0)
    assert seen[6] == ("RUNNING", [2, 0], 0.0, 1.0)
    assert seen[12] == ("RUNNING", [3, 0], 0.0, 1.0)
    assert server.envs[-1].episode == 3


def seed_of(peer):
    """The seed that the environment's last reset was given."""
    response = peer.ask(step={"requested_observations": [peer.observations["info"]]})
    return values.decode(unpack_tensor(response.step.observations[peer.observations["info"]]).tobytes())["seed"]


def test_reset_ends_the_sequence_and_resets_the_environment_once(server, peer):
    # D-14
    peer.join()
    peer.play()
    peer.play()
    specs = peer.ask(reset={"settings": {"seed": pack_tensor(5)}}).reset.specs
    assert specs.observations
    assert peer.state is SessionState.INTERRUPTED
    assert server.envs[-1].episode == 1
    assert seed_of(peer) == 5
    assert server.envs[-1].episode == 2


def test_reset_without_settings_in_a_non_running_state_is_a_no_op(server, peer):
    # D-14: also where settings wait already
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.ask(reset={})
    assert peer.state is SessionState.JOINED
    assert seed_of(peer) == 5
    assert server.envs[-1].episode == 1
    while peer.play()[0] == "RUNNING":
        pass
    assert peer.ask(reset={}).reset.specs.observations
    assert peer.state is SessionState.TERMINATED
    assert seed_of(peer) is None
    assert server.envs[-1].episode == 2


def test_reset_while_running_forgets_settings_of_before(peer):
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    assert seed_of(peer) == 5
    peer.ask(reset={"settings": {"seed": pack_tensor(6)}})
    peer.ask(reset={"settings": {"seed": pack_tensor(np.uint8(7))}})
    assert seed_of(peer) == 7
    peer.ask(reset={})
    assert seed_of(peer) is None


def test_a_seed_is_kept_when_the_reset_of_the_environment_fails():
    # D-2: the Step that failed can be sent again
    peer = Server(lambda: FailingEnv(fail_in_reset=1)).connect()
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.refused(Code.INTERNAL, step={})
    assert seed_of(peer) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sed": pack_tensor(1)}, "unknown Reset settings sed; the settings here are: seed, options"),
        ({"seed": pack_tensor(-1)}, "non-negative integer scalar"),
        ({"seed": pack_tensor(1.0)}, "non-negative integer scalar"),
        ({"seed": pack_tensor([1])}, "non-negative integer scalar"),
        ({"seed": pack_tensor("one")}, "non-negative integer scalar"),
        ({"seed": pb.Tensor()}, "'seed' holds nothing"),
        ({"options": pack_tensor(1)}, "'options' as uint8 bytes"),
        ({"options": pack_tensor(np.uint8([255]))}, "expected an encoded value"),
        ({"options": pack_tensor(np.frombuffer(values.encode([1]), np.uint8))}, "options to be a dict, got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reset_settings_that_are_wrong_are_errors(settings, words, peer):
    # D-2, D-14
    peer.join()
    peer.ask(reset={"settings": {"seed": pack_tensor(5)}})
    peer.refused(Code.INVALID_ARGUMENT, words, reset={"settings": settings})
    assert seed_of(peer) == 5
