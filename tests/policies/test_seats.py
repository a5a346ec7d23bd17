"""A policy's URL in a seat: it plays what no client does, as a function does; and people take over from a policy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gymnasium import spaces

from bridge import TLS, make_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import EnvironmentFailedError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.perlert import PerlertEnv, serve_perlert
from bridge.policies import RemotePolicy, evaluate, serve_policy
from bridge.testing import make_certificates
from tests.counting_envs import Counts
from tests.parallel_envs import Relay
from tests.peers import Stream
from tests.policy_peers import answered


def relay():
    return Relay(horizon=10**6, distances=(10**6, 10**6, 10**6))


def test_the_url_of_a_policy_plays_an_agent_that_no_client_plays():
    seen = []

    def fast(observations):
        seen.append(observations.shape)
        return np.full(len(observations), 2)

    with (
        serve_policy(fast) as policies,
        serve_parallel(relay, fps=50, agents={"ann": policies.url}) as server,
    ):
        env = make_remote(f"{server.url}?world=", agent="bob")
        env.reset()
        action = {"run": 0, "lean": np.zeros(2, np.float32)}
        assert answered(lambda: env.step(action)[1] >= 2.0)
        env.close()
    assert set(seen) == {(1, 4)}


def test_a_policy_server_that_is_gone_is_named_and_the_world_goes_on_with_it_back():
    policies = serve_policy(lambda observations: np.full(len(observations), 2))
    port = int(policies.url.rpartition(":")[2])
    with serve_parallel(relay, fps=50, agents={"ann": policies.url}) as server:
        env = make_remote(f"{server.url}?world=", agent="bob")
        env.reset()
        action = {"run": 0, "lean": np.zeros(2, np.float32)}
        assert answered(lambda: env.step(action)[1] >= 2.0)
        policies.stop()
        errors = []

        def fails():
            try:
                env.step(action)
            except Exception as error:
                errors.append(str(error))
            return bool(errors)

        assert answered(fails)
        assert "no policy server" in errors[0] or "closed the connection" in errors[0]
        with serve_policy(lambda observations: np.full(len(observations), 2), port=port):
            env.reset()
            assert answered(lambda: env.step(action)[1] >= 2.0)
        env.close()


def test_the_url_of_a_policy_in_a_seat_says_the_ca_and_how_long_its_answers_may_take(tmp_path):
    made = make_certificates(tmp_path)
    own, answering = TLS(certificate=made["server.pem"], key=made["server.key"]), threading.Event()

    def late(observations):
        assert answering.wait(60)
        return np.full(len(observations), 2)

    with serve_policy(late, tls=own) as policies:
        url = f"{policies.url}?tls_ca={made['ca.pem']}&timeout=0.3"
        with serve_parallel(relay, fps=50, agents={"ann": url}) as server:
            env = make_remote(f"{server.url}?world=", agent="bob")
            env.reset()
            action = {"run": 0, "lean": np.zeros(2, np.float32)}
            with pytest.raises(EnvironmentFailedError, match=r"no answer of the policy within 0\.3 s"):
                answered(lambda: env.step(action) is None)
            answering.set()
            env.reset()
            assert answered(lambda: env.step(action)[1] >= 2.0)
            env.close()


def test_the_url_of_another_kind_is_refused_at_the_start():
    with pytest.raises(SettingError, match="their ws:// URLs"):
        serve_parallel(relay, fps=50, agents={"ann": "grpc://localhost:1"})


class Pair:
    """Two agents as PettingZoo has them; an agent's reward is the other's action, and an episode has ten steps."""

    metadata = {"name": "pair"}  # noqa: RUF012 - PettingZoo's name
    possible_agents = ["a_0", "a_1"]  # noqa: RUF012

    def observation_space(self, agent):
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def _seen(self):
        return {agent: np.array([self.count], np.float32) for agent in self.possible_agents}

    def reset(self, seed=None, options=None):
        self.agents, self.count = list(self.possible_agents), 0
        return self._seen(), {}

    def step(self, actions):
        self.count += 1
        rewards = {"a_0": float(actions["a_1"]), "a_1": float(actions["a_0"])}
        ended, going = dict.fromkeys(self.agents, self.count == 10), dict.fromkeys(self.agents, False)
        return self._seen(), rewards, ended, going, {}

    def close(self):
        pass


def test_the_url_of_a_policy_fills_an_open_slot_of_a_lobby():
    seen = []

    def three(observations):
        seen.extend(observations[:, 0].tolist())
        return np.full(len(observations), 3)

    with (
        serve_policy(three) as policies,
        serve_perlert(Pair, name="pair", fps=20, bots={"a_1": policies.url}) as server,
        PerlertEnv(server.url, agent="a_0") as env,
    ):
        env.reset()
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(np.int64(1))
            total, ended = total + reward, terminated or truncated
    assert total == 30.0
    assert seen == [float(at) for at in range(10)]


class Told(Counts):
    """Its reward is the action; an episode has eight steps."""

    length = 8

    def step(self, action):
        self.reward = float(action)
        return super().step(action)


def test_an_evaluation_says_in_which_steps_a_person_took_over():
    with serve_gym(Told) as server:
        person = Stream(server, own_connection=True)
        calls = 0

        def hold(*actions):
            packed = {uid: pack_tensor(np.asarray(action)) for uid, action in enumerate(actions, start=1)}
            answer = person.ask(step=pb.StepRequest(actions=packed))
            assert answer.WhichOneof("payload") == "step", answer

        def nothing(observations):
            nonlocal calls
            calls += 1
            if calls == 11:  # the third step of the second episode
                person.join("", role="takeover", name="teacher")
                person.ask(step=pb.StepRequest())
                hold(1)
            elif calls == 14:
                hold()
            return np.zeros(len(observations), np.int64)

        with serve_policy(nothing) as policies, RemotePolicy(policies.url) as policy:
            found = evaluate(f"{server.url}?world=", policy, episodes=3)
        person.die()
        person.channel.close()
    assert [episode.corrected for episode in found.episodes] == [0, 3, 0]
    assert found.returns.tolist() == [0.0, 3.0, 0.0]
    assert "others   acted in the policy's place in episode 1 (3 steps)" in str(found)
