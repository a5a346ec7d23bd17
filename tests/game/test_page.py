"""What people see of a game on the page, in headless Chromium."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Web, make_remote, serve_game
from bridge.errors import ClosedError
from bridge.web.gateway import serve_gateway
from tests.browser import in_browser, launched, opened_in, says, shows
from tests.game.loops import ACTION, OBSERVATION, in_thread
from tests.peers import Stream
from tests.support import until


@pytest.mark.parametrize(
    ("given", "no_key", "idle", "arrows"),
    [
        # Nobody has said that it does nothing: a game that waits does so until a key is pressed.
        ({}, 0, False, {"left": 1, "right": 2}),
        ({"default_action": 1}, 1, True, {"left": 0, "right": 2}),
        ({"default_action": 2, "web": Web(action_names="LEFT,RIGHT,WAIT")}, 2, False, {"left": 0, "right": 1}),
    ],
)
def test_no_key_does_what_the_game_does_where_nobody_acts(given, no_key, idle, arrows, process):
    over = threading.Event()

    def loop(game):
        with contextlib.suppress(ClosedError):
            while not over.wait(0.01):
                game.exchange(np.zeros(2, np.float32))
                assert game.begins in (True, False), "read, so that rounds begin"

    with (
        serve_game(OBSERVATION, spaces.Discrete(3), process=process, **{"web": True, **given}) as game,
        in_thread(lambda: loop(game)),
    ):
        try:
            stream = Stream(game.server).join()
            found = json.loads(stream.read_property("world.controls"))
            stream.close()
        finally:
            over.set()
    keys = {entry["keys"][0]: entry["action"] for entry in found["keys"]}
    assert (found["neutral"], found["idle"]) == (no_key, idle)
    assert {key: keys[key] for key in ("left", "right")} == arrows


def controls(server, **settings):
    """Join, and return what keys do: the keys of each action, and the action without a key."""
    stream = Stream(server, own_connection=True).join(**settings)
    found = json.loads(stream.read_property("world.controls"))
    stream.die()
    stream.channel.close()
    return {entry["action"]: entry["keys"][0] for entry in found["keys"]}, found["neutral"]


@pytest.mark.parametrize(
    ("given", "keys", "no_key"),
    [
        ({}, {1: "left", 2: "right"}, 0),
        ({"default_action": {"red": 2}}, {0: "left", 1: "right"}, 2),
        ({"web": Web(action_names="NOOP,UP,DOWN")}, {1: "up", 2: "down"}, 0),
    ],
)
@pytest.mark.parametrize("role", ["player", "takeover"])
def test_keys_of_each_of_several_agents_do_what_the_game_says_of_its_actions(given, keys, no_key, role, process):
    pair, over = (OBSERVATION, spaces.Discrete(3)), threading.Event()
    seen = dict.fromkeys(["red", "blue"], np.zeros(2, np.float32))

    def loop(game):
        with contextlib.suppress(ClosedError):
            while not over.wait(0.01):
                game.exchange(seen)
                assert game.begins in (True, False)

    keywords = {"web": True, **given}
    with (
        serve_game({"red": pair, "blue": pair}, process=process, **keywords) as game,
        in_thread(lambda: loop(game)),
    ):
        try:
            found, neutral = controls(game.server, agent="red", role=role)
        finally:
            over.set()
    assert (neutral, {action: found[action] for action in keys}) == (no_key, keys)


@in_browser
@pytest.mark.parametrize("frame", [np.full((40, 60, 3), 90, np.uint8), None], ids=["pictures", "no_pictures"])
@pytest.mark.slow
def test_who_watches_a_game_that_stands_still_reads_so_until_it_goes_on(frame):
    goes, over, rounds = threading.Event(), threading.Event(), []
    goes.set()

    def loop(game):
        try:
            while not over.is_set():
                game.exchange(np.zeros(2, np.float32), frame=frame)
                if game.begins:
                    rounds.append(game.seed)
                goes.wait(60)
                over.wait(0.02)
        except ClosedError:
            pass

    with (
        serve_game(OBSERVATION, ACTION, name="Dots", web=True, standstill=0.3) as game,
        in_thread(lambda: loop(game)),
        launched() as chromium,
        opened_in(chromium) as opened,
    ):
        try:
            env = make_remote(game.url)
            env.reset()
            page = opened(game.web_url)
            says(page, "#badge", "watching")
            shows(page, "() => document.getElementById('stall').textContent === ''")
            goes.clear()
            says(page, "#stall", "The game stands still: its program has paused, or hangs")
            assert page.is_visible("#stall")
            goes.set()
            shows(page, "() => document.getElementById('stall').textContent === ''")
            assert page.is_hidden("#problem")
            if frame is not None:  # its pictures come again
                before = page.evaluate("() => Number(document.getElementById('canvas').dataset.pictures)")
                shows(page, f"() => document.getElementById('canvas').dataset.pictures > {before + 3}")
            env.close()
            says(page, "#play", "Play")
            before = len(rounds)
            page.click("#play")
            says(page, "#badge", "playing")
            until(lambda: len(rounds) > before)  # who presses Play begins a round
            # Who plays keeps the place while the game stands still.
            goes.clear()
            says(page, "#stall", "The game stands still")
            goes.set()
            shows(page, "() => document.getElementById('stall').textContent === ''")
            says(page, "#badge", "playing")
            assert page.is_hidden("#problem")
        finally:
            over.set()
            goes.set()


@in_browser
@pytest.mark.slow
def test_a_person_plays_a_game_that_waits_as_its_agent(process):
    taken, rounds = [], []

    def loop(game):
        with contextlib.suppress(ClosedError):
            while True:
                # With a picture, since no other is shown of a game.
                taken.append(
                    game.exchange(np.zeros(2, np.float32), frame=np.full((40, 60, 3), 90, np.uint8), wait=True)
                )
                if game.begins:
                    rounds.append(game.seed)

    with (
        serve_game(OBSERVATION, spaces.Discrete(3), name="Dots", web=True, process=process) as game,
        in_thread(lambda: loop(game)),
        launched() as chromium,
        opened_in(chromium) as opened,
    ):
        try:
            page = opened(game.web_url)
            says(page, "#play", "Play")
            page.click("#play")
            says(page, "#badge", "playing")
            page.keyboard.down("ArrowRight")
            until(lambda: 2 in taken)
            shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
            page.keyboard.up("ArrowRight")
            # Nobody has said that an action does nothing: without a key it waits.
            assert set(taken) <= {None, 2}
            assert page.is_hidden("#problem")
            assert len(rounds) == 1
            page.keyboard.press("Escape")
            says(page, "#play", "Play")
            page.click("#play")
            until(lambda: len(rounds) == 2)
            assert None not in rounds, "a seed, so that a recording can be replayed"
        finally:
            game.close()


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("gateway", [False, True], ids=["own_page", "gateway"])
def test_a_game_is_seen_before_anybody_has_played_it(gateway, process):
    rounds = []

    def loop(game):
        with contextlib.suppress(ClosedError):
            while True:
                game.exchange(np.zeros(2, np.float32), frame=np.full((40, 60, 3), 90, np.uint8))
                if game.begins:
                    rounds.append(game.seed)
                time.sleep(0.02)

    with (
        serve_game(OBSERVATION, spaces.Discrete(3), name="Dots", web=True, process=process) as game,
        in_thread(lambda: loop(game)),
        launched() as chromium,
        opened_in(chromium) as opened,
        serve_gateway(game.url) as others,
    ):
        try:
            page = opened(others.web_url if gateway else game.web_url)
            says(page, "#badge", "watching")
            shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
            assert page.is_hidden("#problem")
            assert page.is_hidden("#empty")
            assert len(rounds) == 1, "who watches asks for no round"
            page.click("#play")
            says(page, "#badge", "playing")
            until(lambda: len(rounds) == 2)
        finally:
            game.close()


@in_browser
@pytest.mark.slow
def test_a_game_that_waits_for_its_first_player_says_that_it_is_ready():
    with (
        serve_game(OBSERVATION, ACTION, name="Dots", web=True) as game,
        launched() as chromium,
        opened_in(chromium) as opened,
    ):

        def loop():
            with contextlib.suppress(ClosedError):
                game.exchange(np.zeros(2, np.float32), wait=True)

        with in_thread(loop):
            says(opened(game.web_url), "#empty", "Dots is ready.")
            game.close()
