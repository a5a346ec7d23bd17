"""Simulators behind routers: nothing comes in there, and they dial the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

import bridge
from bridge.testing import CountingEnv
from tests.support import until

PORT = 6000
URL = f"grpc://trainer:{PORT}"
# As a home router does it: nothing comes in but answers.
CLOSED = ("ct state established accept", "iif lo accept", "drop")


def endless() -> CountingEnv:
    """An environment whose episodes do not end, so that each server that is lost cuts one off."""
    return CountingEnv(10**9)


def dial(count: int, name: str) -> Iterator[str]:
    """Serve in a few servers that dial the trainer."""
    warnings.filterwarnings("ignore", "the token travels unencrypted", RuntimeWarning)  # there are no strangers
    with contextlib.ExitStack() as stack:
        for number in range(count):
            keywords = {"dial": URL, "dial_name": f"{name}-{number}", "token": "secret"}
            stack.enter_context(bridge.serve_gym(endless, **keywords))
        yield "dialing"
        yield "done"


def train(slots: int, places: int) -> Iterator[Any]:
    """Wait for servers and train on them; each `go_on` gives where the slots are and what became of 30 steps."""
    from bridge.dial import DialListener

    listener = DialListener(f"listen://0.0.0.0:{PORT}", token="secret")
    until(lambda: len(listener.endpoints()) == places)
    envs = bridge.make_vec_remote(listener, num_envs=slots, blocking=True)
    envs.reset(seed=0)
    while True:
        truncated = np.zeros(slots, np.int64)
        for _ in range(30):
            _, _, _, truncations, _ = envs.step(envs.action_space.sample())
            truncated += truncations
        yield len(set(envs.env.urls)), truncated.tolist()


def test_servers_behind_routers_fill_the_slots_and_come_back_to_a_trainer_that_is_started_again(network: Any) -> None:
    homes = [network.machine(f"home-{number}") for number in range(2)]
    trainer = network.machine("trainer")
    for number, home in enumerate(homes):
        home.firewall(*CLOSED)
        home.start(dial, 8, f"home-{number}").next()
    first = trainer.start(train, 16, 16)
    assert first.next() == (16, [0] * 16)
    first.kill()
    second = trainer.start(train, 16, 16)  # each has been lost, and dials again
    assert second.next() == (16, [0] * 16)


def test_a_home_that_goes_dark_is_left_and_found_again(network: Any) -> None:
    homes = [network.machine(f"home-{number}") for number in range(2)]
    trainer = network.machine("trainer")
    for number, home in enumerate(homes):
        home.firewall(*CLOSED)
        home.start(dial, 2, f"home-{number}").next()
    program = trainer.start(train, 4, 4)
    assert program.next() == (4, [0] * 4)
    homes[1].close()  # it is switched off, as by a power cut
    program.go_on()
    where, truncated = program.next()
    assert sum(truncated) == 2
    assert where == 2


class Marked(gymnasium.Env[Any, Any]):
    """Tells in each observation which process, server and episode it is of, and how many steps were made in that."""

    observation_space = gymnasium.spaces.Box(-(2**31), 2**31 - 1, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number, self.episode, self.count = number, 0, 0

    def _observe(self) -> Any:
        return np.array([os.getpid(), self.number, self.episode, self.count])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._observe(), float(self.count), self.count == 50 + self.number, False, {}


def dial_marked(count: int, name: str, url: str, proxy: str | None = None) -> Iterator[str]:
    """Serve a marked environment in each of a few servers that dial the trainer, through a proxy where there is one."""
    warnings.filterwarnings("ignore", "the token travels unencrypted", RuntimeWarning)  # there are no strangers
    if proxy is not None:
        os.environ.update(http_proxy=proxy, no_proxy="")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            keywords = {"dial": url, "dial_name": f"{name}-{number}", "token": "secret"}
            stack.enter_context(bridge.serve_gym(lambda number=number: Marked(number), **keywords))
        yield "dialing"
        yield "done"


def train_marked(slots: int, places: int) -> Iterator[Any]:
    """Train on marked environments; each `go_on` gives the seconds until all slots had an observation, and what 50
    steps brought: on how many servers the slots are, and by home the truncations and the slots between two episodes.

    Raises:
        AssertionError: A step of a slot does not follow the one before, in the same episode of the same server.
    """
    from bridge.dial import DialListener

    began = time.monotonic()
    listener = DialListener(f"listen://0.0.0.0:{PORT}", token="secret")
    until(lambda: len(listener.endpoints()) == places, 60.0)
    envs = bridge.make_vec_remote(
        listener, num_envs=slots, blocking=True, timeout=5.0, connect_timeout=2.0, blocking_timeout=60.0
    )
    before, _ = envs.reset(seed=0)
    took = time.monotonic() - began
    ended = np.zeros(slots, np.bool_)
    while True:
        truncated: Counter[str] = Counter()
        for _ in range(50):
            homes = [url.partition("://")[2].rpartition("-")[0] for url in envs.env.urls]
            now, rewards, terminations, truncations, _ = envs.step(envs.action_space.sample())
            for slot in np.flatnonzero(~ended & ~truncations):
                assert now[slot, :3].tolist() == before[slot, :3].tolist()
                assert now[slot, 3] == before[slot, 3] + 1 == rewards[slot]
            for slot in np.flatnonzero(ended & ~truncations):
                assert now[slot, 3] == 0  # the first observation of an episode
            truncated.update(homes[slot] for slot in np.flatnonzero(truncations))
            before, ended = now, terminations | truncations
        between = Counter(homes[slot] for slot in np.flatnonzero(ended))
        yield took, len(set(envs.env.urls)), dict(truncated), dict(between)


def proxy(port: int, only: str) -> Iterator[str]:
    """Be a proxy that knows CONNECT alone, to one host alone."""

    def pump(come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(65536):
                go.sendall(data)
        with contextlib.suppress(OSError):
            go.shutdown(socket.SHUT_WR)

    def serve(near: socket.socket) -> None:
        with near:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += near.recv(1)
            method, target, _ = head.split(b" ", 2)
            host, _, number = target.decode().rpartition(":")
            if method != b"CONNECT" or host != only:
                near.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            try:
                far = socket.create_connection((host, int(number)), 10.0)
            except OSError:
                near.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                return
            with far:
                far.settimeout(None)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                threading.Thread(target=pump, args=(far, near), daemon=True).start()
                pump(near, far)

    with socket.create_server(("", port), backlog=100) as listening:
        yield "there"
        while True:
            near, _ = listening.accept()
            threading.Thread(target=serve, args=(near,), daemon=True).start()


def disturb(count: int) -> int:
    """Connect to the trainer as strangers do who have no token; return how many were refused."""
    refused = 0
    kept: list[socket.socket] = []
    words = (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 50_000,
        b"GET /gymnasium-bridge/dial HTTP/1.1\r\nUpgrade: dm_env_rpc.v1\r\nName: x\r\n\r\n",
    )
    for number in range(count):
        stranger = socket.create_connection(("trainer", PORT), 20.0)
        with contextlib.suppress(OSError):
            stranger.sendall(words[number % 4])
        if number % 4:
            with stranger:
                try:
                    refused += not stranger.recv(100).startswith(b"HTTP/1.1 101")
                except ConnectionError:  # the answer was lost behind what had not been read
                    refused += 1
        else:
            kept.append(stranger)  # it says nothing
    for stranger in kept:
        stranger.close()
    return refused


def settled(program: Any, places: int) -> tuple[Counter[str], Counter[str]]:
    """Let a trainer go on until its slots are on so many servers.

    Returns:
        Its truncations by home, and the slots by home that are between two episodes now.
    """
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        program.go_on()
        _, there, truncated, between = program.next()
        seen.update(truncated)
        if there == places:
            return seen, Counter(between)
    raise AssertionError(f"expected the slots on {places} servers, got them on {there}, with {dict(seen)} truncated")


def check_lost(program: Any, home: str, between: Counter[str]) -> None:
    """Let a trainer go on without a home: its 16 slots lose an episode each, unless they were between two."""
    truncated, _ = settled(program, 48)
    assert set(truncated) == {home}
    assert 16 - between[home] <= truncated[home] <= 16


def check_back(program: Any) -> Counter[str]:
    """Let a trainer go on with all homes, without a loss; return the slots by home that are between two episodes."""
    truncated, between = settled(program, 64)
    assert truncated == {}
    return between


@pytest.mark.slow
def test_sixty_four_servers_behind_routers_and_a_proxy_outlive_all_that_happens_to_them(network: Any) -> None:
    office = network.machine("office")  # whose proxy is the only way out for the last home
    homes = [network.machine(f"home-{number}") for number in range(4)]
    trainer, stranger = network.machine("trainer"), network.machine("stranger")
    way_out = office.start(proxy, 3128, "trainer")
    way_out.next()
    way_out.go_on()
    ways: list[tuple[Any, ...]] = [(URL,), (URL,), (f"ws://trainer:{PORT}",), (f"ws://trainer:{PORT}", "office:3128")]
    programs = []
    for home, way in zip(homes, ways, strict=True):
        home.firewall(*CLOSED)
        programs.append(home.start(dial_marked, 16, home.name, *way))
    homes[3].nft(
        "add table inet out",
        "add chain inet out way { type filter hook output priority 0; policy accept; }",
        f"add rule inet out way ip daddr {trainer.ipv4} reject",
        f"add rule inet out way ip6 daddr {trainer.ipv6} reject",
    )
    for program in programs:
        assert program.next() == "dialing"
    first = trainer.start(train_marked, 64, 64)
    assert first.next()[1:3] == (64, {})
    first.kill()
    time.sleep(10.0)  # the pauses between two attempts have become as long as they get
    second = trainer.start(train_marked, 64, 64)  # each has been lost, and dials again
    took, *rest = second.next()
    print(f"all 64 slots were back {took:.1f} s after the trainer had been started again")
    assert rest[:2] == [64, {}]
    # A thousand strangers without a token take nobody's place.
    assert stranger.run(disturb, 1000, timeout=120.0) == 750
    between = check_back(second)
    # One process is killed, and started again: each of its slots has lost one episode.
    programs[1].kill()
    check_lost(second, "home-1", between)
    homes[1].start(dial_marked, 16, "home-1", URL).next()
    between = check_back(second)
    # One is cut off, and connected again.
    network.cut(homes[2])
    check_lost(second, "home-2", between)
    network.mend(homes[2])
    between = check_back(second)
    # One is suspended, and goes on.
    programs[3].signal(signal.SIGSTOP)
    check_lost(second, "home-3", between)
    programs[3].signal(signal.SIGCONT)
    check_back(second)
