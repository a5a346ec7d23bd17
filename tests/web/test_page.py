"""The page in a real browser: what it shows of worlds, and how a person plays."""

from __future__ import annotations

import json
import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import bridge
from bridge import Web, make_parallel_remote, make_remote, serve_gym, serve_parallel
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.browser import KNOWN, PIXEL, TAP, in_browser, keep, said, says, shows
from tests.inside import let_holds_lapse
from tests.support import keeping, read_property, until
from tests.web_envs import PADDLE, Doors, Paddle, Paddles
from tests.websocket_tools import Hand

pytestmark = in_browser

# Until the figures and graphs beside the picture are drawn for the next time, whatever they show.
DRAWN_AGAIN = """() => new Promise((resolve) => {
    const rate = document.getElementById('rate');
    new MutationObserver(resolve).observe(rate, {childList: true, characterData: true, subtree: true});
})"""


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
def test_the_list_marks_the_world_that_is_played_and_the_graph_of_returns_outlasts_another_look(opened):
    inked = """() => {
        const canvas = document.getElementById('returns-graph');
        return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0);
    }"""
    current = "() => document.querySelector('#worlds [aria-current=true]').dataset.world"
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=3), web=True) as server:
        env = make_remote(f"{server.url}?world=")
        page = opened(server.web_url)
        says(page, "#badge", "watching")

        def graph_after_an_episode():
            env.reset()
            for _ in range(3):
                env.step(0)
            return page.evaluate(inked)

        until(graph_after_an_episode)
        before = page.evaluate(current)
        page.click("#worlds button")
        page.evaluate(DRAWN_AGAIN)
        assert page.evaluate(inked)
        env.close()
        says(page, "#play", "Play")
        page.click("#play")
        says(page, "#badge", "playing your own world")
        shows(page, f"() => ({current})() !== {json.dumps(before)}")
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        shows(page, f"() => ({current})() === {json.dumps(before)}")


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


def test_why_a_server_has_ended_is_said_until_it_is_there_again(opened):
    with serve_gym("CartPole-v1", web=True) as server:
        page = opened(server.web_url)
        says(page, "#status", "connected")
    says(page, "#problem", "The server was stopped. It is tried again.")
    says(page, "#status", "the connection was lost; trying again")
    assert page.inner_text("#problem").strip() == "The server was stopped. It is tried again."
    with serve_gym("CartPole-v1", web=True, port=server.port):
        says(page, "#status", "connected")
        shows(page, "() => document.getElementById('problem').hidden || !document.getElementById('problem').innerText")


def test_a_lock_step_server_is_played_in_a_world_of_one_s_own_by_the_keyboard_alone(opened):
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=25), web=True) as server:
        page = opened(server.web_url)
        shows(page, "() => !document.getElementById('play').disabled")
        keep(page, "#announcement")  # the next episode ends a second later
        page.focus("#begin")
        page.keyboard.press("Enter")
        says(page, "#badge", "playing your own world")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        said(page, "#announcement", "Episode 1 ended. Return 25.00.")
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


@pytest.mark.slow
def test_a_world_that_its_agent_has_left_is_shown_and_left_for_one_of_one_s_own(opened):
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=25), web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        env.step(1)
        env.close()
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        chosen = "() => document.querySelector('#worlds [aria-current=true]')?.dataset.world"
        assert page.evaluate(chosen) == ""
        page.click("#play")
        says(page, "#worlds", "● person")
        shows(page, f"() => ({chosen})()?.startsWith('world-')")
        until(lambda: server.status()["viewers"] == 1)  # the own world's: the other one is looked at no more
        page.keyboard.press("Escape")
        shows(page, f"() => ({chosen})() === ''")
        says(page, "#worlds", "1 watching")
        until(lambda: server.status()["viewers"] == 1)
        # It stands still: no step is counted any more.
        shows(page, "() => document.getElementById('steps').textContent === '–'")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_world_that_is_looked_at_shows_nothing_of_the_one_before(opened):
    with serve_gym(lambda render_mode=None: Paddle(render_mode, length=5), web=True) as server, Hand(server) as hand:
        hand.open()  # at once: a server does not wait long for the first word
        env = make_remote(server.url)
        env.reset(seed=0)
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        env.reset(seed=0)  # an episode whose beginning nobody saw has no return
        for _ in range(5):
            env.step(1)
        says(page, "#last-return", "5.00")
        says(page, "#episodes", "1 episode")
        hand.ask(create_world=pb.CreateWorldRequest())
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


class QuickDoors(Doors):
    """The same, made for 40 steps a second; it notes when each was made."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}  # noqa: RUF012
    times: list[float] = []  # noqa: RUF012 - of all of them

    def step(self, action):
        self.times.append(time.monotonic())
        return super().step(action)


def test_a_key_that_stays_down_steps_a_world_that_waits_at_the_rate_that_it_is_made_for(opened):
    times = QuickDoors.times
    times.clear()
    with serve_gym(QuickDoors, web=True) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", "no key: the world waits; held: 40 steps a second")
        page.keyboard.down("ArrowRight")
        # Ten in a second, on a machine that has time for them; four a second are not enough to play.
        until(lambda: any(last - first < 1.0 for first, last in zip(times, times[9:], strict=False)))
        page.keyboard.up("ArrowRight")
        page.keyboard.press("Escape")


@pytest.mark.parametrize(
    ("make", "web", "rate"),
    [(Doors, True, 4), (QuickDoors, Web(play_fps=2.5), 2.5), ("FrozenLake-v1", True, 4), ("CartPole-v1", True, 50)],
    ids=["no rate", "play_fps", "turns", "CartPole"],
)
def test_the_legend_says_how_often_a_key_that_stays_down_acts(opened, make, web, rate):
    with serve_gym(make, web=web) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#legend", f"no key: the world waits; held: {rate} steps a second")


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
        shows(page, "() => document.getElementById('stall').textContent === ''")  # a machine may stall at first
        Stalling.goes.clear()
        try:
            # Each number is there for a second, and a busy machine may show none of it.
            seconds = "Number(/^No picture for (\\d+) s: the world stands still/.exec(stall.textContent)?.[1] ?? 0)"
            shows(page, f"() => {seconds} >= 1")
            first = page.evaluate(f"() => {seconds}")
            shows(page, f"() => {seconds} > {first}")
            page.wait_for_selector("#stall", state="visible")
            # One sentence: what is read aloud is what is seen, without seconds, or it would be read again with each.
            assert page.text_content("#announcement") == ""
            aloud = page.evaluate("""() => [...document.querySelectorAll("#stall :not([aria-hidden])")]
                .map((part) => part.textContent).join("")""")
            assert aloud == "No picture: the world stands still, or the connection does"
            assert page.get_attribute("#stall", "role") == "status"
        finally:
            Stalling.goes.set()
        page.wait_for_selector("#stall", state="hidden")
        shows(page, "() => document.getElementById('stall').textContent === ''")


@pytest.mark.slow
def test_record_is_disabled_while_there_is_no_world_to_record(opened, tmp_path):
    with serve_gym(Paddle, web=True, record=tmp_path) as server:
        page = opened(server.web_url)
        shows(page, "() => !document.getElementById('replays').disabled")
        assert page.is_disabled("#record")
        assert "Press Play" in page.get_attribute("#record", "title")
        page.click("#begin")
        shows(page, "() => !document.getElementById('record').disabled")


@pytest.mark.slow
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
        says(page, "#episodes", "2 episodes")  # these figures come with a picture, the table with the list of worlds
        assert page.inner_text("#last-return") == ""
        assert "mean" not in page.inner_text("#episodes")
        assert page.locator("#worlds button[data-mark=pressed]").count() == 1


@pytest.mark.slow
def test_a_world_that_is_pressed_while_the_list_changes_is_looked_at(opened):
    """A press that is let go at another button is no click, though both look the same: the list changes afterwards."""
    with serve_gym(Paddle, web=True) as server, Hand(server) as hand:
        hand.open()
        for _ in range(2):
            hand.ask(create_world=pb.CreateWorldRequest())
        page = opened(server.web_url)
        page.evaluate(KNOWN)
        button = "#worlds li:nth-child(2) button"
        page.hover(button)
        page.mouse.down()
        hand.ask(create_world=pb.CreateWorldRequest())
        shows(page, "() => known.server.worlds.length === 3")
        page.mouse.up()
        shows(page, f"() => document.querySelector('{button}').ariaCurrent === 'true'")
        shows(page, "() => document.querySelectorAll('#worlds li').length === 3")


@pytest.mark.slow
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
        for _ in range(2):  # nobody saw the beginning of the first one
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


@pytest.mark.slow
def test_a_held_key_takes_over_from_the_agent_and_its_release_gives_back(opened, monkeypatch):
    let_holds_lapse(monkeypatch, 30.0)  # the agent acts while a page is quiet, as on a machine that stalls
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
        says(other, "#play", "Taken")
        assert other.is_disabled("#play")
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


@pytest.mark.slow
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
