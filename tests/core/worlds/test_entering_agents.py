"""Agents that enter, leave, miss steps and come back during an episode, as in the local PettingZoo environment."""

import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

import bridge
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import EnvironmentFailedError, RefusedError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.support import assert_identical, everywhere, sampled

NAMES = ("a", "b", "c", "d")
PARTS = ("observation", "reward", "terminated", "truncated", "info")


class Planned(ParallelEnv):
    """Its agents come and go by a plan: for each step those that are alive, those that end, and what is left out.

    Observations hold the step and the agent's last action, so that an action that did not arrive is seen.
    """

    metadata = {"name": "planned_v0"}  # noqa: RUF012

    def __init__(self, plan, first=("a", "b")):
        self.possible_agents, self.agents = list(NAMES), []
        self.plan, self.first, self.log, self.time = plan, first, [], 0
        self.state_space = spaces.Box(0, 1000, (2,), np.int64)

    def observation_space(self, agent):
        return {
            "a": spaces.Box(-1, 1000, (2,), np.float32),
            "b": spaces.Dict({"last": spaces.Discrete(9), "time": spaces.Discrete(1000)}),
            "c": spaces.Text(20),
            "d": spaces.Discrete(1000),
        }[agent]

    def action_space(self, agent):
        return spaces.Discrete(5)

    def _see(self, agent):
        last = self.last.get(agent, 7)
        return {
            "a": np.array([self.time, last], np.float32),
            "b": {"time": self.time, "last": last},
            "c": f"at {self.time} {last}",
            "d": self.time * 10 + last,
        }[agent]

    def reset(self, seed=None, options=None):
        self.time, self.last, self.agents = 0, {}, list(self.first)
        return {agent: self._see(agent) for agent in self.agents}, {agent: {"seed": seed} for agent in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents, (actions, self.agents)
        alive, ended, cut, left_out = self.plan[self.time]
        alive = [] if self.time + 1 == len(self.plan) else list(alive)
        self.time, self.last = self.time + 1, {agent: int(action) for agent, action in actions.items()}
        self.log.append(self.last)
        parts = (
            {agent: self._see(agent) for agent in NAMES},
            {agent: self.time + index / 10 for index, agent in enumerate(NAMES)},
            {agent: agent in ended and agent in self.agents for agent in NAMES},  # who comes in has not ended
            {agent: agent in cut and agent in self.agents for agent in NAMES},
            {agent: {"time": self.time} if index % 2 else {} for index, agent in enumerate(NAMES)},
        )
        told = {*self.agents, *alive}
        self.agents = alive
        return tuple(
            {agent: value for agent, value in of.items() if agent in told and (agent, name) not in left_out}
            for name, of in zip(PARTS, parts, strict=True)
        )

    def state(self):
        return np.array([self.time, len(self.agents)])


def compare(plan, first=("a", "b"), episodes=2, isolation=None):
    """Play a plan by a remote and a local environment, and hold against each other all that they return."""
    served, local = [], Planned(plan, first)
    made = (lambda: Planned(plan, first)) if isolation else (lambda: served.append(Planned(plan, first)) or served[-1])
    with bridge.serve_parallel(made, isolation=isolation) as server:
        remote = bridge.make_parallel_remote(server.url, timeout=20)
        for episode in range(episodes):
            assert_identical(remote.reset(seed=episode), local.reset(seed=episode))
            assert remote.agents == local.agents
            step = 0
            while local.agents:
                actions = {agent: (step + index) % 5 for index, agent in enumerate(local.agents)}
                mine, theirs = remote.step(actions), local.step(actions)
                for name, left, right in zip(PARTS, mine, theirs, strict=True):
                    assert_identical(left, right, f"{name} of step {step}")
                # The order of a dict's keys is the environment's.
                assert [list(item) for item in mine[0].values() if isinstance(item, dict)] == [
                    list(theirs[0][agent]) for agent, item in mine[0].items() if isinstance(item, dict)
                ]
                assert remote.agents == local.agents, f"step {step}"
                step += 1
        remote.close()
    for env in served:
        assert env.log == local.log  # no default action stood in for anybody


@everywhere
def test_an_agent_that_enters_is_there_from_the_step_that_brings_it_in(isolation):
    compare([("ab", "", "", ())] * 2 + [("abc", "", "", ())] * 3, isolation=isolation)


PLANS = {
    "before others": [("cab", "", "", ())] * 3,
    "another order": [("ba", "", "", ())] * 3,
    "in place of all others": [("c", "ab", "", ())] * 2 + [("d", "", "c", ())] * 2,
    "leaves and comes back": [("a", "b", "", ()), ("a", "", "", ()), ("ab", "", "", ()), ("ab", "", "", ())],
    "leaves without an end": [("a", "", "", ()), ("a", "", "", ()), ("ba", "", "", ()), ("ab", "", "", ())],
    "ends and is there at once": [("ab", "b", "", ()), ("ab", "", "a", ()), ("ab", "a", "b", ())],
    "is not seen": [("ab", "", "", (("a", "observation"),)), ("ab", "", "", (("b", "observation"), ("b", "info")))],
    "enters unseen": [("abc", "", "", (("c", "observation"),)), ("abc", "", "", ())],
    "has an observation alone": [("ab", "", "", tuple(("b", part) for part in PARTS[1:]))] * 3,
    "has no reward": [("ab", "", "", (("a", "reward"),)), ("ab", "", "", (("b", "terminated"), ("b", "truncated")))],
    "is named nowhere": [("a", "", "", tuple(("b", part) for part in PARTS)), ("a", "", "", ()), ("ab", "", "", ())],
    "an end in the last step": [("abcd", "", "", ()), ("", "abc", "d", ())],
}


@pytest.mark.parametrize(
    ("name", "isolation"),
    [*sampled([(name, None) for name in PLANS], 2, slow=True), *sampled([(name, "process") for name in PLANS], 4, 1)],
    indirect=["isolation"],
)
def test_a_plan_of_comings_and_goings_is_that_of_the_local_environment(name, isolation):
    compare(PLANS[name], isolation=isolation)


def test_agents_may_be_fewer_and_in_another_order_from_the_reset_on():
    compare([("dc", "", "", ()), ("dcba", "", "", ())], first=("d", "b"))


AGENTS = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
SOME = st.frozensets(st.sampled_from(NAMES))
LEFT_OUT = st.frozensets(st.tuples(st.sampled_from(NAMES), st.sampled_from(PARTS)), max_size=6)


@settings(max_examples=25, deadline=None)
@given(plan=st.lists(st.tuples(AGENTS, SOME, SOME, LEFT_OUT), min_size=1, max_size=8), first=AGENTS)
@pytest.mark.slow
def test_random_comings_and_goings_are_those_of_the_local_environment(plan, first):
    compare(plan, first)


class Beacon(Planned):
    """Names an agent that its `possible_agents` do not have."""

    def step(self, actions):
        found = super().step(actions)
        self.agents = [*self.agents, "eve"]
        return found


def test_an_agent_that_nobody_knew_of_is_an_error_that_says_where_to_name_it():
    plan = [("ab", "", "", ())] * 3
    with bridge.serve_parallel(lambda: Beacon(plan)) as server:
        env = bridge.make_parallel_remote(server.url, timeout=20)
        env.reset()
        with pytest.raises(
            EnvironmentFailedError, match=r"got \['eve'\] in its `agents`; name all that may come in its"
        ):
            env.step({"a": 0, "b": 0})
        env.close()


def test_a_seat_that_another_client_has_is_refused_in_words():
    with bridge.serve_parallel(lambda: Planned([("abc", "", "", ())] * 3)) as server:
        guest = bridge.make_remote(f"{server.url}?world=", agent="c")
        with pytest.raises(RefusedError, match="the agent 'c' is taken"):
            bridge.make_parallel_remote(f"{server.url}?world=", timeout=20)
        guest.close()


def test_a_client_of_its_own_enters_the_running_episode_when_its_agent_comes_in():
    """D-22: its first Step was refused, since the reset had no part for it; the next one waits until it has."""
    plan = [("ab", "", "", ())] * 2 + [("abc", "", "", ())] * 3
    with bridge.serve_parallel(lambda: Planned(plan), missing_agent="default", agent_timeout=20) as server:
        envs = {name: bridge.make_remote(f"{server.url}?world=", agent=name, timeout=30) for name in "abc"}
        found = {}

        def play(name):
            env = envs[name]
            try:
                env.reset()
            except RefusedError as error:
                found["refused"] = error
                entered.set()
                found["first"] = env.reset()[0]
                found["entered"] = True
            else:
                entered.wait(20)
            while True:
                observation, _, terminated, truncated, _ = env.step(1)
                found.setdefault(name, []).append(observation)
                if terminated or truncated:
                    return

        entered = threading.Event()
        threads = [threading.Thread(target=play, args=(name,)) for name in envs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert "without the agent 'c'" in str(found["refused"])
        for env in envs.values():
            env.close()
    assert found["first"].startswith("at ")
    assert int(found["first"].split()[1]) >= 3
    assert len(found["a"]) == 5


def test_an_older_client_that_never_enters_is_played_for_and_keeps_nobody_waiting():
    """It knows nothing of entering: for an agent that comes in, default actions play on, as they always did."""
    plan = [("abc", "", "", ())] * 3
    with bridge.serve_parallel(lambda: Planned(plan)) as server:
        streams = {name: Stream(server) for name in NAMES}
        for name, stream in streams.items():
            stream.join(agent=name)
        for _ in range(2):
            for stream in streams.values():
                stream.send(reset=pb.ResetRequest())
                stream.send(step=pb.StepRequest())
            for stream in streams.values():
                assert stream.take().WhichOneof("payload") == "reset"
            kinds = {name: stream.take().WhichOneof("payload") for name, stream in streams.items()}
            assert kinds == {"a": "step", "b": "step", "c": "error", "d": "error"}
            for step in range(3):
                for name in "ab":
                    streams[name].send(step=pb.StepRequest(actions={1: pack_tensor(np.int64(1))}))
                states = [streams[name].take().step.state for name in "ab"]
                assert states == [pb.RUNNING if step < 2 else pb.INTERRUPTED] * 2
        for stream in streams.values():
            stream.close()


def test_the_space_of_the_global_state_is_the_environments():
    with bridge.serve_parallel(lambda: Planned([("ab", "", "", ())])) as server:
        env = bridge.make_parallel_remote(server.url)
        assert env.state_space == Planned([]).state_space
        env.reset()
        assert env.state_space.contains(env.state())
        env.close()


@everywhere
def test_an_environment_without_a_space_of_the_global_state_has_no_such_attribute(isolation):
    with bridge.serve_parallel(Relay, isolation=isolation) as server:
        env = bridge.make_parallel_remote(server.url)
        assert not hasattr(env, "state_space")
        env.close()
