"""The page on screens of several sizes: everything that a person plays with is in view, and nothing is cut off."""

from __future__ import annotations

import pytest

from bridge import serve_gym, serve_parallel
from tests.test_web_page import browser, in_browser, opened, says, shows  # noqa: F401 - fixtures
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
def test_the_picture_and_the_buttons_fit_into_the_screen(opened, name):  # noqa: F811
    width, height = VIEWPORTS[name]
    touch = name != "screen"
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, has_touch=touch, is_mobile=touch)
        page.set_viewport_size({"width": width, "height": height})
        page.click("#begin")
        says(page, "#legend", "→")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        for selector in ("#frame", "#pad" if touch else "#legend", "#play"):
            is_in_view(page, selector)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        frame = page.evaluate("() => document.getElementById('frame').getBoundingClientRect().toJSON()")
        assert frame["width"] * frame["height"] >= width * height / 5, "the picture has a fair part of the screen"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small phone", "phone on its side"])
def test_all_returns_of_a_round_are_in_view(opened, name):  # noqa: F811
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
