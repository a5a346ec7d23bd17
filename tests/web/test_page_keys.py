"""The page in a real browser: keys, the actions that they stand for, and the legend that says so."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from bridge import serve_gym
from tests.browser import in_browser, says, shows
from tests.support import until
from tests.web_envs import PADDLE, Doors, Paddle

pytestmark = [in_browser, pytest.mark.slow]


class Car(Paddle):
    """Two numbers: what steers is the first."""

    action_space = spaces.Box(np.array([-1, 0], np.float32), 1)
    done: list[list[float]] = []  # noqa: RUF012 - of all of them

    def step(self, action):
        self.done.append(action.tolist())
        return super().step(round(float(action[0])))


def test_each_number_of_an_action_has_keys_that_can_be_changed(opened):
    Car.done.clear()
    with serve_gym(Car, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "1: 1")
        for key, action in (("ArrowLeft", [-1, 0]), ("ArrowUp", [0, 1]), ("ArrowRight", [1, 0])):
            page.keyboard.down(key)
            until(lambda action=action: action in Car.done)
            page.keyboard.up(key)
        page.click("#legend button:last-of-type")
        says(page, "#announcement", "Press a key for: 1: 1")
        page.keyboard.press("g")
        Car.done.clear()
        page.keyboard.down("g")
        until(lambda: [0, 1] in Car.done)
        page.keyboard.press("Escape")


def test_the_legend_says_what_is_done_where_no_key_is_held(opened):
    with serve_gym(Doors, web=True, fps=20) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "no key: action 0")
        page.keyboard.press("Escape")
    with serve_gym(Paddle, web=True) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "no key: action 0")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")


def test_a_world_that_keys_cannot_play_says_so(opened):
    with serve_gym(Paddle, num_envs=2, web=True) as server:
        page = opened(server.web_url)
        page.click("#play:enabled")
        says(page, "body", "this world has lanes, which are not played by keys")
        assert "iterable" not in page.inner_text("body")


def test_another_key_can_be_chosen_for_an_action(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "→")
        page.click("#legend button:last-of-type")
        says(page, "#announcement", "Press a key")
        page.keyboard.press("Escape")
        says(page, "#announcement", "")
        assert "→" in page.inner_text("#legend"), "Escape leaves it as it is"
        page.click("#legend button:first-of-type")
        page.click("#legend button:last-of-type")  # the last that was chosen counts
        page.keyboard.press("k")
        says(page, "#legend", "K")
        assert "←" in page.inner_text("#legend")
        page.keyboard.down("k")
        shows(page, f"() => ({PADDLE})() > 130")
        page.keyboard.up("k")
        page.click("#legend button:last-of-type")
        page.click("#play")
        says(page, "#badge", "watching")
        page.keyboard.press("?")  # nothing is chosen any more
        shows(page, "() => document.getElementById('help').open")


class Diagonal(Paddle):
    """Two keys together are an action of their own; it notes what was done."""

    action_space = spaces.Discrete(4)
    done: list[int] = []  # noqa: RUF012 - of all of them

    def get_keys_to_action(self):
        return {(): 0, ("w",): 1, ("d",): 2, ("d", "w"): 3}

    def step(self, action):
        self.done.append(int(action))
        return super().step(0)


def test_what_several_keys_do_together_follows_the_keys_that_are_chosen(opened):
    Diagonal.done.clear()
    with serve_gym(Diagonal, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "D")
        page.locator("#legend button", has_text="action 2").click()
        page.keyboard.press("w")  # the two are exchanged
        page.locator("#legend button", has_text="action 1").click()
        page.keyboard.press("k")
        for again in (False, True):
            if again:  # from this browser's memory
                page.reload()
            says(page, "#legend", "Kaction 1Waction 2")
            Diagonal.done.clear()
            page.keyboard.down("k")
            until(lambda: 1 in Diagonal.done)
            page.keyboard.down("w")
            until(lambda: 3 in Diagonal.done)
            page.keyboard.up("k")
            until(lambda: 2 in Diagonal.done)
            page.keyboard.up("w")
