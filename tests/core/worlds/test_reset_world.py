"""ResetWorld over real connections (D-15)."""

import threading
from functools import partial

import gymnasium
import numpy as np
import pytest

import bridge
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.parallel_envs import NAMES, Relay
from tests.support import everywhere, layout_of, until, world_of

STEP = {"step": pb.StepRequest(actions={1: pack_tensor(0)}, requested_observations=[1])}
RESET_WORLD = {"reset_world": pb.ResetWorldRequest()}


class Answer(threading.Thread):
    """Takes a stream's next answer in a thread, so that a test can see that it is not there yet."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.got = stream, threading.Event()
        self.start()

    def run(self):
        self.answer = self.stream.take()
        self.got.set()

    def result(self):
        assert self.got.wait(20), "no answer came"
        self.join()
        return self.answer

    def kind(self):
        return self.result().WhichOneof("payload")


@pytest.fixture
def server(isolation):
    with bridge.serve_gym("CartPole-v1", isolation=isolation) as server:
        yield server


def begun(stream, world=""):
    stream.join(world, gymnasium=True)  # with the flags
    assert stream.ask(**STEP).step.state == pb.RUNNING
    return stream


def waits_for_one(server, world=""):
    """True if a ResetWorld has been ordered and is waited for."""
    until(lambda: world in server.worlds and server.status()["requests"] == 1, 20)
    return True


def test_a_caller_outside_waits_until_the_agent_was_interrupted_once(server, streams):
    """D-15: with its requested observations, without another reset of it, and then the next sequence begins."""
    agent, caller = begun(streams(server)), streams(server)
    caller.send(**RESET_WORLD)
    answer = Answer(caller)
    assert waits_for_one(server)
    assert not answer.got.is_set()
    last = agent.ask(**STEP).step
    assert last.state == pb.INTERRUPTED
    assert list(last.observations) == [1]
    assert answer.kind() == "reset_world"
    assert agent.ask(step=pb.StepRequest(actions={99: pack_tensor(1)})).step.state == pb.RUNNING  # D-9
    assert agent.ask(**STEP).step.state == pb.RUNNING


@everywhere
def test_the_interrupting_step_does_not_apply_its_action_and_says_truncated(server, streams):
    """D-15, D-13: the observation is the one before, the reward nothing, the flag `truncated`."""
    agent, caller = begun(streams(server)), streams(server)
    wanted = [agent.uids[name] for name in ("observation", "reward", "terminated", "truncated")]
    request = pb.StepRequest(actions={1: pack_tensor(1)}, requested_observations=wanted)
    before = agent.ask(step=request).step
    caller.send(**RESET_WORLD)
    assert waits_for_one(server)
    after = agent.ask(step=request).step
    values = [unpack_tensor(after.observations[uid])[()] for uid in wanted[1:]]
    assert after.observations[wanted[0]] == before.observations[wanted[0]]
    assert values == [0.0, False, True]
    assert caller.take().WhichOneof("payload") == "reset_world"


def test_a_bad_step_meanwhile_is_refused_and_leaves_the_interruption_for_the_next(server, streams):
    """D-2, D-15: the failed request is a no-op."""
    agent, caller = begun(streams(server)), streams(server)
    caller.send(**RESET_WORLD)
    assert waits_for_one(server)
    assert agent.ask(step=pb.StepRequest(actions={99: pack_tensor(0)})).error.code == Code.INVALID_ARGUMENT
    assert agent.ask(**STEP).step.state == pb.INTERRUPTED
    assert caller.take().WhichOneof("payload") == "reset_world"


@everywhere
def test_a_joined_caller_alone_begins_the_next_sequence_at_once(server, streams):
    """D-15: it is not interrupted itself; ResetWorld is to it as Reset."""
    agent = begun(streams(server))
    assert agent.ask(**RESET_WORLD).WhichOneof("payload") == "reset_world"
    assert agent.ask(step=pb.StepRequest(actions={99: pack_tensor(1)})).step.state == pb.RUNNING
    assert agent.ask(**STEP).step.state == pb.RUNNING


@everywhere
def test_the_settings_are_those_of_the_next_sequence(server, streams):
    """D-15: a seed given to ResetWorld, by the agent, from outside, or before anybody joined."""
    observations = []
    settings = pb.ResetWorldRequest(settings={"seed": pack_tensor(11)})
    empty = streams(server)
    assert empty.ask(reset_world=settings).WhichOneof("payload") == "reset_world"
    agent = streams(server).join()
    observations.append(agent.ask(**STEP).step.observations[1])
    agent.ask(reset_world=settings)
    observations.append(agent.ask(**STEP).step.observations[1])
    empty.send(reset_world=settings)
    assert waits_for_one(server)
    agent.ask(**STEP)
    assert empty.take().WhichOneof("payload") == "reset_world"
    observations.append(agent.ask(**STEP).step.observations[1])
    assert observations[0] == observations[1] == observations[2]


def test_an_unknown_world_and_unknown_settings_are_errors(server, streams):
    """D-15, D-2: nobody is interrupted by them."""
    agent, caller = begun(streams(server)), streams(server)
    unknown = caller.ask(reset_world=pb.ResetWorldRequest(world_name="nowhere"))
    assert unknown.error.code == Code.NOT_FOUND
    assert "nowhere" in unknown.error.message
    bad = caller.ask(reset_world=pb.ResetWorldRequest(settings={"level": pack_tensor(1)}))
    assert bad.error.code == Code.INVALID_ARGUMENT
    assert "seed, options" in bad.error.message
    assert agent.ask(**STEP).step.state == pb.RUNNING


@pytest.mark.parametrize("how", ["leaves", "dies", "resets"])
def test_an_agent_that_goes_does_not_block_the_caller(server, streams, how):
    """D-15: by leaving, by dying, or by ending its sequence itself."""
    agent, caller = begun(streams(server)), streams(server)
    caller.send(**RESET_WORLD)
    assert waits_for_one(server)
    if how == "leaves":
        agent.ask(leave_world=pb.LeaveWorldRequest())
    elif how == "dies":
        agent.die()
    else:
        agent.ask(reset=pb.ResetRequest())
    assert caller.take().WhichOneof("payload") == "reset_world"


def test_an_agent_that_has_not_begun_or_has_ended_is_not_waited_for(server, streams):
    """D-13, D-15: it is not running already, and two non-RUNNING states in a row must not be."""
    agent, caller = streams(server).join(), streams(server)
    assert caller.ask(**RESET_WORLD).WhichOneof("payload") == "reset_world"
    assert agent.ask(**STEP).step.state == pb.RUNNING
    agent.ask(reset=pb.ResetRequest())
    assert caller.ask(**RESET_WORLD).WhichOneof("payload") == "reset_world"
    assert agent.ask(**STEP).step.state == pb.RUNNING
    while agent.ask(**STEP).step.state == pb.RUNNING:
        pass
    assert caller.ask(**RESET_WORLD).WhichOneof("payload") == "reset_world"
    assert agent.ask(**STEP).step.state == pb.RUNNING


def test_an_agent_that_never_steps_costs_the_caller_a_deadline(streams):
    """D-15, D-2: the error names `reset_world_timeout`, nothing was reset, and the agent plays on."""
    with bridge.serve_gym("CartPole-v1", limits=bridge.Limits(reset_world_timeout=0.2)) as server:
        agent, caller = begun(streams(server)), streams(server)
        error = caller.ask(reset_world=pb.ResetWorldRequest(settings={"seed": pack_tensor(3)})).error
        assert error.code == Code.DEADLINE_EXCEEDED
        assert "reset_world_timeout=0.2" in error.message
        assert "nothing was reset" in error.message
        while agent.ask(**STEP).step.state == pb.RUNNING:
            pass
        seeded, _ = gymnasium.make("CartPole-v1").reset(seed=3)
        assert not np.array_equal(unpack_tensor(agent.ask(**STEP).step.observations[1]), seeded)


def test_a_caller_that_dies_while_it_waits_leaves_no_thread(server, streams):
    """D-15: its connection ends at once, long before `reset_world_timeout`."""
    begun(streams(server))
    caller = streams(server)
    caller.send(**RESET_WORLD)
    assert waits_for_one(server)
    caller.die()
    until(lambda: server.status()["requests"] == 0, 20)


class Seeded(CountingEnv):
    """Keeps the seeds of its resets."""

    def __init__(self):
        super().__init__(10**9)
        self.seeds = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("kind", ["lockstep", "fps", "agents"])
def test_a_reset_that_is_given_up_takes_none_back_that_another_caller_asked_for_since(kind, streams):
    """D-15, D-2."""
    env = Relay(horizon=10**9) if kind == "agents" else Seeded()
    serve = bridge.serve_parallel if kind == "agents" else bridge.serve_gym
    with serve(lambda: env, **({"fps": 200} if kind == "fps" else {})) as server:
        agents = [streams(server).join() for _ in (NAMES if kind == "agents" else "a")]
        for agent in agents:
            agent.send(**STEP)
        assert [agent.take().step.state for agent in agents] == [pb.RUNNING] * len(agents)
        first, second = streams(server), streams(server)
        for seed, caller in enumerate((first, second), start=1):
            caller.send(reset_world=pb.ResetWorldRequest(settings={"seed": pack_tensor(seed)}))
            until(lambda expected=seed: server.status()["requests"] == expected, 20)
        first.die()
        until(lambda: server.status()["requests"] == 1, 20)
        for number, agent in enumerate(agents):
            step = lawful(number) if kind == "agents" else STEP
            assert agent.ask(**step).step.state == pb.INTERRUPTED
        assert second.take().WhichOneof("payload") == "reset_world"
        for agent in agents:
            agent.send(step=pb.StepRequest())
        assert [agent.take().step.state for agent in agents] == [pb.RUNNING] * len(agents)
        assert env.seeds == [None, 2]


@everywhere
def test_a_world_destroyed_meanwhile_is_an_error_to_the_caller_and_to_the_agent(server, streams):
    """D-15, D-17."""
    name = streams(server).ask(create_world=pb.CreateWorldRequest()).create_world.world_name
    agent, caller, killer = begun(streams(server), name), streams(server), streams(server)
    caller.send(reset_world=pb.ResetWorldRequest(world_name=name))
    assert waits_for_one(server, name)
    killer.ask(destroy_world=pb.DestroyWorldRequest(world_name=name))
    assert caller.take().error.code == Code.NOT_FOUND
    error = agent.ask(**STEP).error
    assert error.code == Code.FAILED_PRECONDITION
    assert "destroyed" in error.message


def test_worlds_beside_are_not_touched_and_their_lock_is_free(server, streams):
    """D-5, D-15: while a caller waits, the environments of all other worlds step."""
    begun(streams(server))
    caller, other = streams(server), streams(server)
    caller.send(**RESET_WORLD)
    assert waits_for_one(server)
    name = other.ask(create_world=pb.CreateWorldRequest()).create_world.world_name
    begun(other, name)
    assert other.ask(**STEP).step.state == pb.RUNNING
    assert waits_for_one(server), "the other world stepped once the caller had given up"


def test_a_reset_of_one_world_interrupts_the_agents_of_no_other(server, streams):
    """D-5, D-15: neither while the caller waits nor afterwards."""
    caller, other = begun(streams(server)), streams(server)
    begun(other, other.ask(create_world=pb.CreateWorldRequest()).create_world.world_name)
    assert caller.ask(**RESET_WORLD).WhichOneof("payload") == "reset_world"
    assert other.ask(**STEP).step.state == pb.RUNNING


@pytest.fixture
def relay(streams, isolation):
    """A world of three agents, all of them running, and its environment, where that is here."""
    env = partial(Relay, horizon=1000) if isolation else Relay(horizon=1000)
    with bridge.serve_parallel(
        env, agent_timeout=20, limits=bridge.Limits(reset_world_timeout=20), isolation=isolation
    ) as server:
        agents = [streams(server).join() for _ in NAMES]
        for agent in agents:
            agent.send(step=pb.StepRequest(requested_observations=[1]))
        assert [agent.take().step.state for agent in agents] == [pb.RUNNING] * 3
        yield env, server, agents


def lawful(number):
    """A Step with an action of the agent of this number."""
    from gymnasium import spaces

    space = Relay().action_space(NAMES[number])
    sample = space.sample() if not isinstance(space, spaces.Discrete) else 1
    actions = {uid: pack_tensor(a) for uid, a in enumerate(layout_of(space, "action").pack(sample), start=1)}
    return {"step": pb.StepRequest(actions=actions, requested_observations=[1])}


def test_all_other_agents_are_interrupted_and_the_joined_caller_is_not(relay):
    """D-15, D-22: one caller among three; the environment is reset once, when all begin the next sequence."""
    env, server, (ann, bob, cyd) = relay
    ann.send(**RESET_WORLD)
    assert waits_for_one(server)
    assert bob.ask(**lawful(1)).step.state == pb.INTERRUPTED
    answer = Answer(ann)
    assert not answer.got.is_set()
    last = cyd.ask(**lawful(2)).step
    assert last.state == pb.INTERRUPTED
    assert list(last.observations) == [1]
    assert answer.kind() == "reset_world"
    assert env.resets == 1
    for agent in (ann, bob, cyd):
        agent.send(step=pb.StepRequest())
    assert [agent.take().step.state for agent in (ann, bob, cyd)] == [pb.RUNNING] * 3
    assert env.resets == 2


def test_agents_that_wait_for_each_other_in_a_step_are_interrupted_at_once(relay, streams):
    """D-15: their Step is there already; its action is not applied."""
    env, server, (ann, bob, cyd) = relay
    ann.send(**lawful(0))
    bob.send(**lawful(1))
    caller = streams(server)
    caller.send(**RESET_WORLD)
    assert [agent.take().step.state for agent in (ann, bob)] == [pb.INTERRUPTED] * 2
    assert cyd.ask(**lawful(2)).step.state == pb.INTERRUPTED
    assert caller.take().WhichOneof("payload") == "reset_world"
    assert env.log == []


@everywhere
def test_two_agents_that_reset_the_world_at_once_do_not_wait_for_each_other(relay):
    """D-15: each of them just begins the next sequence."""
    _, _, (ann, bob, cyd) = relay
    ann.send(**RESET_WORLD)
    bob.send(**RESET_WORLD)
    assert cyd.ask(**lawful(2)).step.state == pb.INTERRUPTED
    assert [agent.take().WhichOneof("payload") for agent in (ann, bob)] == ["reset_world"] * 2
    for agent in (ann, bob, cyd):
        agent.send(step=pb.StepRequest())
    assert [agent.take().step.state for agent in (ann, bob, cyd)] == [pb.RUNNING] * 3


@everywhere
def test_an_agent_that_dies_does_not_block_the_reset_of_the_others(relay, streams):
    """D-15, D-22: and its heir begins the next sequence with the others, not the one that is being ended."""
    _, server, (ann, bob, cyd) = relay
    caller = streams(server)
    caller.send(reset_world=pb.ResetWorldRequest(settings={"seed": pack_tensor(4)}))
    assert waits_for_one(server)
    cyd.die()
    world = world_of(server, "")
    until(lambda: world.agents == 2, 20)
    heir = streams(server).join()
    heir.send(step=pb.StepRequest())
    until(lambda: NAMES[2] in world.pacer.participants, 20)
    heard = world.pacer.participants[NAMES[2]]
    until(lambda: heard in world.pacer._waits or heard.playing, 20)
    assert [agent.ask(**lawful(number)).step.state for number, agent in enumerate((ann, bob))] == [pb.INTERRUPTED] * 2
    assert caller.take().WhichOneof("payload") == "reset_world"
    for agent in (ann, bob):
        agent.send(step=pb.StepRequest())
    assert [agent.take().step.state for agent in (ann, bob, heir)] == [pb.RUNNING] * 3
