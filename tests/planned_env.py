"""An environment that says with each observation how long its episode is to be, served by processes that drain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tests.support import server_process

LENGTHS = (1, 3, 20, 150)
"""Steps of its episodes, as its generator draws them."""


class Planned(gymnasium.Env[Any, Any]):
    """Observation `[length of the episode, steps made]`; it terminates after that many steps."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths
        self.length = self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length, self.steps = int(self.np_random.choice(self.lengths)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observe(), 1.0, self.steps >= self.length, False, {}

    def _observe(self) -> Any:
        return np.array([self.length, self.steps], np.float64)


SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import bridge, tests.planned_env
server = bridge.serve_gym(tests.planned_env.Planned, num_envs=int(sys.argv[2]), host=sys.argv[3], port=int(sys.argv[4]),
                          limits=bridge.Limits(drain_timeout=60.0))
print(server.url, flush=True)
server.wait()
"""


@contextmanager
def planned_process(lanes: int = 1, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[Any, str]]:
    """Serve it in a process; SIGTERM drains it for at most a minute. Yields the process and its URL."""
    root = str(Path(__file__).resolve().parent.parent)
    with server_process(SERVE, root, str(lanes), host, str(port)) as found:
        yield found


class Episodes:
    """Steps a `BlockingReset` in the mode NEXT_STEP, and holds each slot's observations against what was planned.

    Args:
        envs: The environment, which is reset.
    """

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.whole = np.zeros(envs.num_envs, np.int64)
        """Episodes of each slot that ended as planned."""
        self.moved = np.zeros(envs.num_envs, np.int64)
        """Episodes that a move truncated."""
        self.lost = np.zeros(envs.num_envs, np.int64)
        """Episodes that a loss truncated."""
        self.last = envs.reset(seed=0)[0]
        self._ended = np.zeros(envs.num_envs, bool)

    def step(self) -> None:
        count = self.envs.num_envs
        after, rewards, terminations, truncations, infos = self.envs.step(np.zeros(count, np.int64))
        moved = infos.get("moved", np.zeros(count, bool))
        lost = infos.get("_error", np.zeros(count, bool))
        assert (infos.get("_moved", moved) == moved).all()
        assert not (moved & (terminations | lost)).any(), "it was moved and ended by itself, or was lost"
        assert (truncations == (moved | (lost & truncations))).all(), "it was cut, and nobody says why"
        begun = self._ended & ~lost  # an observation of a new episode, which no action made
        assert (after[begun, 1] == 0).all()
        assert (rewards[begun] == 0).all()
        going = ~self._ended & ~lost
        assert (after[going, 0] == self.last[going, 0]).all(), "another episode"
        assert (after[going, 1] == self.last[going, 1] + 1).all(), "a step was left out, or made twice"
        assert (terminations == (going & (after[:, 0] == after[:, 1]))).all(), "it ended before its time, or after it"
        self.whole += terminations
        self.moved += moved
        self.lost += truncations & lost
        self.last, self._ended = after, terminations | truncations

    def check_counts(self) -> None:
        """Hold the steps and truncations against what the environment reports."""
        reports = self.envs.env.remotes()
        names = ("steps_asked", "steps_received", "steps_lost", "episodes_moved", "episodes_lost")
        asked, received, lost, moved, cut = (sum(getattr(report, name) for report in reports) for name in names)
        assert asked == received + lost
        assert moved == self.moved.sum()
        assert cut == self.lost.sum()
