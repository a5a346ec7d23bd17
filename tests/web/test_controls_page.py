"""The environment executes what a person presses: twelve environments by keys and fingers, a gamepad, the mouse."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from benchmarks.web_controls import ENTRIES, GAMES, PLACE, by_keys, by_touch, seated
from bridge import Web, serve_gym
from tests.browser import in_browser, says, shows
from tests.support import until
from tests.web_envs import Paddle

pytestmark = in_browser
GAMEPAD = """() => {
  window.pad = {axes: [0, 0, 0, 0], buttons: Array.from({length: 17}, () => ({pressed: false, value: 0}))};
  navigator.getGamepads = () => [null, window.pad];
  window.dispatchEvent(new Event("gamepadconnected"));
}"""


class Rudder(Paddle):
    """Its one number is where the paddle goes; it keeps what it was stepped with."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    done: list[float] = []  # noqa: RUF012 - of all of them

    def step(self, action):
        self.done.append(float(action[0]))
        return super().step(round(float(action[0])))


class Cook(gymnasium.Wrapper):
    """Three actions with names, and what was done."""

    done: list[int] = []  # noqa: RUF012 - of all of them

    def __init__(self, render_mode=None):
        super().__init__(Paddle(render_mode))
        self.action_space = spaces.Discrete(3)

    def get_action_meanings(self):
        return ["NOOP", "STIR", "SERVE"]

    def step(self, action):
        self.done.append(int(action))
        return self.env.step(0)


# Buttons are laid out by the names of actions: these games have the same kinds of names as others.
ALIKE = {"LunarLander, continuous", "Breakout", "FrozenLake", "Taxi", "Blackjack", "MountainCar, continuous"}
# Each game is played by keys or by touch; `make test-all` plays all by both.
PLAYS = [
    pytest.param(game, by, id=f"{game.name}-{way}", marks=pytest.mark.repeat if (game.name in ALIKE) is touches else ())
    for by, way, touches in ((by_keys, "keys", False), (by_touch, "touch", True))
    for game in GAMES
]


@pytest.mark.slow
@pytest.mark.parametrize(("game", "by"), PLAYS)
def test_each_action_that_is_shown_happens_and_no_other(browser, game, by):
    modules = {"simple_tag": "mpe2", "tic-tac-toe": "pettingzoo", "MiniGrid": "minigrid"}
    pytest.importorskip(modules.get(game.name, "gymnasium"))
    pytest.importorskip("ale_py" if game.name in ("Breakout", "Pong") else "gymnasium")
    assert by(browser, game, 2.0) > 0


@pytest.mark.slow
def test_the_button_for_left_is_left_of_the_one_for_right(browser):
    pytest.importorskip("ale_py")
    (game,) = (game for game in GAMES if game.name == "Breakout")  # its actions are fire, right, left
    with seated(browser, game, phone=True) as (page, _):
        keys = {entry["label"]: entry["keys"][0] for entry in page.evaluate(ENTRIES)}
        left, right = (page.evaluate(PLACE, keys[label]) for label in ("left", "right"))
        assert left["x"] < right["x"]
        assert left["y"] == right["y"]


def seat(opened, server):
    page = opened(server.web_url)
    page.click("#begin")
    says(page, "#badge", "playing")
    shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
    return page


@pytest.mark.slow
def test_a_stick_is_pushed_as_far_as_it_is_and_a_trigger_too(opened):
    Rudder.done.clear()
    with serve_gym(Rudder, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        page.evaluate(GAMEPAD)
        for pushed, expected in ((0.5, 0.5), (-0.25, -0.25), (1.2, 1.0), (0.05, 0.0)):
            page.evaluate("(x) => { window.pad.axes[0] = x; }", pushed)
            until(lambda expected=expected: Rudder.done and abs(Rudder.done[-1] - expected) < 1e-6)


@pytest.mark.slow
def test_buttons_and_the_cross_of_a_gamepad_press_keys(opened):
    Cook.done.clear()
    with serve_gym(Cook, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        page.evaluate(GAMEPAD)
        for button, action in ((0, 1), (1, 2)):
            page.evaluate("(index) => { window.pad.buttons[index].pressed = true; }", button)
            until(lambda action=action: Cook.done[-1:] == [action])
            page.evaluate("(index) => { window.pad.buttons[index].pressed = false; }", button)
            until(lambda: Cook.done[-1:] == [0])


@pytest.mark.slow
def test_the_stick_that_is_pushed_counts_of_two_gamepads_and_none_once_they_are_gone(opened):
    Rudder.done.clear()
    with serve_gym(Rudder, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        page.evaluate(GAMEPAD)
        page.evaluate("""() => {
          window.pad.axes[0] = 0.5;
          navigator.getGamepads = () => [window.pad, {axes: [0, 0], buttons: []}];
        }""")
        until(lambda: Rudder.done and Rudder.done[-1] == 0.5)
        begun = len(Rudder.done)
        until(lambda: len(Rudder.done) > begun + 30)
        assert set(Rudder.done[begun:]) == {0.5}, "the one at rest lets nothing go"
        page.evaluate("() => { navigator.getGamepads = () => []; }")
        until(lambda: Rudder.done[-1] == 0)


KEY = """([kind, key, code]) => document.dispatchEvent(new KeyboardEvent(kind, {key, code}))"""


@pytest.mark.slow
def test_a_key_is_let_go_though_shift_changed_its_name(opened):
    Cook.done.clear()
    with serve_gym(Cook, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        page.click("#legend button")
        page.evaluate(KEY, ["keydown", "1", "Digit1"])
        page.evaluate(KEY, ["keydown", "1", "Digit1"])
        until(lambda: Cook.done[-1:] == [1])
        page.evaluate(KEY, ["keydown", "Shift", "ShiftLeft"])
        page.evaluate(KEY, ["keyup", "!", "Digit1"])
        until(lambda: Cook.done[-1:] == [0])


@pytest.mark.parametrize(("key", "code"), [("ы", "KeyS"), ("σ", "KeyS")], ids=["Cyrillic", "Greek"])
@pytest.mark.slow
def test_without_latin_letters_the_key_in_their_place_acts(opened, key, code):
    Cook.done.clear()
    with serve_gym(Cook, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        page.evaluate(KEY, ["keydown", key, code])
        until(lambda: Cook.done[-1:] == [1])
        page.evaluate(KEY, ["keyup", key, code])
        until(lambda: Cook.done[-1:] == [0])


@pytest.mark.slow
def test_the_mouse_is_a_stick_while_its_button_is_down(opened):
    Rudder.done.clear()
    with serve_gym(Rudder, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        box = page.locator("#canvas").bounding_box()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + box["height"] / 2)
        until(lambda: Rudder.done)
        page.mouse.down()
        until(lambda: abs(Rudder.done[-1] - 0.5) < 0.02)
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + box["height"] / 2)
        until(lambda: abs(Rudder.done[-1] + 0.5) < 0.02)
        page.mouse.up()
        until(lambda: Rudder.done[-1] == 0.0)
        assert set(np.round(Rudder.done, 1)) <= {0.0, 0.5, -0.5}


@pytest.mark.slow
def test_a_name_that_is_no_direction_chooses_its_letter_and_labels_its_button(opened):
    Cook.done.clear()
    with serve_gym(Cook, web=Web(play_fps=60)) as server:
        page = seat(opened, server)
        assert page.locator("#pad button").all_text_contents() == ["stir", "serve"], "words, since letters say nothing"
        for key, action in (("s", 1), ("e", 2)):
            page.keyboard.down(key)
            until(lambda action=action: Cook.done[-1:] == [action])
            page.keyboard.up(key)
            until(lambda: Cook.done[-1:] == [0])
