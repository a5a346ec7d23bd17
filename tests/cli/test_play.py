"""`gymnasium-bridge play` with SDL's dummy driver: no window, no person."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from bridge import serve_gym
from bridge.cli import main, play
from bridge.cli.play import Keyboard, describe, read_keys
from bridge.testing import CountingEnv
from tests.preloaded import run

pygame = pytest.importorskip("pygame")


class Watched(CountingEnv):
    """Keeps the actions of all its instances."""

    seen: list[int] = []  # noqa: RUF012

    def step(self, action: Any) -> Any:
        self.seen.append(int(action))
        return super().step(action)


@pytest.mark.parametrize("fps", [None, 200.0])
def test_a_key_that_is_held_is_the_action(fps: float | None) -> None:
    Watched.seen.clear()
    pygame.init()
    pygame.event.clear()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_RIGHT))
    with serve_gym(lambda: Watched(7), fps=fps) as server:
        assert main(["play", server.url, "--frames", "25", "--fps", "100"]) == 0
    assert Watched.seen.count(1) >= 5, (
        "in real time its last action goes on for some frames, and the default for others"
    )
    assert fps is not None or 0 not in Watched.seen


def test_without_a_key_an_environment_in_which_no_action_does_nothing_stands_still_in_lock_step() -> None:
    Watched.seen.clear()
    pygame.init()
    pygame.event.clear()
    with serve_gym(lambda: Watched(7)) as server:
        assert main(["play", server.url, "--frames", "5", "--fps", "100"]) == 0
    assert Watched.seen == []


def test_escape_ends() -> None:
    pygame.init()
    pygame.event.clear()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE))
    with serve_gym("CartPole-v1", fps=50.0) as server:
        assert main(["play", server.url]) == 0


def test_the_picture_of_the_environment_is_drawn() -> None:
    with serve_gym("CartPole-v1", fps=50.0) as server:
        assert main(["play", server.url, "--frames", "3", "--scale", "1"]) == 0


def test_the_lines_stand_below_the_picture_and_cover_none_of_it() -> None:
    pygame.init()
    font = pygame.font.Font(None, 20)
    picture = np.full((40, 60, 3), (10, 200, 30), np.uint8)
    window = play.draw(pygame, None, font, picture, ["return 1", "round trip"], 2)
    shown = pygame.surfarray.array3d(window)
    assert (shown[:120, :80] == (10, 200, 30)).all()
    assert (shown[:, 80:] == 255).all(axis=2).any()
    assert play.draw(pygame, window, font, picture, ["return 1"], 2) is window


@pytest.mark.parametrize("pair", ["a=7", "a", "=1", "spcae=1", "left+spcae=1", "left+=1"])
def test_keys_that_cannot_be_read_are_an_error(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1") as server:
        assert main(["play", server.url, "--frames", "1", "--keys", pair]) == 2
    error = capsys.readouterr().err
    assert "expected --keys KEY=ACTION with a key such as a, left or space, and an action of Discrete(2)" in error
    assert f"got {pair!r}" in error


def test_the_name_of_a_key_may_have_capitals() -> None:
    Watched.seen.clear()
    pygame.init()
    pygame.event.clear()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_SPACE))
    with serve_gym(lambda: Watched(7)) as server:
        assert main(["play", server.url, "--frames", "5", "--fps", "100", "--keys", "Space=1"]) == 0
    assert set(Watched.seen) == {1}


def test_keys_by_digits_arrows_and_meanings() -> None:
    keys = {frozenset({"space"}): 1, frozenset({"right"}): 2, frozenset({"right", "space"}): 3}
    keyboard = Keyboard(spaces.Discrete(4), keys, 0)
    assert keyboard.action() == 0
    keyboard.held |= {"right"}
    assert keyboard.action() == 2
    keyboard.held |= {"space"}
    assert keyboard.action() == 3, "the largest set of keys that is held"
    pygame.init()
    assert read_keys(pygame, ["a+b=1"], spaces.Discrete(2)) == {frozenset({"a", "b"}): 1}


def test_a_box_is_steered_by_the_arrows() -> None:
    space = spaces.Box(-2.0, 2.0, (3,))
    keyboard = Keyboard(space, {}, np.zeros(3, np.float32))
    keyboard.held |= {"left", "up"}
    action = keyboard.action()
    assert action.tolist() == [-2.0, 2.0, 0.0]
    assert space.contains(action)


def test_the_diagnostics_are_shown() -> None:
    """U-11 for a person."""
    latency = {
        "round_trip": 0.0123,
        "observation_age": 0.02,
        "action_delay": 0.005,
        "frames_skipped": 3,
        "overruns": 1,
    }
    lines = describe({"latency": latency, "episodes": [{"return": 9.0}]}, 12.0, 59.9)
    assert lines == [
        "return 12   59.9 steps/s",
        "round trip 12.3 ms   age 20.0 ms",
        "action delay 5.0 ms   skipped 3   overruns 1",
        "ended: 9",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a display")
def test_without_a_display_it_says_so_and_ends(tmp_path: Path) -> None:
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)  # no socket of a compositor is there
    with serve_gym(lambda: CountingEnv(7)) as server:
        program = "import sys; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"
        done = run("-c", program, "play", server.url, "--frames", "5", env=environment, bare=True)
    assert done.returncode == 2
    assert "there is no display here" in done.stderr
    assert "--web" in done.stderr
