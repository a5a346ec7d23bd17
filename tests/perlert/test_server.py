"""Server and environment over real sockets on loopback."""

import gc
import os
import pickle
import socket
import threading

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from bridge.errors import (
    AddressError,
    ClosedError,
    ConcurrentUseError,
    ConnectError,
    InvalidActionError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
    UnsupportedSpaceError,
)
from bridge.perlert import GuardConfig, LobbyConfig, PerlertEnv, make_perlert_env, serve_perlert
from bridge.perlert.perlert_server import default_name
from tests.perlert_simulation import ports_of
from tests.support import sampled, until

KEY = "0123456789abcdef0123456789abcdef"


class Counter(gymnasium.Env):
    """Counts to `length`; every reward is 0.5."""

    observation_space = spaces.Dict({"count": spaces.Discrete(10_000), "last": spaces.Box(-1, 1, (2,))})
    action_space = spaces.Box(-1, 1, (2,))
    made = 0
    closed = 0

    def __init__(self, length=10, truncates=False):
        Counter.made += 1
        self.length, self.truncates = length, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return {"count": 0, "last": np.zeros(2, np.float32)}, {}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        seen = {"count": self.count, "last": action}
        return seen, 0.5, over and not self.truncates, over and self.truncates, {}

    def close(self):
        Counter.closed += 1


def instance_of(server):
    """The only instance of a server."""
    (instance,) = server.host.instances.values()
    return instance


def episode(env, action=None):
    observation, info = env.reset()
    total, steps = 0.0, 0
    while True:
        observation, reward, terminated, truncated, info = env.step(
            env.action_space.sample() if action is None else action
        )
        total, steps = total + reward, steps + 1
        if terminated or truncated:
            return observation, total, terminated, truncated, info


def test_an_environment_is_played_for_several_episodes_and_knows_its_spaces():
    # P-9 … P-18 over real sockets, both ends ours.
    with serve_perlert(Counter, name="count", fps=25) as server:
        assert server.url == f"perlert://127.0.0.1:{server.port}/count:0"
        with make_perlert_env(server.url) as env:
            assert isinstance(env, gymnasium.Env)
            assert env.observation_space == Counter.observation_space
            assert env.action_space == Counter.action_space
            assert env.metadata["render_fps"] == 25
            assert env.agent == "agent0"
            for _ in range(3):
                observation, total, terminated, truncated, info = episode(env, np.array([0.25, -0.5], np.float32))
                assert env.observation_space.contains(observation)
                assert (total, terminated, truncated) == (5.0, True, False)
                assert observation["count"] == 10
                assert observation["last"].tolist() == [0.25, -0.5]
                assert info["return"] == 5.0
                assert info["perlert"]["lost"] == 0
                assert info["perlert"]["rtt"] > 0
            assert info["ack"] <= info["seq"]
        assert server.stats()["count:0"]["runs"] == 3


def test_a_truncation_arrives_as_one():
    with (
        serve_perlert(lambda: Counter(3, truncates=True), name="count", fps=100) as server,
        PerlertEnv(server.url) as env,
    ):
        _, _, terminated, truncated, _ = episode(env)
        assert (terminated, truncated) == (False, True)


def test_an_agent_that_is_slow_skips_steps_and_loses_no_reward():
    # P-27
    with (
        serve_perlert(lambda: Counter(30), name="count", fps=200, max_rate=200) as server,
        PerlertEnv(server.url) as env,
    ):
        env.reset()
        total = 0.0
        watcher = threading.Event()
        while True:
            watcher.wait(0.04)
            _, reward, terminated, _, info = env.step(env.action_space.sample())
            total += reward
            if terminated:
                break
        assert total == 15.0
        assert info["step"] == 30


def test_step_and_reset_out_of_turn_tell_what_to_call():
    with serve_perlert(Counter, name="count", fps=100) as server:
        env = PerlertEnv(server.url)
        with pytest.raises(ResetNeededError, match="call reset"):
            env.step(env.action_space.sample())
        env.reset()
        with pytest.raises(InvalidActionError, match="expected an action of Box"):
            env.step(np.array([2.0, 0.0], np.float32))
        with pytest.raises(SettingError, match="options"):
            env.reset(options={"x": 1})
        env.close()
        env.close()
        with pytest.raises(ClosedError):
            env.reset()


def test_a_second_thread_gets_an_error_and_not_a_race():
    ended = threading.Event()

    def wait_for_a_run():
        with pytest.raises(RemoteTimeoutError, match="no run started"):
            env.reset()
        ended.set()

    policy = LobbyConfig(clients=2)
    with (
        serve_perlert(two_agents, name="two", fps=100, lobby_config=policy) as server,
        PerlertEnv(server.url, agent="a_0", start_timeout=3.0) as env,
    ):
        lobby = instance_of(server).lobby
        thread = threading.Thread(target=wait_for_a_run)
        thread.start()
        until(lambda: lobby.listing()["a_0"].ready)  # the thread has said so, and waits for the second client
        with pytest.raises(ConcurrentUseError):
            env.reset()
        thread.join(30)
        assert ended.is_set()


def test_a_run_that_was_left_is_not_taken_for_the_next_one_after_a_timeout():
    with serve_perlert(lambda: Counter(9000), name="count", fps=100) as server:
        env = PerlertEnv(server.url, start_timeout=2.0)
        env.reset()
        for _ in range(2):
            with pytest.raises(RemoteTimeoutError, match="the run that was left did not end"):
                env.reset()
        env.close()


def test_an_environment_is_pickled_as_its_url_and_connects_again():
    with serve_perlert(Counter, name="count", instances=2, fps=100) as server:
        env = PerlertEnv(server.urls[0], tag="one")
        data = pickle.dumps(env)
        env.close()
        # The old registration is another source port's; it expires, so the copy takes the other instance's slot.
        state = pickle.loads(data.replace(b"count:0", b"count:1"))
        assert episode(state)[1] == 5.0
        state.close()


def test_nobody_there_is_an_error_after_the_deadline():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"perlert://127.0.0.1:{silent.getsockname()[1]}/cartpole:0"
        with pytest.raises(ConnectError, match="no PERLERT lobby answered"):
            PerlertEnv(url, timeout=0.3)
    with pytest.raises(ConnectError, match="has no address"):
        PerlertEnv("perlert://no-such-host.invalid:1/cartpole:0", timeout=0.3)
    with pytest.raises(AddressError):
        PerlertEnv("perlert://127.0.0.1/cartpole:0")


def test_a_slot_that_cannot_be_had_is_an_error_that_says_why():
    with serve_perlert(Counter, name="count", fps=100) as server:
        with pytest.raises(SettingError, match="there is no slot 'agent7'; the slots are agent0"):
            PerlertEnv(server.url, agent="agent7", timeout=5)
        with pytest.raises(SettingError, match="expected a key, got an empty text"):
            PerlertEnv(server.url, agent="")
        with PerlertEnv(server.url, tag="holder"), pytest.raises(RemoteTimeoutError, match="no slot is open"):
            PerlertEnv(server.url, timeout=2)


def test_a_start_that_does_not_come_is_an_error_that_says_what_is_missing():
    # P-10
    with serve_perlert(two_agents, name="two", fps=100) as server:
        env = PerlertEnv(server.url, agent="a_0", start_timeout=2)
        with pytest.raises(RemoteTimeoutError, match="open or not ready: a_1"):
            env.reset()
        env.close()


def two_agents():
    pettingzoo = pytest.importorskip("pettingzoo")

    class Two(pettingzoo.ParallelEnv):
        metadata = {"name": "two"}  # noqa: RUF012
        possible_agents = ["a_0", "a_1"]  # noqa: RUF012

        def observation_space(self, agent):
            return spaces.Discrete(1000)

        def action_space(self, agent):
            return spaces.Discrete(5)

        def reset(self, seed=None, options=None):
            self.agents, self.count = list(self.possible_agents), 0
            return dict.fromkeys(self.agents, 0), {}

        def step(self, actions):
            self.count += 1
            ended = [a for a in self.agents if self.count >= (5 if a == "a_0" else 10)]
            agents = self.agents
            self.agents = [a for a in agents if a not in ended]
            rewards = {a: float(actions[a]) for a in agents}
            return (
                dict.fromkeys(agents, self.count),
                rewards,
                {a: a in ended for a in agents},
                dict.fromkeys(agents, False),
                {},
            )

    return Two()


def test_bots_fill_open_slots_and_an_agent_that_ends_early_waits_for_the_next_run():
    # P-29
    with serve_perlert(two_agents, name="two", fps=20, bots={"a_1": lambda observation: 3}) as server:
        with PerlertEnv(server.url, agent="a_0") as env:
            listing = {slot.key: (slot.open, slot.kind, slot.tag, slot.ready) for slot in env.slots}
            assert listing["a_1"] == (True, "a", "cpu", True)
            for _ in range(2):
                observation, total, terminated, _, _ = episode(env, np.int64(2))
                assert (observation, total, terminated) == (5, 10.0, True)
        assert server.stats()["two:0"]["runs"] == 2


def test_a_start_by_count_fills_the_rest_with_the_default_action():
    # P-27: the server chooses until a client's first valid action.
    with (
        serve_perlert(two_agents, name="two", fps=100, start=1, default_action=4) as server,
        PerlertEnv(server.url) as env,
    ):
        assert episode(env, np.int64(1))[2]


def test_a_countdown_is_announced_to_the_client():
    with (
        serve_perlert(Counter, name="count", fps=100, countdown=0.2) as server,
        PerlertEnv(server.url) as env,
    ):
        episode(env)
        assert env.messages[:2] == ["Simulation will start in 1 s", "Simulation will start..."]


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_server_is_reached_by_name_and_over_ipv6(host):
    try:
        server = serve_perlert(Counter, name="count", fps=100, host=host)
    except SettingError:
        pytest.skip(f"this machine cannot bind to {host}")
    with server, PerlertEnv(server.url) as env:
        assert episode(env)[1] == 5.0


def test_several_instances_and_several_environments_share_a_lobby_port():
    with serve_perlert({"count": Counter, "cartpole": "CartPole-v1"}, instances=2, fps=100) as server:
        names = [url.rpartition("/")[2] for url in server.urls]
        assert names == ["count:0", "count:1", "cartpole:0", "cartpole:1"]
        envs = [PerlertEnv(url) for url in server.urls]
        for env in envs:
            env.reset()
        for env in envs:
            env.step(env.action_space.sample())
            env.close()


def test_with_a_key_only_who_has_it_plays():
    # P-26
    pytest.importorskip("cryptography")
    with serve_perlert(Counter, name="count", fps=100, key=KEY) as server:
        for key in (None, "another key of 16 bytes"):
            with pytest.raises(ConnectError):
                PerlertEnv(server.url, key=key, timeout=0.5)
        with PerlertEnv(server.url, key=KEY) as env:
            assert episode(env)[1] == 5.0
        assert server.stats()["dropped"]["not sealed"] > 0


def test_bound_wider_than_loopback_without_a_key_warns():
    with pytest.warns(UserWarning, match="without key="):
        server = serve_perlert(Counter, name="count", host="0.0.0.0")
    with server:
        assert server.url.startswith("perlert://localhost:")


def test_a_recording_that_is_refused_leaves_no_port_bound(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with serve_perlert(Counter, name="count") as server:
        port = server.port
    with pytest.raises(SettingError, match="cannot record") as error:
        serve_perlert(Counter, name="count", port=port, record=file)
    with serve_perlert(Counter, name="count", port=port) as server:
        assert server.port == port
    assert error  # which holds the frames that it passed


def test_an_environment_whose_observations_may_not_fit_is_refused_with_the_remedy():
    before = Counter.closed
    with pytest.raises(UnsupportedSpaceError, match=r"fit into \d+ bytes of a datagram.*decimals=2"):
        serve_perlert(lambda: Wide(), name="wide")
    assert Counter.closed == before + 1


class Wide(Counter):
    observation_space = spaces.Box(-np.inf, np.inf, (105,), np.float64)


class Beyond(Counter):
    """Gives observations far outside of their space."""

    observation_space = spaces.Box(-1, 1, (90,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(90, np.float32), {}

    def step(self, action):
        _, *rest = super().step(action)
        return np.full(90, -1234567.875, np.float32), *rest


class Unready(Counter):
    """Never begins an episode."""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no simulator is installed")


def test_a_reset_that_fails_is_in_the_error_of_a_client_that_waits_for_its_run():
    with serve_perlert(Unready, name="unready", fps=50) as server, PerlertEnv(server.url, start_timeout=1.5) as env:
        with pytest.raises(RemoteTimeoutError) as error:
            env.reset()
        assert f"the server said: {env.messages[-1]}" in str(error.value)
        assert any("RuntimeError in reset: no simulator is installed" in text for text in env.messages)


def test_an_observation_far_outside_of_its_space_ends_the_run_and_says_why():
    with serve_perlert(Beyond, name="beyond", fps=50) as server, PerlertEnv(server.url) as env:
        env.reset()
        *_, terminated, truncated, info = env.step(env.action_space.sample())
        while not (terminated or truncated):
            *_, terminated, truncated, info = env.step(env.action_space.sample())
        assert truncated
        assert not info["lost"]
        assert "expected an observation of Box(-1.0, 1.0, (90,), float32) in at most" in env.messages[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    sampled(
        [
            ({"instances": 0}, "instances"),
            ({"fps": 0}, "fps"),
            ({"start": "soon"}, "start"),
            ({"start": 2}, "at most 1 clients"),
            ({"bots": "clever"}, "bots"),
            ({"bots": {"agent9": lambda o: 0}}, "agent9"),
            ({"default_action": 7}, "default_action"),
            ({"slots": ["a", "b"]}, "slots"),
            ({"spectators": -1}, "spectators"),
            ({"decimals": 99}, "decimals"),
            ({"key": "short"}, "16 random bytes"),
            ({"host": "127.0.0.1.7"}, "bind"),
            ({"env_kwargs": {"nonsense": 1}}, "nonsense"),
        ],
        4,
    ),
)
@pytest.mark.filterwarnings("ignore:serve_perlert on")
def test_a_keyword_that_cannot_be_served_is_refused_and_nothing_is_left_open(settings, message):
    before = psutil.Process().num_fds()
    with pytest.raises((SettingError, TypeError), match=message):
        serve_perlert(Counter, name="count", **settings)
    gc.collect()
    assert psutil.Process().num_fds() <= before


def test_a_name_is_made_from_the_id():
    assert default_name("CartPole-v1") == "cartpole"
    assert default_name("ALE/Pong-v5") == "pong"
    assert default_name(lambda: None) == "world"
    assert default_name(gymnasium.spec("MountainCarContinuous-v0")) == "mountaincarcontinuous"
    with pytest.raises(SettingError, match="callable"):
        serve_perlert(7)
    with pytest.raises(SettingError, match="expected a PettingZoo"):
        serve_perlert(dict)


def test_a_server_that_stops_leaves_no_thread_and_no_socket_and_closes_its_environments():
    before_fds, before_threads, closed = psutil.Process().num_fds(), threading.active_count(), Counter.closed
    with (
        serve_perlert(lambda: Counter(1000), name="count", instances=2, fps=100) as server,
        PerlertEnv(server.url) as env,
    ):
        env.reset()
        server.stop()
        while True:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                break
        assert truncated
    assert server.wait(5.0)
    gc.collect()
    assert threading.active_count() == before_threads
    assert psutil.Process().num_fds() <= before_fds
    assert Counter.closed == closed + 2


def test_a_stop_with_grace_lets_the_run_end():
    with serve_perlert(lambda: Counter(30), name="count", fps=100) as server, PerlertEnv(server.url) as env:
        env.reset()
        threading.Thread(target=server.stop, args=(20.0,)).start()
        done = False
        while not done:
            _, _, done, truncated, info = env.step(env.action_space.sample())
            assert not truncated
        assert info["return"] == 15.0
        assert server.wait(10.0)


@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 100, b"x" * 5000, b"count:0;register=agent0,x,ready;a=close", os.urandom(1200)]
)
def test_junk_on_both_ports_ends_nobodys_run(payload):
    with serve_perlert(lambda: Counter(20), name="count", fps=100) as server, PerlertEnv(server.url) as env:
        env.reset()
        (rollout,) = ports_of(instance_of(server))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for _ in range(50):
                for port in (server.port, rollout):
                    stranger.sendto(payload, ("127.0.0.1", port))
        done = False
        while not done:
            _, _, done, _, info = env.step(env.action_space.sample())
        assert info["return"] == 10.0


def test_a_datagram_that_the_buffer_cuts_is_dropped_and_counted():
    # P-19: a fixed buffer, and no plausible `12.` out of a cut `12.5`.
    with serve_perlert(Counter, name="count", fps=100) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.settimeout(5.0)
            sender.sendto(b"count:0;lobby" + b" " * 1500, ("127.0.0.1", server.port))
            sender.sendto(b"count:0;lobby", ("127.0.0.1", server.port))
            assert sender.recv(100).startswith(b"count:0;agent0=open")
        assert server.stats()["dropped"] == {"cut": 1}


def test_the_limits_of_the_server_are_the_users():
    guard = GuardConfig(max_slots_per_host=1)
    with (
        serve_perlert(two_agents, name="two", fps=100, guard=guard, lobby_config=LobbyConfig(expiry=30)) as server,
        PerlertEnv(server.url, agent="a_0"),
        pytest.raises(RemoteTimeoutError),
    ):
        PerlertEnv(server.url, agent="a_1", timeout=2)


def test_one_source_port_is_kept_for_the_whole_life_of_the_client():
    # P-11
    with serve_perlert(Counter, name="count", fps=100) as server, PerlertEnv(server.url) as env:
        sources = set()
        for _ in range(2):
            episode(env)
            sources |= set(instance_of(server).lobby.clients)
        ((host, port),) = sources
        ours = {each.laddr.port for each in psutil.Process().net_connections("udp")}
        assert host == "127.0.0.1"
        assert port in ours - {server.port}
