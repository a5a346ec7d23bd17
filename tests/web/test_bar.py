"""The bar above the picture: one row that never wraps, whatever a person does, so that the picture stands still."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from bridge import make_remote, make_vec_remote, serve_gym, serve_parallel
from tests.browser import AXE, FINDINGS, in_browser, says, shows
from tests.support import sampled
from tests.web_envs import Doors, Paddle, Paddles

pytestmark = in_browser

SIZES = [[320, 568], [390, 844], [768, 1024], [1280, 800], [1920, 1080]]
ALL_SIZES = [*SIZES, [844, 390], [1081, 700]]
PLACE = """() => {
  const {left, top, width, height} = document.getElementById("canvas").getBoundingClientRect();
  return [left, top, width, height];
}"""
# What is outside of the one row: parts of the bar that another row has, or that are cut off at the right.
OUTSIDE = """() => {
  const bar = document.getElementById("bar").getBoundingClientRect();
  return [...document.querySelectorAll("#what, #choices label, #tools:not(.open) button, #more, #play")]
    .filter((part) => part.checkVisibility() && part.getBoundingClientRect().width > 1)
    .filter((part) => {
      const {top, bottom, left, right} = part.getBoundingClientRect();
      return top < bar.top - 1 || bottom > bar.bottom + 1 || left < bar.left - 1 || right > bar.right + 1;
    })
    .map((part) => part.id || part.textContent);
}"""


def named(value):
    """The id of a parameter."""
    return "x".join(map(str, value)) if isinstance(value, list) else None


class ManyKeys(Doors):
    """Has more keys than a row has room for."""

    def get_keys_to_action(self):
        return {(letter,): index % 2 for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}


def tool(page, name):
    """Press a tool of the bar, behind the button that has it where the bar is narrow."""
    # Playwright scrolls where it has to try again, as with a button that is not enabled yet.
    page.wait_for_function("(name) => !document.getElementById(name).disabled", arg=name)
    if page.is_visible("#more"):
        page.click("#more")
    page.click(f"#{name}")


def axe_is_content(page):
    if AXE.exists():
        page.evaluate("() => Promise.all(document.getAnimations().map((one) => one.finished))")
        page.add_script_tag(path=AXE)
        assert page.evaluate(FINDINGS) == []


@contextlib.contextmanager
def standing_still(page):
    """Expect that the picture is at the end where it was, and that the bar has been one row throughout."""
    page.evaluate("window.scrollTo(0, 0)")
    place = page.evaluate(PLACE)

    def check(when):
        assert page.evaluate(PLACE) == place, when
        assert page.evaluate(OUTSIDE) == [], when
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), when

    check("at first")
    yield check
    check("at the end")


def sized(opened, server, size, **options):
    touch = size[0] < 1000
    page = opened(server.web_url, has_touch=touch, is_mobile=touch, reduced_motion="reduce", bypass_csp=True, **options)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    shows(page, "() => !document.getElementById('play').disabled")
    return page


@pytest.mark.slow
@pytest.mark.parametrize(("size", "make"), sampled(itertools.product(SIZES, [Paddle, ManyKeys]), 3), ids=named)
def test_the_picture_stands_still_while_one_plays_records_and_gives_back(opened, tmp_path, size, make):
    with serve_gym(make, web=True, fps=30, record=tmp_path) as server:
        page = sized(opened, server, size)
        page.click("#play")
        says(page, "#badge", "playing")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        # Now there is a world with a picture, which nobody plays. The page says so before the server does.
        given_back = "() => (document.getElementById('play').click(), document.getElementById('play').textContent)"
        assert page.evaluate(given_back) == "Play"
        says(page, "#badge", "watching")
        with standing_still(page) as check:
            page.click("#play")
            says(page, "#badge", "playing")
            page.wait_for_selector("#legend kbd", state="attached")
            check("while a person plays")
            tool(page, "record")
            says(page, "#record-text", "Record")
            says(page, "#announcement", "Recording is off")
            check("while nothing is recorded")
            tool(page, "record")
            says(page, "#announcement", "Recording is on")
            check("while it is recorded")
            axe_is_content(page)
            page.click("#play")
            says(page, "#play", "Play")


@pytest.mark.parametrize("size", sampled(SIZES, 4), ids=named)
@pytest.mark.slow
def test_the_picture_stands_still_while_one_takes_over_and_gives_back(opened, tmp_path, size):
    with serve_gym(Paddle, web=True, fps=30, record=tmp_path) as server:
        agent = make_remote(f"{server.url}?world=", player="agent:PPO")
        agent.reset()
        page = sized(opened, server, size)
        says(page, "#play", "Take over")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        with standing_still(page) as check:
            page.click("#play")
            says(page, "#badge", "agent acts: hold a button" if size[0] < 1000 else "agent acts: hold a key")
            check("before a key")
            assert page.is_visible("#badge")  # on a phone too: nothing else says what to do
            page.keyboard.down("ArrowLeft")
            says(page, "#badge", "you act for agent")
            says(page, "#worlds", "takes over")
            check("while a person acts")
            axe_is_content(page)
            page.keyboard.up("ArrowLeft")
            page.click("#play")
            says(page, "#play", "Take over")
        agent.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", sampled(ALL_SIZES, 3), ids=named)
def test_a_bar_with_everything_in_it_is_one_row(opened, tmp_path, size):
    """Several seats and a recording; a long title, which gives way."""
    titled = type("ManipulationOfSeveralObjectsWithManyNames", (Paddles,), {})
    with serve_parallel(titled, web=True, fps=30, record=tmp_path) as server:
        page = sized(opened, server, size)
        assert page.evaluate(OUTSIDE) == []
        page.click("#play")
        says(page, "#badge", "playing")
        assert page.evaluate(OUTSIDE) == []
    with serve_gym(["CartPole-v1", "MountainCarContinuous-v0"], web=True, fps=30, record=tmp_path) as server:
        page = sized(opened, server, size)
        assert page.is_visible("#env")
        assert page.evaluate(OUTSIDE) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", sampled([[1280, 800], [1081, 700], [1920, 1080]], 2), ids=named)
def test_lanes_leave_room_for_the_title_and_no_word_of_the_badge_is_cut(opened, size):
    titled = type("ALE/Breakout-v5", (Paddle,), {})
    with serve_gym(titled, web=True, num_envs=16) as server:
        envs = make_vec_remote(f"{server.url}?world=", blocking=True)
        envs.reset(seed=0)
        page = sized(opened, server, size)
        says(page, "#badge", "watching")
        says(page, "#stage-title", "ALE/Breakout-v5")
        page.wait_for_selector("#lanes-label:not([hidden])", state="attached")
        shown = "(id) => (({clientWidth, scrollWidth}) => clientWidth / scrollWidth)(document.getElementById(id))"
        assert not page.is_visible("#badge") or page.evaluate(shown, "badge") == 1
        assert page.evaluate(shown, "stage-title") > 0.6
        assert page.evaluate(OUTSIDE) == []
        envs.close()


@pytest.mark.slow
def test_the_tools_of_a_narrow_bar_are_behind_one_button(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = sized(opened, server, (390, 844))
        page.click("#play")
        says(page, "#badge", "playing")
        assert page.is_hidden("#help-open")
        assert page.get_attribute("#more", "aria-expanded") == "false"
        page.click("#more")
        assert page.is_visible("#help-open")
        assert page.get_attribute("#more", "aria-expanded") == "true"
        axe_is_content(page)
        page.keyboard.press("Escape")  # it closes them, and does not stop playing
        assert page.is_hidden("#help-open")
        assert page.evaluate("() => document.activeElement.id") == "more"
        assert page.text_content("#play") == "Stop"
        page.click("#more")
        page.mouse.click(200, 700)  # somewhere else
        assert page.is_hidden("#help-open")
        tool(page, "help-open")
        assert page.is_visible("#help")
        assert page.is_hidden("#tools")


@pytest.mark.slow
def test_a_key_after_a_click_on_a_tool_is_for_the_world(opened, tmp_path):
    with serve_gym(Paddle, web=True, fps=30, record=tmp_path) as server:
        page = sized(opened, server, (1280, 800))
        assert page.is_hidden("#more")
        page.click("#play")
        says(page, "#badge", "playing")
        page.click("#record")
        says(page, "#announcement", "Recording is off")
        page.keyboard.press("Space")
        assert page.evaluate("() => document.activeElement.id") == "stage"
