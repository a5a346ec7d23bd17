"""The page in a real browser: what it shows of worlds, and how a person plays."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import bridge
from bridge import Auth, make_parallel_remote, make_remote, serve_gym, serve_parallel
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.browser import PIXEL, TAP, in_browser, says, shows
from tests.places import ROOT
from tests.support import keeping, read_property, server_process, until
from tests.web_envs import PADDLE, Doors, Paddle, Paddles
from tests.websocket_tools import Hand

pytestmark = in_browser


def test_the_canvas_shows_the_environment_s_pixels(opened):
    with serve_gym(Paddle, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        page = opened(server.web_url)
        says(page, "#worlds", "Paddle")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        red, green, blue = page.evaluate(PIXEL)
        assert abs(red - 10) < 25
        assert abs(green - 20) < 25
        assert abs(blue - 200) < 25
        before = page.evaluate(PADDLE)
        for _ in range(20):
            env.step(1)
        shows(page, f"() => ({PADDLE})() > {before} + 30")
        assert page.evaluate("() => document.getElementById('canvas').width") == 200
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("fps", [None, 20])
def test_one_of_several_environments_is_chosen_and_played(opened, fps):
    with serve_gym(["CartPole-v1", "MountainCar-v0"], web=True, fps=fps) as server:
        page = opened(server.web_url)
        page.select_option("#env", "MountainCar-v0")
        page.click("#play")
        says(page, "#badge", "playing")
        says(page, "#stage-title", "MountainCar-v0")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        assert json.loads(read_property(server.url, "server.web"))["worlds"][0]["title"] == "MountainCar-v0"
        page.keyboard.press("Escape")
        until(lambda: not server.worlds)
        page.wait_for_function("() => !document.getElementById('env-label').hidden")


def test_a_held_key_moves_the_paddle_and_its_release_stops_it(opened):
    make, made = keeping(Paddle)
    with serve_gym(make, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "→")
        says(page, "#badge", "playing")
        shows(page, f"() => ({PADDLE})() > 0")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        page.keyboard.up("ArrowRight")
        places = [-1, -2]

        def stands():
            places.append(made[-1].place)
            page.wait_for_timeout(100)
            return places[-1] == places[-2]

        until(stands)
        assert 120 < places[-1] < 181
        page.keyboard.down("ArrowLeft")
        shows(page, f"() => ({PADDLE})() < 60")
        page.evaluate("window.dispatchEvent(new Event('blur'))")  # the window loses the keyboard: no key is held
        until(stands)
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        until(lambda: not any(json.loads(read_property(server.url, "server.web"))["worlds"][0]["seats"].values()))


def test_a_lock_step_server_is_played_in_a_world_of_one_s_own_by_the_keyboard_alone(opened):
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=25), web=True) as server:
        page = opened(server.web_url)
        shows(page, "() => !document.getElementById('play').disabled")
        page.focus("#begin")
        page.keyboard.press("Enter")
        says(page, "#badge", "playing your own world")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        says(page, "#announcement", "Episode 1 ended. Return 25.00.")
        assert page.get_attribute("#announcement", "aria-live") == "polite"
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


def test_stopping_in_a_world_of_one_s_own_leaves_no_world_and_no_error(opened):
    with serve_gym(Paddle, web=True) as server:
        page = opened(server.web_url)
        says(page, "#stage-title", "Paddle")  # of the server, while there is no world
        page.click("#begin")
        says(page, "#worlds", "● person")
        page.keyboard.press("Escape")
        page.wait_for_selector("#no-worlds")
        page.wait_for_selector("#empty")
        assert page.text_content("#message") == ""


def test_a_double_click_on_play_asks_for_one_seat(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url)
        shows(page, "() => !document.getElementById('play').disabled")
        page.evaluate("() => { document.getElementById('play').click(); document.getElementById('play').click(); }")
        says(page, "#badge", "playing")
        before = page.evaluate("() => Number(document.getElementById('canvas').dataset.pictures ?? 0)")
        shows(page, f"() => document.getElementById('canvas').dataset.pictures > {before} + 5")
        assert page.text_content("#message") == ""
        page.reload()  # the seat is remembered
        says(page, "#badge", "playing")


def test_a_world_that_is_looked_at_shows_nothing_of_the_one_before(opened):
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=5), web=True) as server, Hand(server) as hand:
        env = make_remote(server.url)
        env.reset(seed=0)
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        for _ in range(5):
            env.step(1)
        says(page, "#last-return", "5.00")
        says(page, "#episodes", "1 episode")
        hand.open().ask(create_world=pb.CreateWorldRequest())
        page.click("#worlds li:nth-child(2) button")  # nobody has reset it: there is no picture
        shows(page, "() => document.querySelector('#worlds li:nth-child(2) button').ariaCurrent === 'true'")
        assert page.text_content("#last-return") == "–"
        assert page.text_content("#episodes") == ""
        assert page.evaluate(PIXEL) == [0, 0, 0]
        env.close()
        shows(page, "() => document.querySelectorAll('#worlds li').length === 1")
        page.click("#play")  # in a world of one's own
        says(page, "#badge", "playing")
        shows(page, f"() => ({PIXEL})()[2] > 100")
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        assert page.evaluate(PIXEL) == [0, 0, 0]


class HeldPaddle(Paddle):
    """Its step waits until it is let go."""

    entered, let_go = threading.Event(), threading.Event()

    def step(self, action):
        self.entered.set()
        assert self.let_go.wait(60)
        return super().step(action)


def test_an_answer_that_comes_after_the_person_stopped_is_not_shown(opened):
    with serve_gym(HeldPaddle, web=True) as server, Hand(server) as hand:
        hand.open().ask(create_world=pb.CreateWorldRequest())  # nobody has reset it: there is no picture
        page = opened(server.web_url)
        sockets = []
        page.on("websocket", lambda socket: sockets.append(socket))
        page.click("#play")  # in a world of one's own
        says(page, "#badge", "playing")
        own = sockets[-1]
        shows(page, f"() => ({PIXEL})()[2] > 100")
        assert HeldPaddle.entered.wait(60)
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        assert page.evaluate(PIXEL) == [0, 0, 0]
        with own.expect_event("close"):  # after the answer to that step
            HeldPaddle.let_go.set()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate(PIXEL) == [0, 0, 0]


class Reading(gymnasium.Env):
    """Draws nothing; its observations have a text."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Dict({"word": spaces.Text(10), "page": spaces.Discrete(9)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"word": "hello", "page": 2}, {}

    def step(self, action):
        return {"word": "goodbye", "page": 3}, 0.0, False, False, {}


def test_texts_among_observations_are_shown_as_they_are(opened):
    with serve_gym(Reading, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        page = opened(server.web_url)
        says(page, "#panel", "numbers that the agent sees")

        def is_told():
            env.step(0)
            return "goodbye" in page.inner_text("#panel")

        until(is_told)
        assert "NaN" not in page.inner_text("#panel")
        assert "--web" not in page.inner_text("#panel"), "the server has it already"
        env.close()


def test_a_lock_step_world_in_which_no_action_does_nothing_waits_for_a_key(opened):
    Doors.done.clear()
    with serve_gym(Doors, web=True) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "no key: the world waits")
        page.keyboard.down("ArrowRight")
        until(lambda: len(Doors.done) > 5)
        page.keyboard.up("ArrowRight")
        assert set(Doors.done) == {1}, "only what the person did"
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [1, 30, 60, 120, 200])
def test_a_tap_is_one_step_of_a_turn_based_world(opened, milliseconds):
    Doors.done.clear()
    with serve_gym(Doors, web=True) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "no key: the world waits")
        taken = [page.evaluate(TAP, milliseconds) for _ in range(3)]
        page.keyboard.press("ArrowLeft")
        until(lambda: 0 in Doors.done)
        if max(taken) < 400:  # on a machine that stalls, a key that stays down for half a second repeats
            assert Doors.done == [1, 1, 1, 0]


class Stalling(Paddle):
    """Stands still while `goes` is cleared."""

    goes = threading.Event()

    def step(self, action):
        self.goes.wait(60)
        return super().step(action)


@pytest.mark.slow
def test_a_real_time_world_that_stands_still_is_said_with_its_age(opened):
    Stalling.goes.set()
    with serve_gym(Stalling, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.click("#begin")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        assert page.is_hidden("#stall")
        assert page.text_content("#stall") == ""
        Stalling.goes.clear()
        try:
            says(page, "#stall", "No picture for 2 s: the world stands still")
            assert page.is_visible("#stall")
            says(page, "#stall", "No picture for 3 s")
            # One sentence: what is read aloud is what is seen, without seconds, or it would be read again with each.
            assert page.text_content("#announcement") == ""
            aloud = page.evaluate("""() => [...document.querySelectorAll("#stall :not([aria-hidden])")]
                .map((part) => part.textContent).join("")""")
            assert aloud == "No picture: the world stands still, or the connection does"
            assert page.get_attribute("#stall", "role") == "status"
        finally:
            Stalling.goes.set()
        shows(page, "() => document.getElementById('stall').textContent === ''")
        assert page.is_hidden("#stall")


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


def test_record_is_disabled_while_there_is_no_world_to_record(opened, tmp_path):
    with serve_gym(Paddle, web=True, record=tmp_path) as server:
        page = opened(server.web_url)
        shows(page, "() => !document.getElementById('replays').disabled")
        assert page.is_disabled("#record")
        assert "Press Play" in page.get_attribute("#record", "title")
        page.click("#begin")
        shows(page, "() => !document.getElementById('record').disabled")


def test_the_page_shows_the_return_of_each_of_several_agents(opened):
    with serve_parallel(Paddles, web=True) as server:
        env = make_parallel_remote(f"{server.url}?world=")
        env.reset(seed=0)
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        says(page, "#worlds", "1 watching")
        # Whoever presses it meanwhile gets a click only if it is not replaced.
        page.evaluate("() => { document.querySelector('#worlds button').dataset.mark = 'pressed'; }")
        for _ in range(2):
            env.reset(seed=0)
            while env.agents:
                env.step(dict.fromkeys(env.agents, 1))
        says(page, "#seat-returns-rows", "upper")
        rows = page.locator("#seat-returns-rows tr").all_inner_texts()
        assert [row.split() for row in rows] == [[seat, "1.00", "1.00"] for seat in ("upper", "lower", "third")]
        assert page.is_hidden("#returns-graph")
        assert page.inner_text("#last-return") == ""
        says(page, "#episodes", "2 episodes")
        assert "mean" not in page.inner_text("#episodes")
        assert page.locator("#worlds button[data-mark=pressed]").count() == 1


def test_a_sum_of_several_agents_returns_is_never_shown(opened):
    with serve_parallel(Paddles, web=True) as server:
        env = make_parallel_remote(f"{server.url}?world=")
        env.reset(seed=0)
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        # Written down at each change, for it stood there only until the seats were read again.
        page.evaluate("""() => {
            window.seen = [];
            const text = (id) => document.getElementById(id).textContent;
            const write = () => window.seen.push(text("last-return"), text("episodes"));
            new MutationObserver(write).observe(document.body, {subtree: true, childList: true, characterData: true});
        }""")
        while env.agents:
            env.step(dict.fromkeys(env.agents, 1))
        env.reset(seed=0)
        says(page, "#seat-returns-rows", "upper")
        says(page, "#episodes", "1 episode")
        seen = page.evaluate("() => window.seen")
        assert not [text for text in seen if "mean" in text or "3.00" in text], seen
        env.close()


@pytest.mark.slow
def test_two_browsers_and_an_agent_play_a_match_to_its_end(opened):
    with serve_parallel(Paddles, web=True, fps=30) as server:
        agent = make_remote(f"{server.url}?world=", agent="third")
        agent.reset()
        playing = threading.Event()
        steps = []

        def play():
            while not playing.is_set():
                steps.append(agent.step(1))
                if steps[-1][2] or steps[-1][3]:
                    agent.reset()

        thread = threading.Thread(target=play)
        thread.start()
        try:
            pages = []
            for seat in ("upper", "lower"):
                page = opened(server.web_url)
                says(page, "#worlds", f"○ {seat}")
                page.select_option("#seat", seat)
                page.click("#play")
                says(page, "#badge", f"playing {seat}")
                pages.append(page)
            for page in pages:
                page.keyboard.down("ArrowRight")
            for page in pages:
                says(page, "#announcement", "ended. Return 1.00.")
            says(pages[0], "#worlds", "● third")
        finally:
            playing.set()
            thread.join(20)
            agent.close()
        assert any(step[2] and step[1] == 1.0 for step in steps)


def test_a_held_key_takes_over_from_the_agent_and_its_release_gives_back(opened):
    with serve_gym(Paddle, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset()
        page, other = opened(server.web_url), opened(server.web_url)
        says(page, "#play", "Take over")
        page.click("#play")
        says(page, "#badge", "agent acts: hold a key")
        assert "intervention" not in env.step(1)[4]
        page.keyboard.down("ArrowLeft")
        says(page, "#badge", "you act for agent")
        for _ in range(30):
            observation, *_, info = env.step(1)
        assert observation[0] < 60
        assert info["intervened_by"] == page.evaluate("() => localStorage.getItem('name')")
        shows(page, f"() => ({PADDLE})() < 60")
        says(other, "#play", "Take over")
        other.click("#play")
        says(other, "#message", "has the seat already")
        page.keyboard.up("ArrowLeft")
        says(page, "#badge", "agent acts")
        assert "intervention" not in env.step(1)[4]
        page.keyboard.down("ArrowLeft")
        says(page, "#badge", "you act for agent")
        env.close()
        says(page, "#badge", "agent has left")
        page.click("#play")
        says(page, "#badge", "watching")


@pytest.mark.slow
def test_a_wrong_token_is_told_and_the_right_one_goes_on(opened):
    with serve_gym(Paddle, web=True, fps=30, token="right-token") as server:
        page = opened(f"{server.web_url}#token=wrong")
        says(page, "#token-problem", "the token is wrong")
        assert "wrong" not in page.url
        page.fill("#token", "right-token")
        page.keyboard.press("Enter")
        says(page, "#status", "connected")
        assert page.evaluate("() => sessionStorage.getItem('token')") == "right-token"
        page = opened(f"{server.web_url}#token=right-token")
        says(page, "#status", "connected")
        page.reload()
        says(page, "#status", "connected")  # from this tab's memory
        page = opened(server.web_url)
        says(page, "#token-problem", "a token is required")
        assert "BRIDGE_TOKEN" not in page.inner_text("#token-problem"), "which is for programs"
        page.goto(f"{server.web_url}#token=right-token")  # the link is opened in the same tab
        says(page, "#status", "connected")
        assert "right" not in page.url


def test_the_age_of_a_picture_counts_its_way_through_the_network(opened):
    late = """() => {
      const Real = WebSocket;
      window.WebSocket = class extends Real {
        set onmessage(listener) { super.onmessage = (event) => setTimeout(() => listener(event), 800); }
      };
    }"""
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened("about:blank")
        page.add_init_script(f"({late})()")
        page.goto(server.web_url)
        page.click("#begin")
        shows(page, "() => parseFloat(document.getElementById('age').textContent) >= 400")


def test_the_page_works_where_the_browser_blocks_storage(opened):
    blocked = """() => { for (const kind of ["localStorage", "sessionStorage"])
      Object.defineProperty(window, kind, {get() { throw new DOMException("blocked", "SecurityError"); }}); }"""
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened("about:blank")
        page.add_init_script(f"({blocked})()")
        page.goto(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing")


def test_a_token_for_looking_on_does_not_play(opened):
    tokens = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}
    with serve_gym(Paddle, web=True, fps=30, **tokens) as server:
        env = make_remote(f"{server.url}?world=", token="for-players")
        env.reset()
        page = opened(f"{server.web_url}#token=for-watchers")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        page.click("#play")
        says(page, "#message", "this token is for watching")
        env.close()
        says(page, "#play", "Play")
        page.click("#play")
        says(page, "#message", "this token is for watching")


def test_the_page_of_another_server_is_refused_in_words(opened, tmp_path):
    """The same page, of a foreign origin, whose script connects to our server."""
    with serve_gym(Paddle, web=True, fps=30) as server:
        folder = Path(bridge.__file__).parent / "web" / "page"
        for file in folder.iterdir():
            text = file.read_text(encoding="utf-8")
            (tmp_path / file.name).write_text(
                text.replace("${location.host}${PATH}", f"127.0.0.1:{server.port}${{PATH}}")
            )

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(tmp_path))

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as foreign:
            thread = threading.Thread(target=foreign.serve_forever)
            thread.start()
            page = opened(f"http://127.0.0.1:{foreign.server_address[1]}/index.html")
            says(page, "#message", "serves its own page only")
            page.close()
            foreign.shutdown()
            thread.join(20)


SERVER = """
import sys
from bridge import serve_gym
from tests.web_envs import Paddle
server = serve_gym(Paddle, web=True, fps=30, port=int(sys.argv[1]))
print(server.web_url, flush=True)
server.wait(grace=0.0)
"""


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_is_met_again_and_the_game_goes_on(opened, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with server_process(SERVER, "0") as (process, url):
        page = opened(url)
        page.click("#begin")
        says(page, "#badge", "playing")
        shows(page, "() => [...document.querySelectorAll('.who')].some((who) => who.textContent.includes('●'))")
        process.kill()
        process.wait(20)
        says(page, "#status", "trying again")
        says(page, "#message", "The connection was lost")
        says(page, "#play", "Play")
        with server_process(SERVER, url.rpartition(":")[2].strip("/")):
            says(page, "#status", "connected")
            says(page, "#badge", "playing")
            before = page.evaluate("() => Number(document.getElementById('canvas').dataset.pictures ?? 0)")
            shows(page, f"() => document.getElementById('canvas').dataset.pictures > {before} + 5")
            shows(page, "() => document.getElementById('problem').hidden")


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_said_to_be_silent(opened, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with server_process(SERVER, "0") as (process, url):
        page = opened(url)
        says(page, "#status", "connected")
        process.send_signal(signal.SIGSTOP)
        says(page, "#status", "the server does not answer")
        process.send_signal(signal.SIGCONT)
        says(page, "#status", "connected")


def test_a_seat_that_somebody_took_a_moment_ago_is_refused_in_words_for_people(opened):
    stale = """() => {
      const parse = JSON.parse;
      let kept;
      JSON.parse = (text) => {
        const said = parse(text);
        return !said?.worlds ? said : window.stale ? kept : (kept = said);
      };
    }"""
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened("about:blank")
        page.add_init_script(f"({stale})()")
        page.goto(server.web_url)
        shows(page, "() => !document.getElementById('play').disabled")
        page.evaluate("() => { window.stale = true; }")
        env = make_remote(f"{server.url}?world=")
        env.reset()
        page.click("#play")
        says(page, "#message", "Somebody else has the seat already.")
        env.close()


def test_a_connection_that_died_without_a_word_is_replaced(opened):
    dying = """() => {
      const [Real, wait] = [WebSocket, setTimeout];
      window.setTimeout = (then, time) => wait(then, time === 15000 ? 500 : time);
      window.networks = 0;
      window.WebSocket = class extends Real {
        network = window.networks;
        set onmessage(listener) { super.onmessage = (event) => this.network === window.networks && listener(event); }
      };
    }"""
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened("about:blank")
        page.add_init_script(f"({dying})()")
        page.goto(server.web_url)
        page.click("#begin")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        page.evaluate("() => { window.networks += 1; }")  # as where a phone leaves the Wi-Fi
        before = page.evaluate("() => Number(document.getElementById('canvas').dataset.pictures)")
        shows(page, f"() => document.getElementById('canvas').dataset.pictures > {before} + 5")
        says(page, "#badge", "playing")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 150")


def test_the_seats_of_many_agents_are_counted(opened):
    class Crowd(Paddles):
        possible_agents = ("upper", "lower", "third", *map(str, range(9)))

    with serve_parallel(Crowd, web=True, fps=20) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing")
        name = page.evaluate("() => localStorage.getItem('name')")
        says(page, "#worlds", f"● upper: {name}1 of 12 seats taken")
        assert page.locator("#worlds .chip").count() <= 3


def test_lanes_are_a_mosaic_of_those_that_are_chosen(opened):
    with serve_gym(Paddle, web=True, num_envs=4) as server:
        envs = bridge.make_vec_remote(f"{server.url}?world=")
        envs = bridge.wrappers.BlockingReset(envs)
        envs.reset(seed=0)
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').width === 402")
        page.fill("#lanes", "1,2")
        page.keyboard.press("Enter")
        envs.step(np.zeros(4, np.int64))
        shows(page, "() => document.getElementById('canvas').height === 150")
        page.fill("#lanes", "first")
        page.keyboard.press("Enter")
        says(page, "#message", "Expected numbers of lanes, such as 0-15 or 1,4: all are shown.")
        envs.close()


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


def test_at_a_phone_s_width_everything_fits_and_fingers_can_play(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, has_touch=True, is_mobile=True)
        page.set_viewport_size({"width": 390, "height": 844})
        page.click("#begin")
        says(page, "#pad", "→")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        for name in ("left", "right"):  # waits until the button is visible and does not move
            page.locator(f"#pad button[data-key={name}]").click(trial=True)
        left, right = page.evaluate("""() => ["left", "right"].map((name) =>
            document.querySelector(`#pad button[data-key=${name}]`).getBoundingClientRect().toJSON())""")
        assert left["x"] + left["width"] < right["x"]
        assert left["y"] == right["y"]
        page.mouse.move(right["x"] + 20, right["y"] + 20)
        page.mouse.down()
        shows(page, f"() => ({PADDLE})() > 130")
        page.mouse.move(left["x"] + 20, left["y"] + 20)  # slides to the next button
        shows(page, f"() => ({PADDLE})() < 70")
        assert page.locator("#pad button.held").all_inner_texts() == ["←"]
        page.mouse.up()
        shows(page, "() => !document.querySelector('#pad button.held')")


def test_the_page_asks_no_other_host_for_anything_and_has_all_that_it_names(opened, browser):
    with serve_gym(Paddle, web=True, fps=30) as server:
        context = browser.new_context()
        page = context.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda response: asked.append(response.status))
        page.goto(server.web_url)
        says(page, "#status", "connected")
        context.close()
        urls = [item for item in asked if isinstance(item, str)]
        assert len(urls) >= 6
        assert all(f"//127.0.0.1:{server.port}/" in url for url in urls)
        assert {item for item in asked if isinstance(item, int)} <= {200, 101}
        assert json.dumps(urls).count("app.js") == 1
        assert os.path.basename(urls[0]) == ""


CONTRASTS = """() => {
  const pixel = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const context = pixel.getContext("2d", {willReadFrequently: true});
  const light = (colors) => {
    context.clearRect(0, 0, 1, 1);
    for (const color of colors) {
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
    }
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  return [...document.querySelectorAll("body *")].flatMap((element) => {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !element.checkVisibility() || element.disabled) return [];
    const behind = [];
    for (let one = element; one; one = one.parentElement) {
      if (getComputedStyle(one).backgroundImage !== "none") return [];
      behind.unshift(getComputedStyle(one).backgroundColor);
    }
    const [back, front] = [light(behind), light([...behind, getComputedStyle(element).color])];
    const contrast = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
    return [[`${element.id || element.className || element.tagName}: ${element.textContent.slice(0, 20)}`, contrast]];
  });
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(opened, scheme):
    with serve_gym(Paddle, fps=20, web=True) as server:
        page = opened(server.web_url, color_scheme=scheme)
        page.get_by_role("button", name="Play", exact=True).first.click()
        says(page, "#badge", "playing")
        shows(page, "() => document.querySelector('.chip.on') !== null")
        found = dict(page.evaluate(CONTRASTS))
        assert any(name.startswith("chip on") for name in found)
        assert any(name.startswith("badge") for name in found)
        assert {name: contrast for name, contrast in found.items() if contrast < 4.5} == {}


def test_assistive_technology_finds_named_buttons_for_actions_and_holds_them_by_clicks(opened):
    with serve_gym(Paddle, fps=20, web=True) as server:
        page = opened(server.web_url)
        page.get_by_role("button", name="Help").click()
        page.get_by_label("Show buttons for actions").check()
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Play", exact=True).first.click()
        pad = page.get_by_role("group", name="Buttons for actions")
        right = pad.get_by_role("button", name="(right)")
        right.wait_for()
        assert right.get_attribute("aria-pressed") == "false"
        right.focus()
        page.keyboard.press("Enter")
        assert right.get_attribute("aria-pressed") == "true"
        page.keyboard.press("Enter")
        assert right.get_attribute("aria-pressed") == "false"


def test_a_question_mark_opens_help_with_the_keys_of_the_world(opened):
    with serve_gym(Paddle, fps=20, web=True) as server:
        page = opened(server.web_url)
        page.get_by_role("button", name="Play", exact=True).first.click()
        says(page, "#legend", "→")
        page.keyboard.down("ArrowRight")
        shows(page, "() => document.querySelector('kbd.held') !== null")
        page.keyboard.press("?")
        says(page, "#help-keys", "→")
        assert page.evaluate("() => document.querySelector('kbd.held')") is None
        page.keyboard.press("Escape")
        shows(page, "() => !document.getElementById('help').open")
        says(page, "#badge", "playing")


def test_fullscreen_has_the_picture_and_its_buttons(opened):
    with serve_gym(Paddle, fps=20, web=True) as server:
        page = opened(server.web_url)
        page.get_by_role("button", name="Fullscreen").click()
        shows(page, "() => document.fullscreenElement?.id === 'stage'")
        page.get_by_role("button", name="Fullscreen").click()
        shows(page, "() => document.fullscreenElement === null")


def test_a_picture_costs_one_drawing_of_the_page_and_no_new_layout(opened):
    """It asked for a frame of the browser to be decoded in, and wrote a figure: the page was drawn twice for each."""
    with serve_gym(Paddle, web=True, fps=60) as server:
        page = opened("about:blank")
        page.add_init_script("""
          window.frames_asked = window.ages = 0;
          const ask = window.requestAnimationFrame.bind(window);
          window.requestAnimationFrame = (then) => { window.frames_asked += 1; return ask(then); };
        """)
        page.goto(server.web_url)
        page.click("#begin")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        before = page.evaluate("""() => {
          const canvas = document.getElementById("canvas");
          window.count = () => [window.ages, window.frames_asked, Number(canvas.dataset.pictures)];
          new MutationObserver((all) => { window.ages += all.length; })
            .observe(document.getElementById("age"), {childList: true, characterData: true, subtree: true});
          return window.count();
        }""")
        # Looked at by a clock: Playwright asks for frames otherwise.
        page.wait_for_function(f"() => window.count()[2] > {before[2]} + 90", polling=100)
        ages, asked, pictures = (now - then for now, then in zip(page.evaluate("window.count()"), before, strict=True))
        assert ages < pictures / 2
        assert asked == 0
