"""`python -m benchmarks.trouble`: a training on a fleet whose servers fail in every way, for ten minutes.

Six server processes carry 48 slots of a directory. Every few seconds one of them is killed and started again, stopped
for a while, drained, cut off, started anew with room for two worlds, or its environment raises in every reset. The loop
goes on without lost slots (`on_lost="continue"`, `step_timeout=`). Every valid row is held against the one before it:
the environments count their steps. At the end the slots run again, and the lines of the log, the memory and the threads
are told.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.alone import add_busy, measuring
from bridge import Limits, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, Proxy

FAULTS = ("kill", "stop", "drain", "cut", "full", "raise")
LENGTH = 50
"""Steps of an episode."""
LASTS = 3.0
"""Seconds that a fault lasts."""


class Raising(CountingEnv):
    """Counts its steps; `reset` raises while a file is there."""

    def __init__(self, flag: Path) -> None:
        super().__init__(LENGTH)
        self._flag = flag

    def reset(self, **keywords: Any) -> Any:
        """Begin an episode, or raise."""
        if self._flag.exists():
            raise RuntimeError("the simulator has no licence")
        return super().reset(**keywords)


def serve(port: int, flag: Path, worlds: int) -> None:
    """Serve until a signal; what a process of the fleet does."""
    limits = Limits(max_worlds=worlds, drain_timeout=LASTS)
    with serve_gym(lambda: Raising(flag), port=port, limits=limits) as server:
        print(server.port, flush=True)
        server.wait()


class Machine:
    """A server process, and the link that leads to it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._flag = folder / f"raises-{number}"
        self.port = 0
        self.process = self._start(256)
        self.proxy = Proxy(self.port)

    def _start(self, worlds: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.trouble", "--serve", str(self.port), str(self._flag), str(worlds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        out = process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(60.0):
                raise TimeoutError("a server did not start within 60 s")
        self.port = int(out.readline())
        return process

    def end(self, number: int = signal.SIGKILL) -> None:
        """End the process by a signal, and wait for it."""
        self.process.send_signal(number)
        self.process.wait(60.0)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def suffer(self, fault: str, over: threading.Event) -> None:
        """Let a fault happen, and mend it."""
        if fault in ("kill", "drain", "full"):
            self.end(signal.SIGTERM if fault == "drain" else signal.SIGKILL)
            over.wait(LASTS)
            self.process = self._start(2 if fault == "full" else 256)
        elif fault == "stop":
            self.process.send_signal(signal.SIGSTOP)
            over.wait(LASTS)
            self.process.send_signal(signal.SIGCONT)
        elif fault == "cut":
            self.proxy.stall()
            over.wait(LASTS)
            self.proxy.resume()
        else:
            self._flag.touch()
            over.wait(LASTS)
            self._flag.unlink()

    def close(self) -> None:
        """End it."""
        self.end()
        self.proxy.close()


@dataclasses.dataclass
class Report:
    """The result of a run."""

    seconds: float
    steps: int = 0
    valid: int = 0
    """Rows that an action made."""
    truncated: int = 0
    wrong: int = 0
    """Rows that do not follow from the one before."""
    longest_step: float = 0.0
    lines: int = 0
    """Of the log."""
    back: bool = False
    """True if every slot ran again within a minute after the last fault."""
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: tuple[float, float] = (0.0, 0.0)
    """MB after a tenth of the time, and at the end."""
    threads: tuple[int, int] = (0, 0)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of `envs.report()`, but for those of each server."""


class Lines(logging.Handler):
    """Counts and keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        self.lines.append(record.getMessage())


def trouble(machines: list[Machine], over: threading.Event, faults: Counter[str], seed: int) -> None:
    """Let faults happen to machines until `over`; one machine at a time, so that the others have room."""
    chance = random.Random(seed)
    while not over.wait(chance.uniform(1.0, 4.0)):
        fault = chance.choice(FAULTS)
        faults[fault] += 1
        chance.choice(machines).suffer(fault, over)


def run(seconds: float, servers: int, slots: int, seed: int) -> tuple[Report, list[str]]:
    """Train for a while; return what came of it, and the lines of the log."""
    report, handler, process = Report(seconds), Lines(), psutil.Process()
    logging.getLogger("bridge").addHandler(handler)
    over, faults = threading.Event(), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machines = [Machine(folder, number) for number in range(servers)]
        listed = folder / "urls.txt"
        listed.write_text("".join(f"grpc://127.0.0.1:{machine.proxy.port}\n" for machine in machines))
        envs: Any = make_vec_remote(
            listed.as_uri(), num_envs=slots, blocking=True, on_lost="continue", step_timeout=2.0, connect_timeout=2.0
        )
        last = envs.reset(seed=seed)[0][:, 1].copy()
        ended = np.zeros(slots, np.bool_)
        monkey = threading.Thread(target=trouble, args=(machines, over, faults, seed))
        monkey.start()
        began = time.monotonic()
        try:
            while not report.back and time.monotonic() < began + seconds + 60.0:
                if time.monotonic() > began + seconds:
                    over.set()
                before = time.monotonic()
                observations, _, terminations, truncations, infos = envs.step(np.zeros(slots, np.int64))
                report.longest_step = max(report.longest_step, time.monotonic() - before)
                valid, counted = infos["valid"], observations[:, 1]
                report.steps += 1
                report.valid += int(valid.sum())
                report.truncated += int(truncations.sum())
                expected = np.where(ended, 0, last + 1)
                report.wrong += int((valid & ~truncations & (counted != expected)).sum())
                report.wrong += int((valid & (terminations != (counted == LENGTH))).sum())
                last, ended = counted.copy(), terminations | truncations
                report.back = over.is_set() and not monkey.is_alive() and bool(valid.all())
                now = process.memory_info().rss / 1e6, threading.active_count()
                if time.monotonic() < began + seconds / 10:
                    report.memory, report.threads = (now[0], 0.0), (now[1], 0)
                report.memory, report.threads = (report.memory[0], now[0]), (report.threads[0], now[1])
        finally:
            over.set()
            monkey.join()
            report.figures = {key: value for key, value in envs.report().items() if not key.startswith("servers/")}
            report.lines, report.faults = len(handler.lines), dict(faults)
            logging.getLogger("bridge").removeHandler(handler)
            envs.close()
            for machine in machines:
                machine.close()
    return report, handler.lines


def main() -> int:
    """Run, print the figures as JSON, and return 1 where a row was wrong or a slot stayed away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--servers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="print the lines of the log, too")
    parser.add_argument("--serve", nargs=3, metavar=("PORT", "FLAG", "WORLDS"), help=argparse.SUPPRESS)
    add_busy(parser)
    given = parser.parse_args()
    if given.serve:
        port, flag, worlds = given.serve
        serve(int(port), Path(flag), int(worlds))
        return 0
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    with measuring(parser, given.busy):
        report, lines = run(given.seconds, given.servers, given.slots, given.seed)
    if given.log:
        print("\n".join(lines))
    print(json.dumps(dataclasses.asdict(report), indent=2))
    return int(report.wrong > 0 or not report.back)


if __name__ == "__main__":
    sys.exit(main())
