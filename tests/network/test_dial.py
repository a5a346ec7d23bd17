"""Simulators behind routers: nothing comes in there, and they dial the trainer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

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
