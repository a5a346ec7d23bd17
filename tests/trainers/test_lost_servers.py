"""Training goes on while servers are killed and come back: examples/ppo.py, and Stable-Baselines3 with a spare.

The servers are `gymnasium-bridge serve` in processes of their own, killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from bridge import make_vec_remote
from bridge.testing import ServerProcess
from bridge.wrappers import BlockingReset, SB3VecEnv
from tests.support import until

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Stable-Baselines3's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "ppo.py"
DEADLINE = 240.0
LANES = 4


@pytest.fixture
def ppo() -> Any:
    """The module examples/ppo.py."""
    spec = importlib.util.spec_from_file_location("example_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fleet:
    """Servers of CartPole, which are killed, and started again at the port that they had."""

    def __init__(self, stack: contextlib.ExitStack, count: int, *arguments: str) -> None:
        self._stack, self._arguments = stack, arguments
        self._servers = [self._start(0) for _ in range(count)]
        self.urls = [server.url for server in self._servers]

    def _start(self, port: int) -> ServerProcess:
        return self._stack.enter_context(ServerProcess("CartPole-v1", *self._arguments, port=port))

    def kill(self, number: int) -> None:
        os.kill(self._servers[number].pid, signal.SIGKILL)

    def restart(self, number: int) -> None:
        """Start a server again, and do not wait for it."""
        self._servers[number] = self._start(int(self.urls[number].rpartition(":")[2]))


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: Fleet(stack, *arguments)


class Witness(VectorWrapper[Any, Any, Any, Any, Any]):
    """Tells by CartPole's own physics which transitions an action made, and kills and starts servers meanwhile."""

    def __init__(self, env: BlockingReset, events: dict[int, Callable[[], None]]) -> None:
        super().__init__(env)
        self.events, self.steps, self.end = events, 0, time.monotonic() + DEADLINE
        self.made: set[bytes] = set()
        """The observations before each transition that an action made."""
        self.lost = np.zeros(env.num_envs, np.int64)
        """Transitions of each slot that its server's loss made."""
        self.valid: list[Any] = []

    def reset(self, **kwargs: Any) -> Any:
        self.observations, infos = self.env.reset(**kwargs)
        return self.observations, infos

    def step(self, actions: Any) -> Any:
        assert time.monotonic() < self.end, f"not done after {DEADLINE:g} s and {self.steps} steps"
        self.events.get(self.steps, lambda: None)()
        self.steps += 1
        before = self.observations
        result = self.env.step(actions)
        after, self.observations = result[0], result[0]
        # x += 0.02 v, the same for the angle; fresh observations are elsewhere, and those of lost slots do not move.
        moved = before[:, [0, 2]] + 0.02 * before[:, [1, 3]]
        same = (before == after).all(axis=1)
        made = (np.abs(after[:, [0, 2]] - moved) < 1e-5).all(axis=1) & ~same
        self.made.update(row.tobytes() for row in before[made])
        self.lost += same
        valid = result[4]["valid"]
        assert not (valid & same).any()
        assert not (made & ~valid).any()
        self.valid.append(valid)
        return result


def mean_return(agent: Any, episodes: int = 20) -> float:
    """The return that an agent reaches in local environments."""
    total = 0.0
    torch.manual_seed(0)
    env = gymnasium.make("CartPole-v1")
    for episode in range(episodes):
        observation, over = env.reset(seed=episode)[0], False
        while not over:
            with torch.no_grad():
                action = int(agent(torch.as_tensor(observation))[0].sample())
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
    return total / episodes


def test_the_example_learns_without_one_transition_that_no_action_made(
    ppo: Any, fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four servers one is killed for good in the middle, and one is killed and started again at its port."""
    servers = fleet(4, "--num-envs", str(LANES))
    inner = make_vec_remote(servers.urls)

    def kill() -> None:
        servers.kill(1)
        servers.kill(2)

    def restart() -> None:
        assert envs.lost.reshape(4, LANES).sum(axis=1).astype(bool).tolist() == [False, True, True, False]
        servers.restart(2)
        until(lambda: inner.remotes()[2].state == "running", 60.0)

    envs = Witness(BlockingReset(inner, on_lost="continue"), {1000: kill, 1400: restart})
    used, wrong = 0, 0
    update = ppo.update

    def watched(agent: Any, optimizer: Any, observations: Any, *rest: Any) -> None:
        nonlocal used, wrong
        assert {len(array) for array in rest} == {len(observations)}
        used += len(observations)
        wrong += sum(row.tobytes() not in envs.made for row in observations)
        update(agent, optimizer, observations, *rest)

    monkeypatch.setattr(ppo, "update", watched)
    agent = ppo.train(envs, 90_000)
    valid = np.array(envs.valid).reshape(-1, 4, LANES)
    envs.close()
    assert wrong == 0
    assert used == len(envs.made) >= 90_000
    assert valid[:, [0, 3]].all()
    assert valid[:1000].all()
    assert not valid[1010:, 1].any()  # killed for good
    assert not valid[1010:1400, 2].any()
    assert valid[-10:, 2].all()  # back
    assert mean_return(ppo.Agent(4, 2)) < 50 < 200 < mean_return(agent)


def test_the_example_runs_from_the_command_line(fleet: Callable[..., Fleet]) -> None:
    servers = fleet(2, "--num-envs", "2")
    command = [sys.executable, str(EXAMPLE), *servers.urls, "--steps", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert re.match(r"     2\d\d steps  mean return +\d+\.\d  4 of 4 slots  [\d,]+ steps/s\n", done.stdout), done.stdout
    assert done.stderr == ""


class At(BaseCallback):
    """Does something at certain steps of a training, and counts what became of the slots."""

    def __init__(self, events: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self.events = events
        self.cut_off: list[tuple[int, str]] = []
        """The slot and the error of each episode that a loss cut off."""
        self.end = time.monotonic() + DEADLINE

    def _on_step(self) -> bool:
        assert time.monotonic() < self.end
        for slot, info in enumerate(self.locals["infos"]):
            if "error" in info:
                assert self.locals["dones"][slot]
                assert info["TimeLimit.truncated"]
                self.cut_off.append((slot, info["error"]))
        self.events.get(self.n_calls, lambda: None)()
        return True


def learn(envs: SB3VecEnv, events: dict[int, Callable[[], None]], calls: int) -> At:
    """Let Stable-Baselines3's PPO make that many calls of `step`."""
    callback = At(events)
    model = PPO("MlpPolicy", VecMonitor(envs), n_steps=64, batch_size=64, n_epochs=2, seed=1, device="cpu")
    model.learn(calls * envs.num_envs, callback)
    assert callback.n_calls == calls
    return callback


def test_sb3_trains_on_with_a_spare_and_with_the_server_that_comes_back(
    fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    servers = fleet(3)
    inner = make_vec_remote(servers.urls[:2], spares=servers.urls[2:])

    def states() -> list[tuple[str, str]]:
        return [(report.url, report.state) for report in inner.remotes()]

    def back() -> None:
        servers.restart(1)
        until(lambda: states()[2] == (servers.urls[1], "spare"), 60.0)

    until(lambda: states()[2] == (servers.urls[2], "spare"), 60.0)
    envs = SB3VecEnv(inner)
    callback = learn(envs, {100: lambda: servers.kill(1), 200: back, 300: lambda: servers.kill(2)}, 640)
    assert [slot for slot, _ in callback.cut_off] == [1, 1]
    assert [url for url, _ in states()] == servers.urls[:2] + servers.urls[2:]
    assert states()[1] == (servers.urls[1], "running")
    envs.close()
    said = [record.getMessage() for record in caplog.records if "takes over" in record.getMessage()]
    assert said == [
        f"{servers.urls[2]} takes over the slots of {servers.urls[1]}",
        f"{servers.urls[1]} takes over the slots of {servers.urls[2]}",
    ]


def test_sb3_waits_for_a_server_that_comes_back_where_there_is_no_spare(
    fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    servers = fleet(2)

    def again() -> None:
        servers.kill(1)
        servers.restart(1)

    envs = SB3VecEnv(make_vec_remote(servers.urls))
    callback = learn(envs, {100: again}, 256)
    envs.close()
    assert [slot for slot, _ in callback.cut_off] == [1]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(re.match(r"slot 1: back after \d+ s", line) for line in said), said
