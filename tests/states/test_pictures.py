"""Who watches sees an environment where it was restored, also one that was replayed into the place of another."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, serve_gym
from tests.browser import PIXEL, in_browser, launched, opened_in, shows
from tests.support import sampled

DEADLINE = 60.0


class Shade(gymnasium.Env[Any, Any]):
    """Shows how often it was stepped as a shade of grey."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Box(0, 10**9, (1,), np.int64)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.array([0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.array([self.steps]), 1.0, False, False, {}

    def render(self) -> Any:
        return np.full((200, 300, 3), self.steps % 256, np.uint8)


class Fragile(Shade):
    """Holds what cannot be copied, and makes it anew in each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.numbers = iter(list(range(1000)))
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        next(self.numbers)
        return super().step(action)


@in_browser
@pytest.mark.parametrize(
    ("kind", "how"), sampled([(Shade, "copy"), (Fragile, "replay")], 2, 1, slow=True), ids=["copy", "replay"]
)
def test_the_page_shows_a_restored_environment_and_what_it_does_then(kind: Any, how: str) -> None:
    shade = f"({PIXEL})()[0]"
    with (
        serve_gym(kind, web=True) as server,
        closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env,
        launched() as chromium,
        opened_in(chromium) as opened,
    ):

        def step(times: int) -> None:
            for _ in range(times):
                env.step(0)

        env.reset(seed=0)
        step(40)
        state = env.save_state()
        assert state.how == how
        step(160)
        page = opened(server.web_url)
        shows(page, f"() => {shade} > 190 && {shade} < 210")
        env.restore_state(state)
        # Before any step: the picture is of where it is now.
        shows(page, f"() => {shade} > 30 && {shade} < 50")
        step(60)
        shows(page, f"() => {shade} > 90 && {shade} < 110")
