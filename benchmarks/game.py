"""`python -m benchmarks.game`: what `exchange` costs a program's loop.

A loop of 60 frames a second fills a picture of 640×480 pixels, and passes it. Its frame's time without the wait for
the next one, median and 99th percentile, and its frames a second, in turns: without this package, served to nobody, and
with a viewer of the page's pictures, a recording and an agent, each in a process of its own. The server is in threads
of the program, or with `process=True` in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.alone import add_busy, measuring
from benchmarks.web import FOREVER, Viewers, process_of
from bridge import make_remote, serve_game

__all__ = ["main"]

FPS = 60
SEEN, ACTIONS = spaces.Box(-1e6, 1e6, (8,), np.float32), spaces.Discrete(4)


def play(url: str, pipe: Connection) -> None:
    """Act 60 times a second, until the process is killed."""
    env = make_remote(url)
    env.reset()
    pipe.send(None)
    while True:
        env.step(int(env.action_space.sample()))
        time.sleep(1 / FPS)


@dataclasses.dataclass
class Found:
    """What was measured of a loop."""

    times: list[float] = dataclasses.field(default_factory=list)
    """The seconds of each frame without its wait."""
    seconds: float = 0.0
    """Those of all frames with their waits."""

    @property
    def rate(self) -> float:
        """Frames a second."""
        return len(self.times) / self.seconds

    def add(self, other: Found) -> None:
        """Add what was measured in another turn."""
        self.times += other.times
        self.seconds += other.seconds


def frames(seconds: float, exchange: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], Any]) -> Found:
    """Run a loop."""
    picture, seen, times = np.zeros((480, 640, 3), np.uint8), np.zeros(8, np.float32), []
    start = due = time.perf_counter()
    for frame in range(int(seconds * FPS)):
        began = time.perf_counter()
        picture[:] = frame % 256  # what the program does itself
        picture[100:200, 100:200] = 255 - frame % 256
        exchange(seen, picture)
        times.append(time.perf_counter() - began)
        due += 1 / FPS
        time.sleep(max(0.0, due - time.perf_counter()))
    return Found(times, time.perf_counter() - start)


def served(seconds: float, busy: bool, process: bool) -> Found:
    """Measure a loop that is served; `busy`: with a viewer, a recording and an agent."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        game = stack.enter_context(
            serve_game(SEEN, ACTIONS, web=busy, record=folder if busy else None, process=process)
        )

        def exchange(seen: np.ndarray[Any, Any], picture: np.ndarray[Any, Any]) -> None:
            game.exchange(seen, frame=picture)
            assert game.begins in (True, False), "read, so that rounds begin"

        def meanwhile() -> None:
            frames(0.1, exchange)

        if busy:
            meanwhile()
            _, pipe = stack.enter_context(process_of(play, game.url))
            while not pipe.poll():
                meanwhile()
            Viewers(stack, game.server.port, 1, FOREVER, meanwhile)
        return frames(seconds, exchange)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.game", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    add_busy(parser)
    options = parser.parse_args(argv)
    alone, *_ = found = {
        "without us": Found(),
        "threads, nobody": Found(),
        "threads, page, recording, agent": Found(),
        "process, nobody": Found(),
        "process, page, recording, agent": Found(),
    }
    with measuring(parser, options.busy):
        for _ in range(options.rounds):
            for name, of in found.items():
                if name == alone:
                    of.add(frames(options.seconds, lambda seen, picture: None))
                else:
                    of.add(served(options.seconds, "agent" in name, "process" in name))
    least = float(np.percentile(found[alone].times, 99)) * 1e3
    for name, of in found.items():
        p50, p99 = np.percentile(of.times, (50, 99)) * 1e3
        rate = f"{of.rate:.2f} frames a second, {of.rate / found[alone].rate - 1:+.2%}"
        print(f"{name:32} p50 {p50:6.3f} ms   p99 {p99:6.3f} ms, {p99 - least:+.3f} ms   {rate}")
    print("goals: p99 at most +1 ms; the rate within 1 %")
    print(f"load: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
