"""Environments that crash, exit, hoard memory or never return, for tests of isolation; and looks at processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import psutil

from bridge.testing import CountingEnv
from tests.parallel_envs import Relay


def perform(trick: str) -> None:
    """Do what a trick's name says; "": nothing."""
    if trick == "exit":
        os._exit(7)
    if trick == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if trick == "loop":
        while True:
            pass
    if trick == "leak":
        hoard = []
        while True:
            hoard.append(np.empty(10_000_000))
    if trick == "raise":
        raise RuntimeError("not today")


class TrickEnv(CountingEnv):
    """Does what `trick` says in its third step; says in which process it is."""

    def __init__(self, trick: str = "", where: str = "step") -> None:
        super().__init__(10**9)
        self.trick, self.where = trick, where
        if where == "init":
            perform(trick)

    def pid(self) -> int:
        return os.getpid()

    def reset(self, **keywords: Any) -> Any:
        self.count_of_steps = 0
        if self.where == "reset":
            perform(self.trick)
        return super().reset(**keywords)

    def step(self, action: Any) -> Any:
        self.count_of_steps += 1
        if self.count_of_steps == 3 and self.where == "step":
            perform(self.trick)
        return super().step(action)

    def close(self) -> None:
        if self.where == "close":
            perform(self.trick)


class TrickRelay(Relay):
    """Several agents; does what `trick` says in its third step."""

    def __init__(self, trick: str = "") -> None:
        super().__init__(horizon=1000)
        self.trick = trick

    def pid(self) -> int:
        return os.getpid()

    def step(self, actions: Any) -> Any:
        if self.time == 2:
            perform(self.trick)
        return super().step(actions)


class PatientEnv(TrickEnv):
    """Its construction, or a reset with the option `fifo`, returns once somebody has written to that named pipe."""

    def __init__(self, fifo: str = "") -> None:
        super().__init__()
        if fifo:
            with open(fifo) as pipe:
                pipe.read()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options and "fifo" in options:
            with open(options["fifo"]) as pipe:
                pipe.read()
        return super().reset(seed=seed, options=options)


def pid_of(world: Any) -> Any:
    """The process of a world's environment."""
    return world.env.process.pid


def gone(pid: int) -> bool:
    """True if a process is not there any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
