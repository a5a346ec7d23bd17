"""`bridge.core.server.memory`: a server that has been large becomes small again."""

import gc
import platform
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.core.server.memory import MemoryRelease
from tests.http2_tools import BEGIN, Hand
from tests.support import objects_of, server_process, until

MIB = 1 << 20
DEADLINE = 60.0

SERVE_PICTURES = """
import sys
import bridge
from tests.core.server.test_memory import Pictures
server = bridge.serve_gym(Pictures, transport=sys.argv[1], thread_safe=sys.argv[2] == "threads")
print(server.url, flush=True)
server.wait(grace=0.0)
"""


class Pictures(gymnasium.Env):
    """Its observations are large."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (400, 400, 3), np.uint8)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.full((400, 400, 3), 7, np.uint8), {}

    def step(self, action):
        return np.full((400, 400, 3), 7, np.uint8), 0.0, False, False, {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by itself, or never")
@pytest.mark.parametrize(
    ("transport", "threads"),
    [
        ("http2", "one"),
        pytest.param("http2", "threads", marks=pytest.mark.slow),
        pytest.param("grpcio", "one", marks=pytest.mark.slow),
    ],
)
def test_a_server_whose_clients_took_no_answers_becomes_small_again(transport, threads):
    with server_process(SERVE_PICTURES, transport, threads, fresh=True) as (process, url):
        watched = psutil.Process(process.pid)
        # A client that stays, so that nothing is given back because the server is empty.
        with make_remote(url) as env:
            env.reset(seed=0)
            env.step(0)
            before = watched.memory_info().rss
            with Hand(SimpleNamespace(port=int(url.rpartition(":")[2]))) as hand:
                for number in [hand.play() for _ in range(50)]:
                    hand.say(number, BEGIN)  # its answer is longer than the window, and nothing is read
                until(lambda: watched.memory_info().rss - before > 40 * MIB, DEADLINE)
                largest = watched.memory_info().rss
            until(lambda: watched.memory_info().rss - before < (largest - before) / 4, DEADLINE)
            assert env.step(1)[0].shape == (400, 400, 3)


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.slow
def test_what_a_closed_world_held_is_freed_at_once(num_envs):
    """What waits for the garbage collector is memory that nobody counts: a space of pictures has megabytes."""

    modules = "bridge.core.worlds.local", "tests.core.server.test_memory"

    def held():
        # Other tests may have a server that goes on.
        return {kind.__name__ for kind in objects_of(*modules) - others}

    gc.collect()
    gc.disable()
    others = objects_of(*modules)
    try:
        with serve_gym(Pictures, num_envs=num_envs) as server:
            env = make_vec_remote(server.url)
            env.reset(seed=0)
            while env.step(np.zeros(num_envs, np.int64))[0][0] is None:
                pass
            assert held() >= {"LocalEnv", "Pictures"}
            env.close()
            del env
            until(lambda: not server.worlds)
            until(lambda: not held())
    finally:
        gc.enable()


# Without a process


class Process:
    """A process whose memory and time are numbers.

    Args:
        size: What it has, in MiB.
        free: What of that the C library could give back.
    """

    def __init__(self, size=100, free=0):
        self.size, self.free, self.trims, self.now = size, free, 0, 0.0
        self.timers = []
        self.memory = MemoryRelease(self.call_later, lambda: self.size * MIB, self.trim)

    def call_later(self, seconds, callback):
        self.timers.append((self.now + seconds, callback))

    def trim(self):
        self.trims += 1
        self.size, self.free = self.size - self.free, 0

    def run(self):
        """Go on to the next timer, and return the seconds until it."""
        (due, callback), before = self.timers.pop(0), self.now
        self.now = due
        callback()
        return due - before


def test_memory_is_given_back_once_for_all_that_left_together():
    process = Process()
    process.size, process.free = 300, 190
    for _ in range(50):
        process.memory.soon()
    assert len(process.timers) == 1
    process.run()
    assert (process.trims, process.size, process.timers) == (1, 110, [])


def test_a_process_that_has_not_grown_is_left_alone():
    process = Process(size=1000)
    for size in (1000, 1010, 990, 1000):
        process.size = size
        process.memory.soon()
        process.run()
    assert process.trims == 0


def test_a_server_that_is_large_because_it_is_used_is_asked_seldom_and_its_peaks_still_go():
    process = Process()
    process.size = 5000
    pauses = []
    for _ in range(8):
        process.memory.soon()
        pauses.append(process.run())
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] <= 80.0
    assert pauses[-1] == pauses[-2]
    process.free = 4900
    process.memory.soon()
    process.run()
    assert process.size == 100
    process.size, process.free = 300, 200
    process.memory.soon()
    assert process.run() == pauses[0]


def test_where_the_size_is_not_known_nothing_is_done():
    timers = []
    memory = MemoryRelease(lambda *timer: timers.append(timer), lambda: None, lambda: None)
    memory.soon()
    assert timers == []


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems_are_left_alone(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    timers = []
    MemoryRelease(lambda *timer: timers.append(timer), lambda: MIB).soon()
    assert timers == []


def test_on_this_system_the_own_size_is_known_or_nothing_is_done():
    timers = []
    MemoryRelease(lambda *timer: timers.append(timer)).soon()
    assert len(timers) == (platform.libc_ver()[0] == "glibc")
    for _, callback in timers:
        callback()
