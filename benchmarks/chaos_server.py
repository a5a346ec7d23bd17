"""One server of the chaos: environments that count their steps, in what they show and in a file that outlives them.

`python -m benchmarks.chaos_server PORT TALLY ENVIRONMENT` prints the port of its metrics once it listens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import bridge
from bridge.testing import CountingEnv

EPISODE = 200
"""Steps of an episode, at most."""
TALLY = ("steps", "episodes_begun", "episodes_ended")
"""The counters of the file, an int64 each."""


def open_tally(path: Path | str) -> NDArray[np.int64]:
    """Map the file into memory: what a process wrote there stays when it is killed."""
    if not Path(path).exists():
        Path(path).write_bytes(bytes(8 * len(TALLY)))
    return np.memmap(path, np.int64, "r+", shape=(len(TALLY),))


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Appends the steps of the episode to the observation, ends it after `EPISODE` steps, and keeps the tally."""

    def __init__(self, env: gymnasium.Env[Any, Any], tally: NDArray[np.int64]) -> None:
        super().__init__(env)
        low, high = env.observation_space.low, env.observation_space.high  # type: ignore[attr-defined]
        self.observation_space = gymnasium.spaces.Box(np.append(low, 0), np.append(high, EPISODE), dtype=np.float64)
        self._tally, self._steps = tally, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self._steps = 0
        self._tally[1] += 1
        return np.append(observation, 0.0), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = self.env.step(action)
        self._steps += 1
        self._tally[0] += 1
        terminated = terminated or self._steps == EPISODE
        self._tally[2] += terminated
        return np.append(observation, float(self._steps)), float(reward), terminated, False, info


def main(port: str, tally_path: str, name: str) -> None:
    """Serve until a signal."""
    tally = open_tally(tally_path)

    def make() -> gymnasium.Env[Any, Any]:
        return Counted(CountingEnv(EPISODE + 1) if name == "counting" else gymnasium.make(name).unwrapped, tally)

    server = bridge.serve_gym(make, port=int(port), metrics_port=0)
    print(server.metrics_port, flush=True)
    server.wait(grace=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
