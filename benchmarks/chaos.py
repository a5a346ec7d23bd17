"""`python -m benchmarks.chaos`: servers and links fail while a vector environment steps; does it all add up?

Every few seconds something happens: a server process is killed and started again on its port, or stopped and continued;
the link to it is cut, slow, half closed or half open. The environments count their steps, so the client sees whether
one is missing or came twice, and keep a tally that outlives their process. At the end every slot must be back, the
counters must add up, and no thread, process, port, file descriptor, connection or world may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.alone import add_busy, measuring
from benchmarks.chaos_faults import FAULTS, Host, Monkey
from benchmarks.ppo import Ppo
from bridge import RemoteVectorEnv, make_vec_remote
from bridge.core.client.slots.slot import SlotState

ENVIRONMENTS = {"random": "counting", "ppo": "CartPole-v1"}
"""The environment that is served for each policy."""


@dataclasses.dataclass
class Report:
    """The result of a run."""

    seconds: float
    policy: str
    servers: int
    spares: int
    slots: int
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often each happened."""
    slots_back: int = 0
    """Slots that ran at the end."""
    slot_steps: int = 0
    """Slots times calls of `step`."""
    observed: int = 0
    """Of those, with an observation."""
    observed_time: float = 0.0
    """The share of slots with an observation, over time rather than over steps."""
    steps_served: int = 0
    """Steps that the environments made, those of killed servers included."""
    steps_asked: int = 0
    steps_received: int = 0
    steps_lost: int = 0
    episodes_served: int = 0
    """Episodes that the environments began."""
    episodes_begun: int = 0
    """Episodes whose first observation was received: all of the following."""
    episodes_ended: int = 0
    """Episodes that ended by themselves, as `step` told."""
    episodes_lost: int = 0
    """Episodes that were cut off, as the counters of the remotes say."""
    episodes_truncated: int = 0
    """Episodes that were cut off, as `step` told."""
    episodes_running: int = 0
    """Episodes that were going on at the end."""
    losses: int = 0
    """How often a connection was lost."""
    seconds_away: float = 0.0
    """Of all remotes together, spares too."""
    updates: int = 0
    """How often PPO learned."""
    returns: tuple[float, float] = (0.0, 0.0)
    """PPO's mean return over the first and the last tenth of the episodes."""
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    """The numbers of leftovers at the end, by kind."""
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of slot-steps with an observation."""
        return self.observed / max(1, self.slot_steps)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**dataclasses.asdict(self), "share": self.share}

    def lines(self) -> list[str]:
        """Return it for people."""
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        left = ", ".join(f"{name} {count}" for name, count in self.left.items())
        lines = [
            f"{self.seconds:g} s, policy {self.policy}: {self.slots} slots on {self.servers} servers, "
            f"{self.spares} spares",
            f"  faults    {sum(self.faults.values())}: {faults}; {self.losses} connections lost",
            f"  slots     {self.slots_back} of {self.slots} back; {self.seconds_away:.1f} s away in sum",
            f"  steps     {self.steps_asked} asked = {self.steps_received} received + {self.steps_lost} lost; "
            f"{self.steps_served} served = {self.steps_received} received + "
            f"{self.steps_served - self.steps_received} of the lost",
            f"  episodes  {self.episodes_begun} begun = {self.episodes_ended} ended + {self.episodes_lost} lost + "
            f"{self.episodes_running} running; {self.episodes_served} served",
            f"  observed  {self.share:.2%} of slot-steps, {self.observed_time:.2%} of the time",
            f"  left      {left}",
            f"  problems  {'; '.join(self.problems) or 'none'}",
        ]
        if self.policy == "ppo":
            before, after = self.returns
            lines.insert(
                -2, f"  ppo       {self.updates} updates; mean return {before:.1f} at first, {after:.1f} at last"
            )
        return lines


class Player:
    """Steps all slots, by chance or by PPO, and holds each observation against the one before it."""

    def __init__(self, envs: RemoteVectorEnv, report: Report, seed: int) -> None:
        self._envs, self._report = envs, report
        self._rng = np.random.default_rng(seed)
        self._last: list[NDArray[np.float64] | None] = [None] * envs.num_envs
        size = envs.single_observation_space.shape[0] - 1  # without the count
        self.ppo = Ppo(envs.num_envs, size, 2, seed) if report.policy == "ppo" else None
        envs.reset(seed=seed)

    def step(self) -> int:
        """Step once; return how many slots have an observation."""
        before = list(self._last)
        actions = self._rng.integers(0, 2, self._envs.num_envs) if self.ppo is None else self.ppo.act(before)
        rows, rewards, terminated, truncated, _ = self._envs.step(actions)
        for slot, row in enumerate(rows):
            self._check(slot, row, bool(terminated[slot]), bool(truncated[slot]))
        if self.ppo is not None:
            self.ppo.see(before, rows, rewards, terminated)
        return sum(row is not None for row in rows)

    def _check(self, slot: int, row: NDArray[np.float64] | None, terminated: bool, truncated: bool) -> None:
        report, was = self._report, self._last[slot]
        self._last[slot] = row
        if row is not None:
            expected = 0 if was is None else int(was[-1]) + 1
            if int(row[-1]) != expected:
                report.problems.append(f"slot {slot} saw step {int(row[-1])} where {expected} was due")
            report.episodes_begun += was is None
        if truncated and was is None and row is None:
            report.problems.append(f"slot {slot} was truncated without an episode")
        report.episodes_ended += terminated
        report.episodes_truncated += truncated
        if terminated or truncated:
            self._last[slot] = None
        elif row is None and was is not None:
            report.problems.append(f"slot {slot} lost its observation within an episode, unreported")

    def await_all(self, deadline: float = 120.0) -> None:
        """Step until every slot runs an episode."""
        end = time.monotonic() + deadline
        while not self._all_run():
            if time.monotonic() > end:
                away = [item for item in self._envs.remotes() if item.away]
                self._report.problems.append(f"slots that did not come back: {away}")
                return
            self.step()
            time.sleep(0.005)

    def _all_run(self) -> bool:
        running = self._envs.slot_states == SlotState.RUNNING
        return bool(running.all()) and all(row is not None for row in self._last)

    def finish(self) -> None:
        """Note how it is at the end."""
        report = self._report
        report.slots_back = int((self._envs.slot_states == SlotState.RUNNING).sum())
        report.episodes_running = sum(row is not None for row in self._last)
        if self.ppo is not None:
            report.updates, some = self.ppo.updates, max(1, len(self.ppo.returns) // 10)
            if self.ppo.returns:
                report.returns = float(np.mean(self.ppo.returns[:some])), float(np.mean(self.ppo.returns[-some:]))


def run(
    seconds: float,
    *,
    policy: str = "random",
    servers: int = 4,
    slots: int = 16,
    spares: int = 0,
    period: float = 5.0,
    stays: float = 3.0,
    faults: Sequence[str] = FAULTS,
    seed: int = 0,
) -> Report:
    """Step through the chaos.

    Args:
        seconds: How long it lasts; the time until all slots are back comes on top.
        policy: Who steps: `random`, or `ppo`, which learns CartPole meanwhile.
        servers: Server processes.
        slots: Slots, a multiple of `servers`.
        spares: Spares, on a server process more.
        period: Seconds from strike to strike; one begins when the one before it is mended.
        stays: Seconds for which a server stands still, or a link is slow or half open.
        faults: What happens, of `FAULTS`.
        seed: Of the strikes and of the policy.
    """
    report = Report(seconds, policy, servers, spares, slots)
    before = _held()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridge-chaos-")))
        hosts = [Host(folder, number, ENVIRONMENTS[policy]) for number in range(servers + (1 if spares else 0))]
        for host in hosts:
            stack.callback(host.close)
            host.start()
        for host in hosts:
            host.wait()
        urls = [host.url for host in hosts[:servers]] * (slots // servers)
        envs = make_vec_remote(urls, spares=[host.url for host in hosts[servers:]] * spares, timeout=1.5)
        stack.callback(envs.close)
        player = Player(envs, report, seed)
        player.await_all()
        monkey = Monkey(hosts, period, stays, seed, report.faults, faults)
        _play(envs, report, player, monkey)
        _count(envs, report)
        envs.close()
        _check_servers(hosts, report)
        for host in hosts:
            host.close()
            report.steps_served += host.served["steps"]
            report.episodes_served += host.served["episodes_begun"]
            if host.served["episodes_ended"] > host.served["episodes_begun"]:
                report.problems.append(f"{host.url} ended more episodes than it began: {host.served}")
        report.left["ports"] = sum(host.listens for host in hosts)
    _check_sums(report)
    after = _held()
    report.left |= {name: max(0, after[name] - before[name]) for name in after}
    report.left["descriptors"] = max(0, report.left["descriptors"] - 8)  # gRPC keeps its own pollers
    report.problems += [f"left: {count} {name}" for name, count in report.left.items() if count]
    return report


def _held() -> dict[str, int]:
    """The resources of this process that a run may leave behind."""
    process = psutil.Process()
    return {
        "threads": sum(thread.name.startswith(("bridge", "chaos")) for thread in threading.enumerate()),
        "processes": len(process.children(recursive=True)),
        "descriptors": process.num_fds() if hasattr(process, "num_fds") else 0,
    }


def _play(envs: RemoteVectorEnv, report: Report, player: Player, monkey: Monkey) -> None:
    end = time.monotonic() + report.seconds
    weighed = began = time.monotonic()
    total = 0.0
    while time.monotonic() < end and monkey.failure is None:
        observed = player.step()
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
    player.await_all()
    player.finish()


def _count(envs: RemoteVectorEnv, report: Report) -> None:
    for remote in envs.remotes():
        report.steps_asked += remote.steps_asked
        report.steps_received += remote.steps_received
        report.steps_lost += remote.steps_lost
        report.episodes_lost += remote.episodes_lost
        report.losses += remote.losses
        report.seconds_away += remote.seconds_away


def _check_sums(report: Report) -> None:
    steps = report.steps_asked, report.steps_received, report.steps_lost
    for text, holds in (
        (f"(asked, received, lost) are {steps} steps", steps[0] == steps[1] + steps[2]),
        (f"{report.steps_served} steps were served of {steps}", steps[1] <= report.steps_served <= steps[0]),
        (
            f"{report.episodes_begun} episodes begun, {report.episodes_ended} ended, {report.episodes_lost} lost, "
            f"{report.episodes_running} running",
            report.episodes_begun == report.episodes_ended + report.episodes_lost + report.episodes_running,
        ),
        (
            f"{report.episodes_truncated} truncations told, {report.episodes_lost} episodes counted as lost",
            report.episodes_truncated == report.episodes_lost,
        ),
        (
            f"{report.episodes_begun} episodes begun, but {report.episodes_served} served",
            report.episodes_begun <= report.episodes_served,
        ),
        (f"{report.slots_back} of {report.slots} slots are back", report.slots_back == report.slots),
    ):
        if not holds:
            report.problems.append(f"does not add up: {text}")


def _check_servers(hosts: Sequence[Host], report: Report) -> None:
    """Wait until the servers have nothing left; a client that went while one stood still is found by keepalive."""
    end = time.monotonic() + 60.0
    for name in ("connections", "worlds"):
        while (left := sum(host.metric(f"bridge_{name}") for host in hosts)) and time.monotonic() < end:
            time.sleep(0.1)
        report.left[name] = left


def main(argv: Sequence[str] | None = None) -> int:
    """Run with and without spares, print and write the figures; the exit code is 1 where something did not add up."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description="Servers and links fail; it goes on, and everything adds up."
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of each run (default: 20)")
    parser.add_argument("--policy", choices=sorted(ENVIRONMENTS), default="random", help="who steps (default: random)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="what happens (default: all)")
    parser.add_argument("--spares", type=int, default=2, help="in the second run (default: 2; 0: no second run)")
    parser.add_argument("--period", type=float, default=5.0, help="seconds from strike to strike (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    add_busy(parser)
    given = parser.parse_args(argv)
    reports = []
    with measuring(parser, given.busy):
        for spares in dict.fromkeys((0, given.spares)):
            seconds = given.minutes * 60.0
            report = run(
                seconds,
                policy=given.policy,
                spares=spares,
                period=given.period,
                faults=given.faults,
                seed=given.seed,
            )
            reports.append(report)
            print("\n".join(report.lines()), flush=True)
    os.makedirs(given.results, exist_ok=True)
    with open(given.results / "chaos.json", "w") as file:
        json.dump([report.as_dict() for report in reports], file, indent=1)
    return int(any(report.problems for report in reports))


if __name__ == "__main__":
    sys.exit(main())
