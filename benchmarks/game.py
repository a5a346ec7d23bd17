"""`python -m benchmarks.game`: what `exchange` costs a program's loop.

A loop of 60 frames a second fills a picture of 640×480 pixels, and passes it. Its frame's time without the wait for
the next one, median and 99th percentile, in turns: without this package, served to nobody, and with a viewer of the
page's pictures, a recording and an agent, each in a process of its own.
"""

from __future__ import annotations

import argparse
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


def frames(seconds: float, exchange: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], Any]) -> list[float]:
    """Run a loop; return the seconds of each frame without its wait."""
    picture, seen, times = np.zeros((480, 640, 3), np.uint8), np.zeros(8, np.float32), []
    due = time.perf_counter()
    for frame in range(int(seconds * FPS)):
        began = time.perf_counter()
        picture[:] = frame % 256  # what the program does itself
        picture[100:200, 100:200] = 255 - frame % 256
        exchange(seen, picture)
        times.append(time.perf_counter() - began)
        due += 1 / FPS
        time.sleep(max(0.0, due - time.perf_counter()))
    return times


def served(seconds: float, busy: bool) -> list[float]:
    """Return the times of a loop that is served; `busy`: with a viewer, a recording and an agent."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        game = stack.enter_context(serve_game(SEEN, ACTIONS, web=busy, record=folder if busy else None))

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
    found: dict[str, list[float]] = {"without us": [], "served to nobody": [], "page, recording, agent": []}
    with measuring(parser, options.busy):
        for _ in range(options.rounds):
            found["without us"] += frames(options.seconds, lambda seen, picture: None)
            found["served to nobody"] += served(options.seconds, busy=False)
            found["page, recording, agent"] += served(options.seconds, busy=True)
    alone = float(np.percentile(found["without us"], 99))
    for name, times in found.items():
        p50, p99 = np.percentile(times, (50, 99)) * 1e3
        more = p99 - alone * 1e3
        print(f"{name:24} p50 {p50:6.3f} ms   p99 {p99:6.3f} ms   {more:+.3f} ms (goal: at most +1 ms)")
    print(f"load: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
