"""The draft's example session, and clients written from the draft alone: plain UDP sockets, nothing of ours."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.rounds import RoundState
from bridge.perlert import LobbyConfig, PerlertEnv, RolloutConfig, serve_perlert
from bridge.perlert.lobby import Lobby
from bridge.perlert.player import Player
from bridge.perlert.protocol.packet import Header, Slot, parse_client
from bridge.perlert.rollout import Rollout
from tests import draft_peers
from tests.draft_peers import PlainClient, PlainServer
from tests.perlert_simulation import guard_of, result, steps_of

# Figure 1 of draft-perlert-wg-00: (from the client?, datagram)
SESSION = [
    (True, "city:7;lobby"),
    (False, "city:7;agent0=open,citizen,cpu,ready"),
    (True, "city:7;register=agent0,patrick"),
    (False, "city:7;registered=agent0"),
    (True, "city:7;ready=agent0,true"),
    (False, "city:7;agent0=close,citizen,patrick,ready"),
    (False, "city:7;message=Simulation will start..."),
    (False, "city:7;start=port:32323"),
    (True, "city:7;action=walk"),
    (False, "city:7:1590853116323:0;obs=45;reward=0;done=false"),
    (False, "city:7:1590853121058:0;obs=47;reward=0;done=false"),
    (False, "city:7:1590853126423:0;obs=48;reward=1;done=false"),
    (False, "city:7:1590853130429:0;obs=49;reward=0;done=false"),
    (False, "city:7:1590853134833:0;obs=51;reward=1;done=true"),
]
H = Header("city", 7)
CLIENT = ("127.0.0.1", 55555)
LOBBY, ROLLOUT = ("10.0.0.2", 32322), ("10.0.0.2", 32323)


def test_the_drafts_example_session_runs_datagram_for_datagram_on_the_server():
    # P-7 asks for one datagram that the figure leaves out: the lobby, after the registration.
    guard = guard_of()
    lobby = Lobby(H, [Slot("agent0", True, "citizen", "cpu", True)], guard)
    run = None
    answers = []
    frames = [("45", 0), ("47", 0), ("48", 1), ("49", 0), ("51", 1)]
    now = 0.0
    for from_client, text in SESSION:
        if from_client:
            assert answers == [], "the server says nothing else"
            now += 0.5
            if run is None:
                assert guard.heard(CLIENT, text.encode(), now)
                out = lobby.handle(parse_client(text.encode()), CLIENT, len(text), now)
            else:
                out = run.handle(parse_client(text.encode()), CLIENT, now)
            if lobby.state is RoundState.STARTING:
                acted = {}
                run = Rollout(H, 32323, guard, acted.__setitem__, config=RolloutConfig(fps=1))
                out += lobby.started(run, now)
            answers = [datagram.decode() for datagram, address in out if address == CLIENT]
            if "register=" in text:
                assert answers.pop(1) == "city:7;agent0=close,citizen,patrick,not_ready"
            continue
        if run is not None and not answers:
            stamp = int(text.split(":")[2])
            observation, reward = frames.pop(0)
            assert acted == {"agent0": "walk"}
            out = run.frame({"agent0": result(observation, reward, terminated=not frames)}, stamp / 1000)
            # STEP: constant in the figure, counted by us.
            answers = [re.sub(r"^(city:7:\d+):\d+;", r"\1:0;", datagram.decode()) for datagram, _ in out]
        assert answers.pop(0) == text
    assert answers == []
    assert frames == []


def test_the_drafts_example_session_runs_datagram_for_datagram_on_the_client():
    # P-11, P-12, P-13: one source, the lobby's port, the rollout's port.
    player = Player(H, LOBBY, tag="patrick", action="walk", use_profile=False)
    sent = player.tick(0.0)
    now = 0.0
    for from_client, text in SESSION:
        now += 0.01
        if from_client:
            datagram, target = sent.pop(0)
            assert datagram.decode() == text
            assert target == (ROLLOUT if "action" in text else LOBBY)
            assert sent == []
        else:
            sent += player.receive(text.encode(), ROLLOUT if ";obs=" in text else LOBBY, now)
    steps = steps_of(player)
    assert [(step.observation, int(step.reward), step.done) for step in steps] == [
        ("45", 0, False),
        ("47", 0, False),
        ("48", 1, False),
        ("49", 0, False),
        ("51", 1, True),
    ]
    assert steps[-1].ret == 2


def test_a_client_written_from_the_draft_alone_plays_cartpole():
    # P-11
    with serve_perlert("CartPole-v1", fps=250, max_rate=250, seed=1, slots={"agent0": "balancer"}) as server:
        client = PlainClient(server.port, "cartpole:0", "agent0", "john_doe_q_learning")
        try:
            total = client.play(lambda seen: 0 if seen is None or seen[2] + seen[3] < 0 else 1)
        finally:
            client.close()
    assert client.lobbies[0] == "agent0=open,balancer,,not_ready"
    assert "agent0=close,balancer,john_doe_q_learning,ready" in client.lobbies
    numbers = [number for number, *_ in client.steps]
    assert numbers == sorted(set(numbers))
    assert total == numbers[-1] >= 8  # CartPole's reward is 1 a step, and no pole falls faster


def meeting():
    """A PettingZoo world of two agents on a line that are rewarded for being near each other."""
    pettingzoo = pytest.importorskip("pettingzoo")

    class Meeting(pettingzoo.ParallelEnv):
        metadata = {"name": "meeting"}  # noqa: RUF012
        possible_agents = ["walker_0", "walker_1"]  # noqa: RUF012

        def observation_space(self, agent):
            return spaces.Box(-100, 100, (2,), np.float64)

        def action_space(self, agent):
            return spaces.Discrete(3, start=-1)

        def reset(self, seed=None, options=None):
            self.agents = list(self.possible_agents)
            self.places = {"walker_0": -5.0, "walker_1": 5.0}
            self.count = 0
            return self._seen(), {agent: {} for agent in self.agents}

        def _seen(self):
            return {
                a: np.array([self.places[a], self.places[b]])
                for a, b in zip(self.agents, self.agents[::-1], strict=True)
            }

        def step(self, actions):
            assert set(actions) == set(self.agents)
            for agent, action in actions.items():
                self.places[agent] += int(action)
            self.count += 1
            near = -abs(self.places["walker_0"] - self.places["walker_1"])
            over = self.count >= 30
            agents, seen = self.agents, self._seen()
            if over:
                self.agents = []
            flags = dict.fromkeys(agents, False)
            return seen, dict.fromkeys(agents, near), flags, dict.fromkeys(agents, over), {a: {} for a in agents}

    return Meeting()


def test_a_plain_client_and_one_of_ours_share_a_pettingzoo_world():
    # P-29
    with serve_perlert(meeting, name="meeting", fps=50, max_rate=50) as server:
        plain = PlainClient(server.port, "meeting:0", "walker_1", "plain")
        totals = []
        thread = threading.Thread(
            target=lambda: totals.append(plain.play(lambda seen: -1 if seen and seen[0] > seen[1] else 0))
        )
        env = PerlertEnv(server.url, agent="walker_0", tag="ours")
        thread.start()
        try:
            assert [(slot.key, slot.kind) for slot in env.slots] == [("walker_0", "walker"), ("walker_1", "walker")]
            observation, _ = env.reset()
            total, done = 0.0, False
            while not done:
                action = np.sign(observation[1] - observation[0]).astype(int)
                observation, reward, terminated, truncated, info = env.step(np.int64(action))
                total += reward
                done = terminated or truncated
            thread.join(10.0)
            assert not thread.is_alive()
        finally:
            env.close()
            plain.close()
    assert truncated
    assert not terminated
    assert totals == [pytest.approx(total)]
    assert info["return"] == pytest.approx(total)
    assert abs(observation[0] - observation[1]) <= 2


def test_a_real_pettingzoo_environment_is_played_by_two_clients_of_ours():
    # P-29
    pytest.importorskip("pettingzoo")
    rps = pytest.importorskip("pettingzoo.classic.rps_v2")
    with serve_perlert(rps.parallel_env, name="rps", fps=60) as server:
        envs = [PerlertEnv(server.url, agent=f"player_{number}") for number in range(2)]
        totals = [0.0, 0.0]

        def play(number, env):
            env.reset()
            done = False
            while not done:
                _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                totals[number] += reward
                done = terminated or truncated

        threads = [threading.Thread(target=play, args=item) for item in enumerate(envs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        for env in envs:
            env.close()
    assert not any(thread.is_alive() for thread in threads)
    assert totals[0] == -totals[1]


def test_our_client_plays_on_a_server_that_knows_the_draft_only():
    server = PlainServer("city:7")
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        env = PerlertEnv(
            f"perlert://127.0.0.1:{server.port}/city:7",
            observation_space=spaces.Box(-10, 10, (2,)),
            action_space=spaces.Box(-10, 10, (2,)),
        )
        observation, _ = env.reset()
        assert observation.tolist() == [0.0, 0.5]
        total, done = 0.0, False
        while not done:
            observation, reward, done, _, info = env.step(np.array([5, 6.78], np.float32))
            total += reward
        env.close()
        thread.join(10.0)
    finally:
        server.close()
    assert not thread.is_alive()
    assert observation.tolist() == [4.0, 0.5]
    assert total == info["return"] == 7.5
    assert info["ack"] is None
    assert server.actions[0] == "city:7;action=0,0"
    assert server.actions[1] == "city:7;action=5,6.78"


def test_a_plain_client_plays_on_a_plain_server():
    server = PlainServer("city:7")
    thread = threading.Thread(target=server.serve)
    thread.start()
    client = PlainClient(server.port, "city:7", "agent0", "patrick")
    try:
        assert client.play(lambda seen: "5,6.78") == 7.5
        thread.join(10.0)
    finally:
        client.close()
        server.close()


def test_the_peers_of_these_tests_import_nothing_of_the_package():
    source = Path(draft_peers.__file__).read_text()
    names = re.findall(r"^\s*(?:import|from) ([a-z_.]+)", source, re.M)
    assert names == ["socket"]


def test_the_lobbys_port_answers_while_and_after_a_run():
    # P-16, P-17, P-18
    with serve_perlert("CartPole-v1", fps=100, max_rate=100, lobby_config=LobbyConfig(expiry=60)) as server:
        client = PlainClient(server.port, "cartpole:0", "agent0", "x")
        try:
            client.say("register=agent0,x")
            client.hear("registered=")
            client.say("ready=agent0,true")
            _, body, _ = client.hear("start=port:")
            for request in ("lobby", "ready=agent0,true", "action=1"):
                client.say(request)
                assert client.hear("start=port:")[1] == body
            rollout = ("127.0.0.1", int(body.removeprefix("start=port:")))
            client.say("action=1", rollout)
            last = ""
            while "done=true" not in last:
                head, last, _ = client.hear("obs=")
            client.say("action=1", rollout)
            assert client.hear("obs=")[:2] == (head, last)
        finally:
            client.close()
