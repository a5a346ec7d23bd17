"""The page in Chromium, 80 ms away from its server."""

from __future__ import annotations

import pytest

from bridge.testing import Conditions
from tests.browser import TIMEOUT, in_browser, launched, says
from tests.network.programs import PORT, serve
from tests.network.relay import Line
from tests.web_envs import PADDLE, Paddle

pytestmark = in_browser
# A browser that reports home, or looks for updates, has no business on a test's network.
OPTIONS = "--disable-background-networking --disable-component-update --disable-sync --no-first-run --disable-quic"


def person(url):
    """Open the page and play: yield what it shows, step by step, and in the end what went wrong."""
    with launched(*OPTIONS.split()) as chromium:
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
        yield problems


@pytest.mark.parametrize("rate", [None, 125_000], ids=["fast", "1 Mbit/s"])
def test_the_page_is_played_80_ms_away(network, rate):
    game, desk = network.machine("game-pc"), network.machine("desk", Line(Conditions(delay=0.04), rate))
    server = game.start(serve, Paddle, {"web": True, "fps": 30})
    server.next()
    browser = desk.start(person, f"http://game-pc:{PORT}/")
    assert [browser.next(120) for _ in range(3)] == ["right", "left", []]
    assert browser.result() is None
