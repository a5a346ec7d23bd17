"""The page in Chromium, 80 ms away from its server."""

from __future__ import annotations

import shutil

import pytest

from bridge.testing import Conditions
from tests.network.programs import PORT, serve
from tests.network.relay import Line
from tests.web_envs import Paddle

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install --no-install-recommends chromium"
)
# A browser that reports home, or looks for updates, has no business on a test's network.
OPTIONS = "--no-sandbox --disable-background-networking --disable-component-update --disable-sync --no-first-run"
TIMEOUT = 60_000  # milliseconds
# Where the paddle is: the mean column of the white pixels; -1 where there are none.
PADDLE = """() => {
  const canvas = document.getElementById("canvas");
  const {width, height} = canvas;
  if (!canvas.dataset.pictures) return -1;
  const {data} = canvas.getContext("2d").getImageData(0, height - 12, width, 1);
  let sum = 0, count = 0;
  for (let x = 0; x < width; x++) if (data[4 * x] > 200) { sum += x; count += 1; }
  return count ? sum / count : -1;
}"""


def says(page, selector, text):
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector).textContent.includes(text)", arg=[selector, text]
    )


def person(url):
    """Open the page and play: yield what it shows, step by step, and in the end what went wrong."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = [*OPTIONS.split(), "--disable-quic"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = chromium.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.set_default_timeout(TIMEOUT)
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error.stack or error)))
        page.goto(url)
        page.click("#begin")
        says(page, "#badge", "playing")
        page.wait_for_function(f"() => ({PADDLE})() > 0")
        page.keyboard.down("ArrowRight")
        page.wait_for_function(f"() => ({PADDLE})() > 130")
        page.keyboard.up("ArrowRight")
        yield "right"
        page.keyboard.down("ArrowLeft")
        page.wait_for_function(f"() => ({PADDLE})() < 70")
        yield "left"
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        chromium.close()
        yield problems


@pytest.mark.parametrize("rate", [None, 125_000], ids=["fast", "1 Mbit/s"])
def test_the_page_is_played_80_ms_away(network, rate):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    game, desk = network.machine("game-pc"), network.machine("desk", Line(Conditions(delay=0.04), rate))
    server = game.start(serve, Paddle, {"web": True, "fps": 30})
    server.next()
    browser = desk.start(person, f"http://game-pc:{PORT}/")
    assert [browser.next(120) for _ in range(3)] == ["right", "left", []]
    assert browser.result() is None
