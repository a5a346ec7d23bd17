"""The network of a test: `network`. Where this computer cannot make one, the tests are skipped with a word."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.machines import Nursery
from tests.network.network import Network

HERE = Path(__file__).parent


def missing() -> str:
    """Say what this computer lacks for making networks; '' where it lacks nothing."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("sysctl", "procps"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt-get install {package}"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is not there: the kernel, or the container, has no TUN devices"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "nft", "add", "table", "inet", "t"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = missing() if ours else ""
    for item in ours:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that machines are forked from."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def network(nursery: Nursery, tmp_path: Path) -> Iterator[Network]:
    """A network of machines, which ends with the test.

    Five lines are a test of two of them, 80 ms away from each other. `serve` and `steps` stand in
    `tests/network/programs.py`; any function of a module is a program, and what it yields comes to the test:

        def test_a_far_environment_steps(network):
            game, trainer = network.machine("game-pc"), network.machine("trainer", Conditions(delay=0.04))
            server = game.start(serve, "CartPole-v1")
            server.next()  # it serves
            assert trainer.run(steps, "grpc://game-pc:50051", 10) == 10

    `machine.command("bridge", "info", …)` is a command instead. `network.cut(game)` has its packets vanish,
    `game.firewall("tcp dport 50051 drop")` what comes in, `network.line(trainer, Line(rate=10_000))` slows its line
    down, `server.signal(SIGSTOP)` has a program hang, and `game.close()` switches a machine off.
    """
    made = Network(nursery, tmp_path)
    try:
        yield made
    finally:
        for machine in made.machines.values():
            for program in machine.programs:  # pytest shows it if the test fails
                print(f"--- {program.name} on {machine.name} ---\n{program.output}")
        made.close()
