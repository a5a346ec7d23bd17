"""Attacks and accidents over real UDP sockets.

A spoofed datagram is sent through its victim's own socket: the server cannot tell the difference. Victims that never
ask for anything have loopback addresses of their own, which the server is told not to trust.
"""

import contextlib
import itertools
import os
import select
import socket
import threading
import time

import numpy as np
import psutil
import pytest

from bridge.errors import RemoteTimeoutError
from bridge.perlert import GuardConfig, LobbyConfig, PerlertEnv, serve_perlert
from tests.draft_peers import PlainClient
from tests.perlert.environments import two_agents
from tests.perlert.recorder import Recorder
from tests.perlert_simulation import client_of

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123456789abcdef"
WARY = GuardConfig(trusted=())
"""No address is believed, not even one of this machine."""


def sock_of(env):
    return client_of(env).port._socket


def rollout_of(env):
    return client_of(env).player.port


def finish(env, action):
    total, done = 0.0, False
    while not done:
        _, reward, terminated, truncated, info = env.step(np.int64(action))
        total, done = total + reward, terminated or truncated
    return total, truncated, info


@contextlib.contextmanager
def udp(host):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((host, 0))
        sock.settimeout(5.0)
        yield sock


def heard(sock):
    """The datagrams that wait in a socket."""
    found = []
    while select.select([sock], [], [], 0)[0]:
        found.append(sock.recv(2048))
    return found


def wait_until(ready, seconds=20.0):
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not ready():
        assert time.monotonic() < deadline, "it did not come to pass"
        pause.wait(0.01)


# Who sees nothing, and writes any sender


@pytest.mark.parametrize("guard", [None, WARY], ids=["trusted", "wary"])
def test_spoofed_messages_of_a_client_neither_act_for_it_nor_unseat_it_nor_end_its_run(guard):
    recorder = Recorder(40)
    with (
        serve_perlert(lambda: recorder, name="count", fps=100, max_rate=100, guard=guard) as server,
        PerlertEnv(server.url, tag="joe") as env,
    ):
        lobby = ("127.0.0.1", server.port)

        def spoof(port):
            for text in (
                "register=agent0,joe",
                "register=agent0,eve",
                "register=agent0,joe+b1",
                "register=agent0,joe+b1.000000000000.999.l",
                "ready=agent0,false",
                "ready=agent0,true",
                "action=666",
                "action=000000000000,999,666",
                f"action=000000000000,{port},999,666",
            ):
                for target in (lobby, ("127.0.0.1", port)):
                    sock_of(env).sendto(f"count:0;{text}".encode(), target)

        spoof(server.port)
        env.reset()
        total, done = 0.0, False
        while not done:
            spoof(rollout_of(env))
            _, reward, done, truncated, info = env.step(np.int64(7))
            total += reward
        assert not truncated
        assert total == info["return"] == 40.0
        assert set(recorder.episodes[0]) <= {0, 7}
        (client,) = next(iter(server.host.instances.values())).lobby.clients.values()
        assert (client.tag, client.key, bool(client.token)) == ("joe", "agent0", True)


def test_a_flood_in_a_clients_name_loses_none_of_its_actions():
    with (
        serve_perlert(lambda: Recorder(100), name="count", fps=50, max_rate=50, guard=WARY) as server,
        PerlertEnv(server.url) as env,
    ):
        env.reset()
        done = False
        while not done:
            for _ in range(20):  # 1,000 a second
                sock_of(env).sendto(b"count:0;action=666", ("127.0.0.1", rollout_of(env)))
            _, _, done, _, info = env.step(np.int64(7))
        assert server.stats()["dropped"]["flood"] > 0
        assert info["seq"] - info["ack"] <= 5


def test_an_address_that_never_answered_is_sent_no_more_than_the_bound():
    with serve_perlert(lambda: Recorder(10_000), name="count", fps=30, start=1, spectators=8, guard=WARY) as server:
        lobby, run = ("127.0.0.1", server.port), None
        with udp("127.0.0.2") as victim:
            spoofed = got = 0
            begun = time.monotonic()
            while time.monotonic() < begun + 3.0:
                for text in ("lobby", "register=agent0,v", "ready=agent0,true", "register=agent0,v+b1"):
                    spoofed += victim.sendto(f"count:0;{text}".encode(), lobby)
                ports = [r.port for instance in server.host.instances.values() for r in instance.lobby.runs]
                for run in ports:  # every client of a run knows it
                    spoofed += victim.sendto(b"count:0;action=1", ("127.0.0.1", run))
                select.select([], [], [], 0.05)
            got = sum(map(len, heard(victim)))
            seconds = time.monotonic() - begun
            assert run is not None
            assert 0 < got <= max(3 * spoofed, 1000 * (seconds + 1))
            # One datagram a minute keeps nothing going.
            stream = sum(
                server.host.guard.spend(victim.getsockname(), 100, server.host.now() + s) for s in range(6, 60)
            )
            assert stream <= 60


def test_spraying_ports_of_a_host_reaches_four_of_them():
    with serve_perlert(Recorder, name="count", spectators=20, guard=WARY) as server, contextlib.ExitStack() as stack:
        victims = [stack.enter_context(udp("127.0.0.2")) for _ in range(32)]
        for victim in victims:
            victim.sendto(b"count:0;lobby", ("127.0.0.1", server.port))
        with udp("127.0.0.3") as last:  # when it is answered, so are the others
            last.sendto(b"count:0;lobby", ("127.0.0.1", server.port))
            last.recv(2048)
        assert sum(bool(heard(victim)) for victim in victims) == 4


# Who sees everything, and has no token: with the pre-shared key


def keyed(server, **settings):
    return PerlertEnv(server.url, key=KEY, **settings)


class Tap:
    """A socket that keeps what is sent through it, with where it goes."""

    def __init__(self, sock):
        self.sock, self.sent, self.mute = sock, [], False

    def sendto(self, datagram, address):
        if self.mute:
            return len(datagram)
        self.sent.append((datagram, address))
        return self.sock.sendto(datagram, address)

    def __getattr__(self, name):
        return getattr(self.sock, name)


def record(env):
    tap = client_of(env).port._socket = Tap(sock_of(env))
    return tap


def test_what_was_recorded_of_a_client_with_the_key_changes_nothing_when_it_is_sent_again():
    # P-26
    pytest.importorskip("cryptography")
    recorder = Recorder(60)
    with serve_perlert(lambda: recorder, name="count", fps=100, max_rate=100, key=KEY) as server:
        with keyed(server, tag="joe") as old:
            early = record(old)
            old.reset()
            finish(old, 5)
        with keyed(server, tag="joe") as env:
            late = record(env)
            env.reset()
            done = False
            while not done:
                # From the client's address to both ports: everything, HELLOs too.
                for datagram, _ in [*early.sent[:20], *late.sent[-20:]]:
                    for port in (server.port, rollout_of(env)):
                        late.sock.sendto(datagram, ("127.0.0.1", port))
                        late.sock.sendto(client_of(old).port._seal.hello(), ("127.0.0.1", port))
                _, _, done, truncated, info = env.step(np.int64(7))
            assert not truncated
            assert info["return"] == 60.0
        assert set(recorder.episodes[1]) <= {0, 7}


def test_a_client_with_the_key_plays_on_after_the_server_began_anew():
    # P-26
    pytest.importorskip("cryptography")
    with serve_perlert(lambda: Recorder(20), name="count", fps=100, key=KEY) as first:
        env = keyed(first, timeout=20.0)
        env.reset()
        assert finish(env, 1)[0] == 20.0
        port = first.port
    with serve_perlert(lambda: Recorder(20), name="count", fps=100, key=KEY, port=port):
        env.reset()
        assert finish(env, 1)[0] == 20.0
        env.close()


def test_a_plain_client_plays_on_after_the_server_began_anew():
    with serve_perlert(lambda: Recorder(20), name="count", fps=100) as first:
        env = PerlertEnv(first.url, timeout=20.0)
        env.reset()
        finish(env, 1)
        port = first.port
    with serve_perlert(lambda: Recorder(20), name="count", fps=100, port=port):
        env.reset()
        assert finish(env, 1)[0] == 20.0
        env.close()


def test_with_a_key_each_datagram_is_booked_once():
    # P-26
    pytest.importorskip("cryptography")
    guard = GuardConfig(datagrams_per_second=200)
    with (
        serve_perlert(lambda: Recorder(800), name="count", fps=170, max_rate=170, key=KEY, guard=guard) as server,
        keyed(server) as env,
    ):
        env.reset()
        finish(env, 7)
        assert server.stats()["dropped"].get("flood", 0) == 0


# Runs, slots and tags


def test_an_action_of_one_run_is_not_applied_in_the_next_one():
    recorder = Recorder(30)
    with serve_perlert(lambda: recorder, name="count", fps=50, max_rate=50) as server, PerlertEnv(server.url) as env:
        tap = record(env)
        env.reset()
        finish(env, 5)
        actions = [datagram for datagram, _ in tap.sent if b"action=" in datagram]
        player, ours = client_of(env).player, client_of(env).port
        ours.send(player.set_ready(True, time.monotonic()))
        old = player.port
        while player.port == old:  # until the next run's port is known, and not an action longer
            ours.wait(0.05)
            datagram, sender, _ = ours.read() or (b"", ("", 0), 0)
            tap.mute = b";start=" in datagram and str(old).encode() not in datagram
            ours.send(player.receive(datagram, sender, time.monotonic()))
        for _ in range(20):
            for datagram in actions:
                tap.sock.sendto(datagram, ("127.0.0.1", player.port))
            select.select([], [], [], 0.02)
        tap.mute = False
        env.reset()
        finish(env, 7)
        assert 5 in recorder.episodes[0]
        assert set(recorder.episodes[1]) <= {0, 7}
        assert len(recorder.episodes[1]) == 30


def test_a_second_client_of_the_same_tag_is_told_that_the_slot_is_held():
    with (
        serve_perlert(Recorder, name="count", fps=50) as server,
        PerlertEnv(server.url, tag="joe") as first,
    ):
        with pytest.raises(RemoteTimeoutError, match="the slot 'agent0' is held by 'joe'"):
            PerlertEnv(server.url, tag="joe", agent="agent0", timeout=2.0)
        first.reset()
        assert finish(first, 1)[0] == 20.0


def test_who_closes_frees_the_slot_for_the_next_client_at_once():
    with serve_perlert(Recorder, name="count", fps=50, lobby_config=LobbyConfig(expiry=1000)) as server:
        for _ in range(3):
            with PerlertEnv(server.url, timeout=10.0) as env:
                env.reset()


def test_a_client_that_is_gone_without_leaving_has_its_slot_and_its_run_taken_over_by_its_token():
    with serve_perlert(lambda: Recorder(300), name="count", fps=50, lobby_config=LobbyConfig(expiry=1000)) as server:
        first = PerlertEnv(server.url, tag="joe", timeout=5.0)
        first.reset()
        first.step(np.int64(3))
        token = first.token
        assert len(token) == 12
        sock_of(first).close()  # as in a crash
        with pytest.raises(RemoteTimeoutError):
            PerlertEnv(server.url, agent="agent0", token="0" * 12, timeout=1.0)
        with PerlertEnv(server.url, agent="agent0", token=token, tag="joe") as second:
            observation, _ = second.reset()
            assert observation[0] > 0  # the run that is on
            assert finish(second, 4)[2]["return"] == 300.0
        assert server.stats()["count:0"]["runs"] == 1


def test_one_hostile_client_cannot_keep_a_countdown_from_ending():
    config = LobbyConfig(patience=1.0)
    with (
        serve_perlert(two_agents, name="two", fps=50, start=1, countdown=0.5, lobby_config=config) as server,
        udp("127.0.0.1") as hostile,
    ):
        stop = threading.Event()

        def annoy():
            for number in itertools.count():
                if stop.wait(0.02):
                    return
                text = f"register=a_1,x{number % 7}" if number % 3 else f"ready=a_1,{'true' if number % 2 else 'false'}"
                hostile.sendto(f"two:0;{text}".encode(), ("127.0.0.1", server.port))

        thread = threading.Thread(target=annoy)
        thread.start()
        try:
            with PerlertEnv(server.url, agent="a_0", start_timeout=30.0) as env:
                env.reset()
        finally:
            stop.set()
            thread.join()


def test_an_idle_spectator_does_not_keep_the_next_run_from_starting():
    config = LobbyConfig(expiry=1000)
    with (
        serve_perlert(lambda: Recorder(5), name="count", fps=50, spectators=1, lobby_config=config) as server,
        udp("127.0.0.1") as idle,
        PerlertEnv(server.url) as env,
    ):
        idle.sendto(b"count:0;register=spectator0,idle", ("127.0.0.1", server.port))
        for _ in range(3):
            env.reset()
            assert finish(env, 1)[0] == 5.0


# Environments


class Exits(Recorder):
    def step(self, action):
        if len(self.episodes) == 1 and len(self.episodes[-1]) == 3:
            raise SystemExit(3)
        return super().step(action)


def test_an_environment_that_exits_ends_its_run_and_not_the_server(caplog):
    with serve_perlert(Exits, name="count", fps=50, max_rate=50) as server, PerlertEnv(server.url) as env:
        env.reset()
        assert finish(env, 1)[1]
        assert any("SystemExit" in text for text in env.messages)
        env.reset()
        assert finish(env, 1)[0] == 20.0
        assert server.stats()["count:0"]["failures"] == 1


class SlowReset(Recorder):
    """Its second reset waits until it is let go."""

    go = threading.Event()

    def reset(self, *, seed=None, options=None):
        if self.episodes:
            assert SlowReset.go.wait(60.0)
        return super().reset(seed=seed, options=options)


def test_a_reset_that_takes_long_holds_up_no_other_instance_and_no_lobby():
    SlowReset.go.clear()
    made = {"slow": SlowReset, "quick": lambda: Recorder(5)}
    with (
        serve_perlert(made, fps=50, max_rate=50, thread_safe=True) as server,
        PerlertEnv(server.urls[0]) as slow,
        PerlertEnv(server.urls[1]) as quick,
    ):
        slow.reset()
        finish(slow, 1)
        waits = threading.Thread(target=slow.reset)
        waits.start()
        wait_until(lambda: "Simulation will start..." in slow.messages[1:])
        for _ in range(3):
            quick.reset()
            assert finish(quick, 1)[0] == 5.0
        SlowReset.go.set()
        waits.join(30.0)
        assert not waits.is_alive()


def test_while_an_environment_of_the_serving_thread_is_in_a_call_the_lobbies_answer():
    SlowReset.go.clear()
    with serve_perlert(SlowReset, name="slow", fps=50, max_rate=50) as server, PerlertEnv(server.url) as env:
        env.reset()
        finish(env, 1)
        waits = threading.Thread(target=env.reset)
        waits.start()
        wait_until(lambda: "Simulation will start..." in env.messages[1:])
        with udp("127.0.0.1") as asker:
            asker.sendto(b"slow:0;lobby", ("127.0.0.1", server.port))
            assert asker.recv(2048).startswith(b"slow:0;agent0=close")
        SlowReset.go.set()
        waits.join(30.0)
        assert not waits.is_alive()


def test_environments_may_have_processes_of_their_own():
    with (
        serve_perlert("CartPole-v1", instances=2, fps=60, isolation="process") as server,
        PerlertEnv(server.urls[0]) as one,
        PerlertEnv(server.urls[1]) as two,
    ):
        for env in (one, two):
            env.reset()
            assert finish(env, 1)[0] >= 5


class Crashes(Recorder):
    """Its first process ends in the midst of an episode."""

    def __init__(self, path):
        super().__init__(10)
        self.path = path

    def step(self, action):
        if not self.path.exists() and len(self.episodes[-1]) == 3:
            self.path.touch()
            os._exit(3)
        return super().step(action)


def test_an_instance_whose_process_has_ended_has_a_new_one_for_the_next_run(tmp_path):
    settings = {"fps": 50, "max_rate": 50, "isolation": "process", "env_kwargs": {"path": tmp_path / "crashed"}}
    with serve_perlert(Crashes, name="count", **settings) as server, PerlertEnv(server.url) as env:
        env.reset()
        assert finish(env, 1)[1]
        assert any("ended" in text for text in env.messages)
        for _ in range(2):
            env.reset()
            assert finish(env, 1)[0] == 10.0
        assert server.stats()["count:0"]["failures"] == 1


class Stuck(Crashes):
    """Its second process does not come to an end with its construction."""

    def __init__(self, path):
        super().__init__(path)
        if path.exists():
            threading.Event().wait(60.0)


def test_a_server_that_stops_while_it_makes_an_environment_again_leaves_no_process(tmp_path):
    settings = {"fps": 50, "max_rate": 50, "isolation": "process", "env_kwargs": {"path": tmp_path / "crashed"}}
    with serve_perlert(Stuck, name="count", **settings) as server, PerlertEnv(server.url) as env:
        before = {each.pid for each in psutil.Process().children(recursive=True)}
        env.reset()
        assert finish(env, 1)[1]
        client = client_of(env)
        client.port.send(client.player.set_ready(True, time.monotonic()))

        def made():
            client.pump()
            return [each for each in psutil.Process().children(recursive=True) if each.pid not in before]

        wait_until(made)
        processes = made()
        server.stop()
        for process in processes:
            process.wait(10)


def test_turn_based_environments_are_served():
    # P-29
    pytest.importorskip("pettingzoo")
    rps = pytest.importorskip("pettingzoo.classic.rps_v2")
    with serve_perlert(rps.env, fps=60, bots={"player_1": "random"}) as server, PerlertEnv(server.url) as env:
        assert server.url.endswith("/env:0")
        env.reset()
        finish(env, 1)


# The network


class Stalls(Recorder):
    """Now and then a step takes long, and the clock makes up for it."""

    def step(self, action):
        if len(self.episodes[-1]) % 30 == 29:
            threading.Event().wait(0.4)
        return super().step(action)


@pytest.mark.slow
def test_after_a_stall_steps_are_not_sent_faster_than_before():
    # P-21
    with serve_perlert(lambda: Stalls(120), name="count", fps=30) as server:
        client = PlainClient(server.port, "count:0", "agent0", "x")
        try:
            client.socket.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_TIMESTAMPNS", 35), 1)
            client.say("register=agent0,x")
            client.hear("registered=")
            client.say("ready=agent0,true")
            _, body, _ = client.hear("start=port:")
            rollout = ("127.0.0.1", int(body.removeprefix("start=port:")))
            client.say("action=1", rollout)
            times, last = [], b""
            while b"done=true" not in last:
                last, ancillary, _, _ = client.socket.recvmsg(2048, 128)
                if b";obs=" in last:
                    seconds, nanoseconds = np.frombuffer(ancillary[0][2], np.int64)[:2]
                    times.append(seconds + nanoseconds / 1e9)
        finally:
            client.close()
    assert len(times) > 60
    for first in times:
        assert sum(first <= at < first + 0.999 for at in times) <= 31  # one may be early after one that was late


def test_a_server_on_all_addresses_answers_from_the_one_that_was_asked():
    # P-12
    with pytest.warns(UserWarning, match="without key"):
        server = serve_perlert(Recorder, name="count", host="0.0.0.0", fps=50)
    with server, udp("127.0.0.1") as client:
        for host in ("127.0.0.2", "127.0.0.1", "127.0.0.3"):
            client.sendto(b"count:0;lobby", (host, server.port))
            _, source = client.recvfrom(2048)
            assert source == (host, server.port)
        with PerlertEnv(server.url.replace("localhost", "127.0.0.4")) as env:
            env.reset()
            assert finish(env, 1)[0] == 20.0


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "key"])
@pytest.mark.filterwarnings("ignore:serve_perlert on")
def test_a_forged_datagram_to_another_address_of_the_server_moves_no_steps_there(key):
    stopped = threading.Event()
    with (
        serve_perlert(Recorder, name="count", host="0.0.0.0", fps=50, guard=WARY, key=key) as server,
        PerlertEnv(server.url.replace("localhost", "127.0.0.1"), key=key, timeout=5) as env,
    ):
        env.reset()

        def forge():
            while not stopped.wait(0.001):
                sock_of(env).sendto(b"count:0;lobby", ("127.0.0.2", server.port))

        thread = threading.Thread(target=forge)
        thread.start()
        try:
            assert finish(env, 1)[0] == 20.0
        finally:
            stopped.set()
            thread.join()
        assert env.stats["stale"] == 0


def test_a_client_of_the_draft_alone_is_pushed_the_lobby_wherever_it_is():
    # P-7
    with (
        serve_perlert(two_agents, name="two", fps=50, guard=WARY) as server,
        udp("127.0.0.2") as plain,
        udp("127.0.0.3") as other,
    ):
        lobby = ("127.0.0.1", server.port)
        plain.sendto(b"two:0;register=a_0,plain", lobby)
        assert plain.recv(2048) == b"two:0;registered=a_0"
        assert b"a_0=close,a,plain,not_ready" in plain.recv(2048)
        other.sendto(b"two:0;register=a_1,other", lobby)
        assert b"a_1=close,a,other,not_ready" in plain.recv(2048)
        other.sendto(b"two:0;ready=a_1,true", lobby)
        assert b"a_1=close,a,other,ready" in plain.recv(2048)


class Relay:
    """Stands between a client and a lobby, and loses the first `losses` offers with spaces."""

    def __init__(self, port, losses):
        self.front, self.back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        self.front.bind(("127.0.0.1", 0))
        self.back.connect(("127.0.0.1", port))
        self.losses, self.client = losses, None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stop.is_set():
            for sock in select.select([self.front, self.back], [], [], 0.05)[0]:
                if sock is self.front:
                    data, self.client = self.front.recvfrom(2048)
                    self.back.send(data)
                    continue
                data = self.back.recv(2048)
                if b'"fps"' in data and self.losses:
                    self.losses -= 1
                    continue
                self.front.sendto(data, self.client)

    def close(self):
        self.stop.set()
        self.thread.join()
        self.front.close()
        self.back.close()


def test_a_client_asks_for_the_spaces_as_long_as_its_timeout_lets_it():
    with serve_perlert(Recorder, name="count", fps=50) as server:
        relay = Relay(server.port, losses=12)
        try:
            url = f"perlert://127.0.0.1:{relay.front.getsockname()[1]}/count:0"
            with PerlertEnv(url, timeout=30.0) as env:
                assert env.action_space == Recorder.action_space
            assert relay.losses == 0
            relay.losses = 10**9
            with pytest.raises(RemoteTimeoutError, match="has not told its spaces"):
                PerlertEnv(url, timeout=1.5)
        finally:
            relay.close()


def test_sixty_ports_that_ask_for_the_lobby_take_no_step_from_a_player():
    with (
        serve_perlert(lambda: Recorder(150), name="count", fps=50, max_rate=50, spectators=60) as server,
        PerlertEnv(server.url) as env,
        contextlib.ExitStack() as stack,
    ):
        askers = [stack.enter_context(udp("127.0.0.1")) for _ in range(60)]
        env.reset()
        answered, done = 0, False
        while not done:
            for asker in askers:
                asker.sendto(b"count:0;lobby", ("127.0.0.1", server.port))
            _, _, done, _, info = env.step(np.int64(1))
            answered += sum(len(heard(asker)) for asker in askers)
        assert answered > 1000
        assert info["perlert"]["lost"] == 0
        assert info["return"] == 150.0
        lobby = next(iter(server.host.instances.values())).lobby
        assert lobby.counts["partial"] == 0
