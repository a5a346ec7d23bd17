"""What people see of a game on the page, in headless Chromium."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Web, make_remote, serve_game
from bridge.core.encoding.tensors import unpack_tensor
from bridge.errors import ClosedError
from bridge.pb import dm_env_rpc_pb2 as pb
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


PICTURE, SEEN = np.full((40, 60, 3), 90, np.uint8), np.zeros(2, np.float32)


@contextlib.contextmanager
def waiting(frame, seen=SEEN, given=(OBSERVATION, ACTION), **keywords):
    """Serve a game that waits in each of its calls, and passes pictures that `frame` makes of their number."""

    def loop():
        with contextlib.suppress(ClosedError):
            for number in itertools.count():
                game.exchange(seen, frame=frame(number), wait=True)
                assert game.begins in (True, False)

    with serve_game(*given, name="Dots", web=True, **keywords) as game, in_thread(loop):
        try:
            yield game
        finally:
            game.close()


def look(stream):
    """Return the number of the next picture."""
    answer = stream.ask(step=pb.StepRequest(requested_observations=[7, 8]))
    assert answer.WhichOneof("payload") == "step", answer
    assert len(answer.step.observations[7].uint8s.array)
    return int(unpack_tensor(answer.step.observations[8])[0])


def overview(stream):
    return json.loads(stream.read_property("server.web"))


def test_who_watches_a_game_that_waits_sees_its_first_picture_and_reads_for_whom(process):
    with waiting(lambda number: PICTURE, process=process) as game:
        stranger = Stream(game.server)
        until(lambda: overview(stranger)["called"])
        stranger.join("", role="spectator", frame="png")
        assert look(stranger) == 1
        assert overview(stranger)["worlds"][0]["waits_for"] == []
        env = make_remote(game.url)
        env.reset(seed=1)
        env.step(0)
        until(lambda: overview(stranger)["worlds"][0]["waits_for"] == ["agent"])
        env.close()
        until(lambda: overview(stranger)["worlds"][0]["waits_for"] == [])
        stranger.die()


def test_of_several_agents_the_page_is_told_who_has_not_acted(process):
    pairs = {"red": (OBSERVATION, ACTION), "blue": (OBSERVATION, ACTION)}
    seen = dict.fromkeys(pairs, SEEN)
    with waiting(lambda number: PICTURE, seen, (pairs,), process=process) as game:
        red, blue = (make_remote(game.url, agent=name, timeout=30) for name in pairs)
        with in_thread(lambda: red.reset(seed=1)):
            watcher = Stream(game.server).join("", role="spectator")
            until(lambda: overview(watcher)["worlds"][0]["waits_for"] == ["blue"])
            blue.reset(seed=1)
        with in_thread(lambda: blue.step(0)):
            until(lambda: overview(watcher)["worlds"][0]["waits_for"] == ["red"])
            red.step(0)
        watcher.die()
        red.close()
        blue.close()


def test_a_game_that_goes_on_without_players_after_its_timeout_is_seen_to_go_on(process):
    with waiting(lambda number: PICTURE + number % 100, process=process, timeout=0.05) as game:
        env = make_remote(game.url)
        env.reset(seed=1)
        env.close()
        stream = Stream(game.server).join("", role="spectator", frame="png")
        numbers = [look(stream) for _ in range(4)]
        assert numbers == [1, 2, 3, 4]
        stream.die()


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("gateway", [False, True], ids=["own_page", "gateway"])
def test_a_game_that_waits_shows_its_first_picture_and_says_for_whom(gateway):
    with (
        waiting(lambda number: PICTURE) as game,
        launched() as chromium,
        opened_in(chromium) as opened,
        serve_gateway(game.url) as others,
    ):
        page = opened(others.web_url if gateway else game.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        says(page, "#stall", "The game waits for a player")
        assert page.is_hidden("#empty")
        env = make_remote(game.url)
        env.reset(seed=1)
        says(page, "#stall", "The game waits for its agent")
        env.close()
        says(page, "#play", "Play")
        page.click("#play")
        says(page, "#badge", "playing")
        shows(page, "() => document.getElementById('stall').textContent === ''")
        page.keyboard.press("Escape")


@in_browser
@pytest.mark.slow
def test_a_game_without_pictures_says_that_it_is_ready_or_has_not_begun():
    with (
        serve_game(OBSERVATION, ACTION, name="Dots", web=True) as game,
        launched() as chromium,
        opened_in(chromium) as opened,
    ):

        def loop():
            with contextlib.suppress(ClosedError):
                game.exchange(np.zeros(2, np.float32), wait=True)

        page = opened(game.web_url)
        says(page, "#empty", "Dots has not begun.")
        says(page, "#empty-why", "Its program has not called exchange() yet.")
        assert page.is_disabled("#play")
        assert page.is_hidden("#begin")
        with in_thread(loop):
            says(page, "#empty", "Dots is ready.")
            shows(page, "() => !document.getElementById('begin').hidden && !document.getElementById('play').disabled")
            assert page.text_content("#stall") == "", "it is said once"
            game.close()
