"""Steps as our own client writes them, which a running session reads without protobuf: held to the same as others."""

import numpy as np
import pytest

from bridge import RealTime
from bridge.core.encoding.step_codec import StepCodec
from bridge.core.encoding.tensors import Spec, pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, VirtualClock
from tests.core.server.sessions.peers import Server


class Failing(CountingEnv):
    """Raises as long as it is told to."""

    failing = False

    def step(self, action):
        return broken() if self.failing else super().step(action)

    def reset(self, **keywords):
        return broken() if self.failing else super().reset(**keywords)


@pytest.fixture
def server():
    return Server(Failing)


@pytest.fixture
def peer(server):
    return server.connect()


def broken(*args):
    raise ZeroDivisionError("oops")


class Fast:
    """Steps of a joined peer in the bytes of `StepCodec`; a sequence has begun."""

    def __init__(self, peer, name=""):
        specs = peer.join(name)
        self.peer, self.wanted = peer, ["observation", "reward", "terminated", "truncated", "info"]
        uids = [peer.observations[name] for name in self.wanted]
        self.codec = StepCodec.make(
            [(uid, Spec.from_proto(spec)) for uid, spec in specs.actions.items()],
            [(uid, Spec.from_proto(specs.observations[uid])) for uid in uids],
        )
        assert peer.play(None, self.wanted[:4]) == ("RUNNING", [1, 0], 0.0, False, False)
        assert peer.step(0, self.wanted).step.state == pb.RUNNING

    def ask(self, action=0):
        data = self.codec.write_request([np.asarray(action)])
        assert self.peer.session._codec.read_request(data) is not None
        return pb.EnvironmentResponse.FromString(self.peer.session.handle(data))

    def play(self, action=0):
        response = self.ask(action)
        assert response.WhichOneof("payload") == "step", response.error.message
        got = [unpack_tensor(response.step.observations[self.peer.observations[name]]) for name in self.wanted[:4]]
        return (pb.EnvironmentStateType.Name(response.step.state), *(array.tolist() for array in got))

    def refused(self, code, *parts, action=0):
        before = self.peer.state
        response = self.ask(action)
        assert response.error.code == code
        for part in parts:
            assert part in response.error.message
        assert self.peer.state is before


def test_fast_steps_run_end_and_begin_again(peer):
    # D-9, D-13: the Step after an end begins a sequence, its action ignored
    fast = Fast(peer)
    assert [fast.play() for _ in range(3)][-1] == ("RUNNING", [1, 4], 4.0, False, False)
    assert fast.play() == ("TERMINATED", [1, 5], 5.0, True, False)
    assert fast.play(action=7) == ("RUNNING", [2, 0], 0.0, False, False)


def test_fast_steps_are_refused_as_others_are(server, peer, monkeypatch):
    # D-1, D-2, D-11: out of range, an environment and a server that fail
    fast = Fast(peer)
    fast.refused(Code.INVALID_ARGUMENT, "'action': expected INT64 of shape []", "above the maximum", action=7)
    server.envs[0].failing = True
    fast.refused(Code.INTERNAL, "the environment raised ZeroDivisionError in step: oops", "in broken")
    server.envs[0].failing = False
    assert fast.play() == ("RUNNING", [1, 2], 2.0, False, False)
    with monkeypatch.context() as patch:
        patch.setattr(peer.session._agent.wrapped, "apply", broken)
        fast.refused(Code.INTERNAL, "the server failed at step", "in broken")
    assert fast.play() == ("RUNNING", [1, 3], 3.0, False, False)


class BadEnd(CountingEnv):
    """Its last observation is not of its space until it is mended."""

    mended = False

    def step(self, action):
        observation, *rest = super().step(action)
        return np.zeros(3) if rest[1] and not self.mended else observation, *rest


def test_an_end_whose_observation_cannot_be_sent_is_told_by_a_later_fast_step():
    # D-1, D-13: the fast path goes on with the next sequence
    server = Server(lambda: BadEnd(2))
    fast = Fast(server.connect())
    for _ in range(2):
        data = fast.codec.write_request([np.asarray(0)])
        response = pb.EnvironmentResponse.FromString(fast.peer.session.handle(data))
        assert response.error.code == Code.INTERNAL
    assert fast.peer.play(0, ["reward"]) == ("TERMINATED", 2.0)
    assert server.envs[0].steps == 2
    server.envs[0].mended = True
    assert fast.peer.play(None, fast.wanted[:4])[0] == "RUNNING"
    assert fast.peer.step(0, fast.wanted).step.state == pb.RUNNING
    assert fast.play() == ("TERMINATED", [2, 2], 2.0, True, False)


def test_fast_steps_hear_of_a_reset_and_of_the_end_of_their_world(server, peer):
    # D-15, D-17: interrupted once, with the observation of before; then an error
    other = server.connect()
    name = other.ask(create_world={}).create_world.world_name
    fast = Fast(peer, name)
    order = peer.session._world.resets.interrupt()
    assert fast.play(action=1) == ("INTERRUPTED", [1, 1], 0.0, False, True)
    assert not order.agents
    assert [fast.play() for _ in range(2)][-1] == ("RUNNING", [2, 1], 1.0, False, False)
    other.ask(destroy_world={"world_name": name})
    fast.refused(Code.FAILED_PRECONDITION, "was destroyed; send LeaveWorld, and create or join another")


def test_a_refused_step_leaves_the_answers_of_a_real_time_world_as_they_were():
    # D-2: one that asks for `timing` alone would be answered without the newest observation
    clock = VirtualClock(100.0)
    peer = Server(lambda: CountingEnv(1000), fps=10, realtime=RealTime(clock=clock)).connect()
    fast = Fast(peer)
    clock.advance_to(clock.now() + 0.5)
    peer.refused(
        Code.INVALID_ARGUMENT,
        "above the maximum",
        step={"actions": {1: pack_tensor(99)}, "requested_observations": [peer.observations["timing"]]},
    )
    data = fast.codec.write_request([np.asarray(0)])
    response = pb.EnvironmentResponse.FromString(peer.session.handle(data))
    assert unpack_tensor(response.step.observations[peer.observations["observation"]]).tolist() == [1, 5]
    assert fast.play() == ("RUNNING", [1, 5], 0.0, False, False)


def test_the_step_that_begins_a_sequence_is_read_by_hand_and_refused_as_others_are(server, peer):
    # D-1, D-9, D-17: after an end, where the environment raises in its reset, and in a world that has ended
    other = server.connect()
    name = other.ask(create_world={}).create_world.world_name
    fast = Fast(peer, name)

    def begin():
        return peer.session.handle(fast.codec.first)

    while fast.play()[0] == "RUNNING":
        pass
    ended = peer.state
    server.envs[0].failing = True
    assert pb.EnvironmentResponse.FromString(begin()).error.code == Code.INTERNAL
    server.envs[0].failing = False
    assert peer.state is ended
    answer = fast.codec.read_response(begin())
    observation, reward, terminated, truncated = answer.arrays()
    assert (answer.state, observation.tolist()[1], reward, terminated, truncated) == (pb.RUNNING, 0, 0.0, False, False)
    while fast.play()[0] == "RUNNING":
        pass
    other.ask(destroy_world={"world_name": name})
    assert pb.EnvironmentResponse.FromString(begin()).error.code == Code.FAILED_PRECONDITION
