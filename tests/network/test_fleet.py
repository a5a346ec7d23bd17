"""A training on servers of several machines, of which some cannot be reached or go dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

import bridge
from bridge.wrappers import BlockingReset
from tests.network.programs import PORT, serve

STEP_TIMEOUT = 1.0


class Listed:
    """A directory of the machines of a test."""

    def endpoints(self) -> list[Any]:
        from bridge import Endpoint

        return [Endpoint(f"grpc://{name}:{PORT}") for name in ("one", "two", "three")]


def train(urls: Any, slots: int, keywords: dict[str, Any]) -> Iterator[Any]:
    """Step a vector environment; each `go_on` gives the slots of each URL and what became of 50 steps."""
    target = Listed() if urls is None else urls
    envs = BlockingReset(
        bridge.make_vec_remote(target, num_envs=slots, **keywords), on_lost="continue", step_timeout=STEP_TIMEOUT
    )
    envs.reset(seed=0)
    while True:
        truncated = np.zeros(slots, np.int64)
        for _ in range(50):
            _, _, _, truncations, infos = envs.step(envs.action_space.sample())
            truncated += truncations
        lost = sum(report.losses for report in envs.remotes())
        yield dict(Counter(envs.env.urls)), truncated.tolist(), infos["valid"].tolist(), lost


def urls(*names: str) -> list[str]:
    return [f"grpc://{name}:{PORT}" for name in names]


def test_a_listed_server_whose_packets_vanish_holds_up_no_start(network: Any) -> None:
    one, two, trainer = network.machine("one"), network.machine("two"), network.machine("trainer")
    for machine in (one, two):
        machine.start(serve, "CartPole-v1").next()
    two.firewall(f"tcp dport {PORT} drop")
    program = trainer.start(train, urls("one", "two"), 2, {"connect_timeout": 1.0})
    where, _, valid, lost = program.next()
    assert where == {urls("one")[0]: 2}
    assert (valid, lost) == ([True, True], 0)


def test_a_fleet_goes_on_where_a_machine_goes_dark_and_takes_it_back(network: Any) -> None:
    names = ("one", "two", "three")
    machines = [network.machine(name) for name in names]
    trainer = network.machine("trainer")
    for machine in machines:
        machine.start(serve, "CartPole-v1").next()
    program = trainer.start(train, None, 6, {"connect_timeout": 1.0, "timeout": 20.0})
    assert program.next()[0] == dict.fromkeys(urls(*names), 2)
    network.cut(machines[1])
    where, lost = {}, 0
    while not lost or urls("two")[0] in where:
        program.go_on()
        where, _, _, lost = program.next()
    assert lost == 2
    network.mend(machines[1])
    while where != dict.fromkeys(urls(*names), 2):
        program.go_on()
        where, _, _, lost = program.next()
    assert lost == 2
