"""Environments for tests of a connection: long, large and slow ones."""

import contextlib
import threading

import gymnasium
import numpy as np

from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.http2_tools import (
    BEGIN,
    Hand,
)


def long():
    """Its episodes end by nothing but failures."""
    return CountingEnv(1_000_000)


class LargeEnv(gymnasium.Env):
    """Gives large observations."""

    observation_space = gymnasium.spaces.Box(0, 255, (300_000,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    size = 3

    def reset(self, *, seed=None, options=None):
        return np.full(300_000, 7, np.uint8), {}

    def step(self, action):
        return np.full(300_000, 7, np.uint8), 1.0, False, False, {}


class SlowEnv(CountingEnv):
    """Its steps wait where the test says so."""

    def __init__(self, door):
        super().__init__(1_000_000)
        self.door = door

    def step(self, action):
        self.door.step()
        return super().step(action)

    def close(self):
        self.door.closed += 1
        super().close()


class Door:
    """Lets steps through, or one after another into a wait."""

    def __init__(self):
        self.shut = threading.Event()
        self.open = threading.Event()
        self.waiting = self.closed = 0
        self.lock = threading.Lock()

    def step(self):
        if self.shut.is_set():
            with self.lock:
                self.waiting += 1
            assert self.open.wait(30.0)


@contextlib.contextmanager
def playing(server):
    """Another client, that is served afterwards as before: a function that has it step once."""

    def step():
        assert other.step(number).state in (pb.RUNNING, pb.TERMINATED)

    with Hand(server) as other:
        number = other.play()
        other.step(number, BEGIN)
        yield step
        step()


# Compression


def without_threads(name):
    """What stands for `threading.Thread.start` where the system has no thread left for those of a name."""
    start = threading.Thread.start

    def no_thread(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    return no_thread
