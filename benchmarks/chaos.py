"""`python -m benchmarks.chaos`: servers are killed and stopped while a vector environment steps; does it all add up?

Every few seconds one server process is killed and started again on its port, or stopped and continued. The environments
count their steps, so the client sees whether one is missing or came twice. At the end every slot must be back, the
counters must add up, and no thread, process, file descriptor, connection or world may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from bridge import RemoteVectorEnv, make_vec_remote
from bridge.client.remote import SlotState

EPISODE = 200
"""Steps an episode."""
STOPPED = 3.0
"""Seconds for which a server stands still."""
DOWN = 1.0
"""Seconds until a server that was killed is started again."""

SCRIPT = """
import sys
import bridge, bridge.testing
server = bridge.serve_gym(lambda: bridge.testing.CountingEnv(int(sys.argv[2])), port=int(sys.argv[1]), metrics_port=0)
print(server.metrics_port, flush=True)
server.wait(grace=0.0)
"""


@dataclasses.dataclass
class Report:
    """What a run gave."""

    seconds: float
    servers: int
    spares: int
    slots: int
    kills: int = 0
    stops: int = 0
    slot_steps: int = 0
    """Slots times calls of `step`."""
    observed: int = 0
    """Of those, with an observation."""
    observed_time: float = 0.0
    """The share of slots with an observation, over time rather than over steps."""
    episodes: int = 0
    """Episodes that ended by themselves."""
    truncated: int = 0
    """Episodes that were cut off, as `step` told."""
    asked: int = 0
    received: int = 0
    lost: int = 0
    episodes_lost: int = 0
    seconds_away: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of slot-steps with an observation."""
        return self.observed / max(1, self.slot_steps)


class Host:
    """A server process that is killed and started again on one port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"grpc://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None
        self.metrics_port = 0

    def start(self) -> None:
        """Start it and wait until it listens."""
        arguments = [sys.executable, "-c", SCRIPT, str(self.port), str(EPISODE)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        out = self.process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(60.0):
                raise TimeoutError("a server did not start within 60 s")
        self.metrics_port = int(out.readline())

    def kill(self) -> None:
        """End it without a word."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()

    def metric(self, name: str) -> float:
        """Read a gauge."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise LookupError(name)


class Monkey:
    """Kills or stops a server every `period` seconds, and brings it back."""

    def __init__(self, hosts: Sequence[Host], period: float, seed: int, report: Report) -> None:
        self._hosts, self._period, self._report = hosts, period, report
        self._random = random.Random(seed)
        self._over = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._period):
                self._strike(self._random.choice(self._hosts))
        except BaseException as error:
            self.failure = error

    def _strike(self, host: Host) -> None:
        if self._random.random() < 0.5 or host.process is None:
            self._report.kills += 1
            host.kill()
            self._over.wait(DOWN)
            host.start()
        else:
            self._report.stops += 1
            host.process.send_signal(signal.SIGSTOP)
            self._over.wait(STOPPED)
            host.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Let everything come back, and strike no more."""
        self._over.set()
        self._thread.join(90.0)


def run(
    seconds: float, *, servers: int = 4, slots: int = 16, spares: int = 0, period: float = 5.0, seed: int = 0
) -> Report:
    """Step through the chaos.

    Args:
        seconds: How long it lasts; the time until all slots are back comes on top.
        servers: Server processes.
        slots: Slots, a multiple of `servers`.
        spares: Spares, on a server process more.
        period: Seconds between strikes, which the time for which a server is away comes on top of.
        seed: Of the strikes.
    """
    report = Report(seconds, servers, spares, slots)
    before = psutil.Process().num_fds() if hasattr(psutil.Process, "num_fds") else 0
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("bridge")}
    with contextlib.ExitStack() as stack:
        hosts = [Host() for _ in range(servers + (1 if spares else 0))]
        for host in hosts:
            stack.callback(host.kill)
            host.start()
        urls = [host.url for host in hosts[:servers]] * (slots // servers)
        envs = make_vec_remote(urls, spares=[host.url for host in hosts[servers:]] * spares, timeout=1.5)
        stack.callback(envs.close)
        _play(envs, report, hosts, period, seed)
        _check_counters(envs, report)
        envs.close()
        _check_servers(hosts, report)
        pids = [host.process.pid for host in hosts if host.process is not None]
    left = {thread for thread in threading.enumerate() if thread.name.startswith("bridge")} - threads
    if left:
        report.problems.append(f"threads left: {left}")
    if any(psutil.pid_exists(pid) for pid in pids):
        report.problems.append("processes left")
    after = psutil.Process().num_fds() if hasattr(psutil.Process, "num_fds") else 0
    if after > before + 8:  # gRPC keeps its own pollers
        report.problems.append(f"file descriptors grew from {before} to {after}")
    return report


def _play(envs: RemoteVectorEnv, report: Report, hosts: Sequence[Host], period: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    last: list[np.ndarray | None] = [None] * envs.num_envs
    envs.reset(seed=seed)
    _await_all(envs, last, report, rng, count=False)
    monkey = Monkey(hosts, period, seed, report)
    end = time.monotonic() + report.seconds
    weighed = began = time.monotonic()
    total = 0.0
    while time.monotonic() < end and monkey.failure is None:
        observed = _step(envs, last, report, rng)
        report.slot_steps += envs.num_envs
        report.observed += observed
        now = time.monotonic()
        total += (now - weighed) * observed / envs.num_envs
        weighed = now
        time.sleep(0.005)  # a trainer computes in between
    report.observed_time = total / max(1e-9, weighed - began)
    monkey.stop()
    if monkey.failure is not None:
        report.problems.append(f"a server could not be brought back: {monkey.failure!r}")
    _await_all(envs, last, report, rng, count=True)


def _step(envs: RemoteVectorEnv, last: list[np.ndarray | None], report: Report, rng: np.random.Generator) -> int:
    """Step once, hold each observation against the one before it; return how many slots have one."""
    rows, _, terminated, truncated, _ = envs.step(rng.integers(0, 2, envs.num_envs))
    for slot, row in enumerate(rows):
        was = last[slot]
        if row is not None:
            expected = 0 if was is None else int(was[1]) + 1
            if int(row[1]) != expected:
                report.problems.append(f"slot {slot} saw step {int(row[1])} where {expected} was due")
            last[slot] = row
        if truncated[slot] and was is None and row is None:
            report.problems.append(f"slot {slot} was truncated without an episode")
        report.episodes += int(terminated[slot])
        report.truncated += int(truncated[slot])
        if terminated[slot] or truncated[slot]:
            last[slot] = None
        elif row is None and was is not None:
            report.problems.append(f"slot {slot} lost its observation in an episode without a word")
            last[slot] = None
    return sum(row is not None for row in rows)


def _await_all(
    envs: RemoteVectorEnv,
    last: list[np.ndarray | None],
    report: Report,
    rng: np.random.Generator,
    *,
    count: bool,
    deadline: float = 120.0,
) -> None:
    """Step until every slot runs."""
    end = time.monotonic() + deadline
    while not (envs.slot_states == SlotState.RUNNING).all():
        if time.monotonic() > end:
            report.problems.append(f"slots that did not come back: {[item for item in envs.remotes() if item.away]}")
            return
        _step(envs, last, report, rng)
        time.sleep(0.005)


def _check_counters(envs: RemoteVectorEnv, report: Report) -> None:
    for remote in envs.remotes():
        report.asked += remote.steps_asked
        report.received += remote.steps_received
        report.lost += remote.steps_lost
        report.episodes_lost += remote.episodes_lost
        report.seconds_away += remote.seconds_away
    if report.asked != report.received + report.lost:
        report.problems.append(f"{report.asked} steps asked, {report.received} received, {report.lost} counted as lost")
    if report.truncated != report.episodes_lost:
        report.problems.append(f"{report.truncated} truncations told, {report.episodes_lost} episodes counted as lost")


def _check_servers(hosts: Sequence[Host], report: Report) -> None:
    for host in hosts:
        end = time.monotonic() + 60.0  # a client that went while the server stood still is found by keepalive
        while left := host.metric("bridge_connections") + host.metric("bridge_worlds"):
            if time.monotonic() > end:
                report.problems.append(f"{host.url} has {left:g} connections and worlds left")
                break
            time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with and without spares, print and write the figures; the exit code is 1 where something did not add up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Servers are killed; it goes on.")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each run (default: 20)")
    parser.add_argument("--spares", type=int, default=2, help="in the second run (default: 2; 0: no second run)")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between strikes (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(argv)
    reports = []
    for spares in dict.fromkeys((0, arguments.spares)):
        report = run(arguments.minutes * 60.0, spares=spares, period=arguments.period, seed=arguments.seed)
        reports.append(report)
        print(
            f"{report.seconds:g} s, {report.slots} slots on {report.servers} servers, {spares} spares: "
            f"{report.kills} kills, {report.stops} stops; {report.asked} steps asked = {report.received} received + "
            f"{report.lost} lost; {report.episodes} episodes ended, {report.episodes_lost} cut off; an observation in "
            f"{report.share:.2%} of slot-steps, {report.observed_time:.2%} of the time; problems: {report.problems}"
        )
    os.makedirs(arguments.results, exist_ok=True)
    with open(arguments.results / "chaos.json", "w") as file:
        json.dump([{**dataclasses.asdict(report), "share": report.share} for report in reports], file, indent=1)
    return int(any(report.problems for report in reports))


if __name__ == "__main__":
    sys.exit(main())
