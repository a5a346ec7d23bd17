"""How steady the clock of a real-time world is: `python -m benchmarks.jitter` prints percentiles of late frames.

An environment notes when each of its steps begins. It is served at 50 frames a second in a process of its own; a client
joins it and sends an action ten times a second. What is printed is how much later than its time each frame began, alone
and beside a busy loop on each core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

import gymnasium
import numpy as np

from benchmarks.alone import add_busy, measuring
from bridge import make_remote
from bridge.testing import ServerProcess

__all__ = ["Notes", "main", "measure"]

FPS = 50


class Notes(gymnasium.Env[Any, Any]):
    """Notes when its steps begin; `begun` returns these times."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def __init__(self) -> None:
        self.times: list[float] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.times.clear()
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.times.append(time.perf_counter())
        return np.zeros(3, np.float32), 0.0, False, False, {}

    def begun(self) -> np.ndarray[Any, Any]:
        """When each step of the episode began, in seconds of this process's clock."""
        return np.array(self.times)


def measure(seconds: float, *options: str) -> np.ndarray[Any, Any]:
    """Return by how many seconds each frame was late, against the earliest that kept the same pace."""
    with ServerProcess("benchmarks.jitter:Notes", "--fps", str(FPS), *options) as server:
        env = make_remote(server.url + "?world=")
        env.reset()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            env.step(np.zeros(2, np.float32))
            time.sleep(0.1)
        begun = env.get_wrapper_attr("begun")()
        env.close()
    late = begun - np.arange(len(begun)) / FPS
    late -= late.min()
    return late


def busy() -> None:
    """Keep a core busy."""
    while True:
        pass


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jitter", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row (default: 60)")
    add_busy(parser)
    arguments = parser.parse_args()
    seconds = arguments.seconds
    with measuring(parser, arguments.busy):
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {FPS} frames/s, {seconds:g} s a row\n")
        print(
            "| | frames | median, ms | 99 % within, ms | 99.9 % within, ms | the latest, ms |",
            "|---|---|---|---|---|---|",
            sep="\n",
        )
        for name, loops in (("nothing else running", 0), ("a busy loop on each core", os.cpu_count() or 1)):
            loads = [multiprocessing.Process(target=busy, daemon=True) for _ in range(loops)]
            for load in loads:
                load.start()
            try:
                late = 1000 * measure(seconds, "--isolation", "process")
            finally:
                for load in loads:
                    load.kill()
                    load.join()
            cells = [np.median(late), *np.percentile(late, (99, 99.9)), late.max()]
            print(f"| {name} | {len(late)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
