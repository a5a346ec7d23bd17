"""The demo: an agent that learns in environments of other processes."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium.vector import SyncVectorEnv

from bridge.errors import ConnectError, SettingError
from bridge.facade import demo as module
from bridge.facade.demo import CrossEntropy, Demo, Generation, Outcome, draw_curve, play, run_demo


@pytest.mark.slow
def test_it_learns_over_the_network_and_says_so(tmp_path: Path) -> None:
    """A small population for few rounds: enough for twice the return of the first round, not for a solved CartPole."""
    out = io.StringIO()
    picture = tmp_path / "made" / "curve.png"
    outcome = run_demo(Demo(servers=2, lanes=8, generations=4, episodes=1, seed=0, picture=picture), out)
    means = [item.returns.mean() for item in outcome.history]
    assert means[-1] > 2 * means[0]
    assert outcome.returns.shape == (16,)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = out.getvalue()
    assert "\x1b" not in text, "a plain log has no control characters"
    assert text.count("grpc://127.0.0.1:") == 2
    rounds = [line[:18] for line in text.splitlines() if line.startswith("generation")]
    assert rounds == [f"generation {number:2} of 4" for number in range(1, 5)]
    assert "count as solved" in text
    assert f"The learning curve is in {picture}" in text
    assert not [child for child in psutil.Process().children() if "serve" in child.cmdline()], "servers are left"


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = io.StringIO()
    with pytest.raises(IsADirectoryError):
        run_demo(Demo(servers=1, lanes=2, generations=1, episodes=1, picture=tmp_path), out)
    assert "The trained policy's mean return over 2 new episodes is" in out.getvalue()
    assert list(tmp_path.parent.glob(f"{tmp_path.name}.*")) == []


@pytest.mark.slow
def test_the_cross_entropy_method_solves_cartpole() -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 32)
    search = CrossEntropy(5, seed=1)
    for number in range(9):
        tried = search.sample(32)
        returns, _ = play(envs, tried, 1, seed=1000 * number)
        search.follow(tried, returns.mean(axis=1))
    returns, _ = play(envs, np.tile(search.mean, (32, 1)), 1, seed=77)
    envs.close()
    assert returns.mean() >= module.SOLVED


def test_returns_are_those_of_whole_episodes_one_policy_a_slot() -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    left, right = np.array([0.0, 0, 0, 0, -1]), np.array([0.0, 0, 0, 0, 1])
    returns, steps = play(envs, np.stack([left, right]), 2, seed=5)
    envs.close()
    for slot, action in enumerate((0, 1)):
        env = gymnasium.make("CartPole-v1")
        for episode in range(2):
            env.reset(seed=5 + slot if episode == 0 else None)
            length, ended = 0, False
            while not ended:
                _, _, terminated, truncated, _ = env.step(action)
                length, ended = length + 1, terminated or truncated
            assert returns[slot, episode] == length
    # Steps of both slots, with the one in which the second episode began.
    assert steps == 2 * int(max(returns.sum(axis=1)) + 1)


@pytest.mark.slow
def test_servers_are_ended_when_the_training_fails(tmp_path: Path) -> None:
    started: list[int] = []

    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("generation"):
                started.extend(child.pid for child in psutil.Process().children() if "serve" in child.cmdline())
                raise RuntimeError("on purpose")
            return super().write(text)

    with pytest.raises(RuntimeError, match="on purpose"):
        run_demo(Demo(servers=2, lanes=2, picture=tmp_path / "none.png"), Failing())
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_a_server_that_does_not_start_is_an_error_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENV_ID", "NoSuchEnv-v0")
    with pytest.raises(ConnectError, match=r"ended before it printed a URL; it said: .*NoSuchEnv"):
        run_demo(Demo(servers=1, lanes=2), io.StringIO())


def test_without_matplotlib_there_is_no_picture_and_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    history = [Generation(1, np.array([10.0, 30.0]), 100, 1.0)]
    assert draw_curve(history, np.array([20.0]), tmp_path / "none.png") is None
    out = io.StringIO()
    module.conclude(Outcome(history, np.array([20.0]), 1.0, None), module.Screen(out))
    module.tell_picture(None, module.Screen(out))
    assert "pip install -e '.[demo]'" in out.getvalue()
    assert "Not learned: below the 475" in out.getvalue()


def test_in_a_terminal_a_line_is_overwritten_while_it_goes_on() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    screen = module.Screen(out)
    screen.passing("first")
    screen.passing("second, at once: not shown")
    screen.line("stays")
    assert out.getvalue() == "\r\x1b[Kfirst\r\x1b[Kstays\n"


def test_where_the_blocks_cannot_be_written_the_bar_is_of_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert module.Screen(out).bar(0.5, 4) == "##--"
    assert module.Screen(io.StringIO()).bar(0.5, 4) == "██░░"


def test_nonsense_is_refused_with_what_was_expected() -> None:
    with pytest.raises(SettingError, match="expected lanes to be at least 2, got 1"):
        Demo(lanes=1)
