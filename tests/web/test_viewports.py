"""The page on screens of several sizes: everything that a person plays with is in view, and nothing is cut off."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from bridge import serve_gym, serve_parallel
from tests.browser import in_browser, says, shows
from tests.web_envs import Paddle, Race

pytestmark = [in_browser, pytest.mark.slow]

VIEWPORTS = {"small phone": (320, 568), "phone on its side": (844, 390), "tablet": (768, 1024), "screen": (1920, 1080)}
VIEW = """(selector) => {
  const {left, top, right, bottom} = document.querySelector(selector).getBoundingClientRect();
  return [left, top, innerWidth - right, innerHeight - bottom];
}"""


def is_in_view(page, selector):
    """Wait until an element is wholly on the screen."""
    page.wait_for_function(f"(selector) => ({VIEW})(selector).every((distance) => distance >= -1)", arg=selector)


@pytest.mark.parametrize("name", VIEWPORTS)
def test_the_picture_and_the_buttons_fit_into_the_screen(opened, name):
    width, height = VIEWPORTS[name]
    touch = name != "screen"
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, has_touch=touch, is_mobile=touch)
        page.set_viewport_size({"width": width, "height": height})
        page.click("#begin")
        says(page, "#legend", "→")
        page.evaluate("() => scrollTo(0, 0)")  # Playwright scrolls where it has to try a click again
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        for selector in ("#frame", "#pad" if touch else "#legend", "#play"):
            is_in_view(page, selector)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        frame = page.evaluate("() => document.getElementById('frame').getBoundingClientRect().toJSON()")
        assert frame["width"] * frame["height"] >= width * height / 5, "the picture has a fair part of the screen"


class Strip(Paddle):
    """Draws a strip of a few pixels, and has long names of actions."""

    action_space = spaces.Discrete(2)

    def get_action_meanings(self):
        return ["turn the wrist of the manipulator by ten degrees", "d" * 60]

    def render(self):
        return np.full((8, 2000, 3), 200, np.uint8)


class Unplayable(Strip):
    action_space = spaces.Dict({"steer": spaces.Discrete(2)})

    def step(self, action):
        return super().step(0)


def test_long_names_of_actions_are_no_wider_than_a_phone(opened):
    with serve_gym(Strip, web=True, fps=30) as server:
        page = opened(server.web_url, has_touch=True, is_mobile=True)
        page.set_viewport_size({"width": 320, "height": 568})
        page.click("#begin")
        page.wait_for_selector("#pad button")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 320
        page.click("#more")
        page.click("#help-open")
        assert page.evaluate("() => document.getElementById('help').scrollWidth") <= 320
    with serve_gym(Strip, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.set_viewport_size({"width": 320, "height": 568})
        page.click("#begin")
        page.wait_for_selector("#legend kbd")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 320


@pytest.mark.parametrize("fps", [None, 30], ids=["before a world", "over a strip"])
def test_a_problem_is_read_on_a_phone(opened, fps):
    with serve_gym(Unplayable, web=True, fps=fps) as server:
        page = opened(server.web_url, has_touch=True, is_mobile=True)
        page.set_viewport_size({"width": 320, "height": 568})
        if fps is not None:
            page.click("#play")
        else:
            page.click("#begin")
        says(page, "#message", "cannot be played here")
        if fps is not None:
            shows(page, "() => document.getElementById('canvas').width === 2000")
        frame, message, begin = (page.locator(f"#{name}").bounding_box() for name in ("frame", "message", "begin"))
        assert message["y"] >= frame["y"], "nothing is cut off"
        assert begin is None or begin["y"] + begin["height"] <= message["y"], "the button is in sight"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small phone", "phone on its side"])
def test_all_returns_of_a_round_are_in_view(opened, name):
    width, height = VIEWPORTS[name]
    with serve_parallel(Race, web=True, fps=60, match=True, agents=lambda observation: 1) as server:
        page = opened(server.web_url, has_touch=True, is_mobile=True)
        page.set_viewport_size({"width": width, "height": height})
        page.click("#play")
        says(page, "#badge", "you are")
        page.tap("#ready")
        says(page, "#match-over", "Round 1 is over")
        rows = page.locator("#match-returns li")
        assert rows.count() == 3
        for number in (1, 2, 3):
            is_in_view(page, f"#match-returns li:nth-child({number})")
            inside = page.evaluate(
                """(selector) => {
                  const row = document.querySelector(selector).getBoundingClientRect();
                  const panel = document.getElementById("match").getBoundingClientRect();
                  return row.top >= panel.top - 1 && row.bottom <= panel.bottom + 1;
                }""",
                f"#match-returns li:nth-child({number})",
            )
            assert inside, number
        is_in_view(page, "#ready")
