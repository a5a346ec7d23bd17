"""The page of a gateway in a real browser: worlds of several servers, lost ones, and PERLERT lobbies."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Auth, make_remote, serve_gym, serve_parallel
from bridge.perlert import serve_perlert
from bridge.testing import CountingEnv
from bridge.web.gateway import serve_gateway
from tests.browser import in_browser, says, shows
from tests.inside import let_holds_lapse
from tests.places import ROOT
from tests.support import server_process, until, world_of
from tests.web_envs import PADDLE, Paddle, Race

pytestmark = [in_browser, pytest.mark.slow]

BRIDGE = "import sys; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"
DRAWN = "() => Number(document.getElementById('canvas').dataset.pictures ?? 0)"


@contextmanager
def bridge_serve(monkeypatch, *arguments, port=0):
    """Run `gymnasium-bridge serve` in a process of its own; yield the process and its URL."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ("tests.web_envs:Paddle", "--port", str(port), "--env-kwargs", "render_mode=rgb_array", *arguments)
    with server_process(BRIDGE, "serve", *options) as (process, line):
        yield process, line.rpartition(" ")[2]


def place(url):
    return url.removeprefix("grpc://")


def choose(page, server):
    page.click(f'#worlds button[data-world^="{server}/"]')


@pytest.mark.slow
def test_one_page_shows_two_servers_one_is_lost_and_comes_back_and_the_other_goes_on(opened, monkeypatch):
    with (
        bridge_serve(monkeypatch, "--fps", "30") as (process, lost),
        bridge_serve(monkeypatch, "--fps", "30") as (_, url),
        serve_gateway([lost, url]) as gateway,
    ):
        page = opened(gateway.web_url)
        says(page, "#status", "connected")
        says(page, "#worlds", place(lost))
        says(page, "#worlds", place(url))
        choose(page, place(lost))
        says(page, "#empty-text", "Paddle is ready")
        page.click("#begin")
        says(page, "#badge", "playing")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        page.keyboard.up("ArrowRight")
        other = opened(gateway.web_url)
        choose(other, place(url))
        other.click("#begin")
        says(other, "#badge", "playing")
        process.kill()
        process.wait(20)
        says(page, "#message", f"{place(lost)} cannot be reached")
        assert place(lost) in page.text_content("#worlds .lost")
        says(page, "#status", "connected")
        before = other.evaluate(DRAWN)
        shows(other, f"() => ({DRAWN})() > {before} + 10")
        with bridge_serve(monkeypatch, "--fps", "30", port=lost.rpartition(":")[2]):
            says(page, "#badge", "playing")
            shows(page, "() => document.getElementById('problem').hidden")
            before = page.evaluate(DRAWN)
            shows(page, f"() => ({DRAWN})() > {before} + 5")
            page.keyboard.down("ArrowLeft")
            shows(page, f"() => ({PADDLE})() < 60")


def test_an_agent_of_a_server_without_a_page_is_watched_and_taken_over_from_through_the_gateway(opened, monkeypatch):
    let_holds_lapse(monkeypatch, 30.0)  # the agent acts while a page is quiet, as on a machine that stalls
    with serve_gym(Paddle, env_kwargs={"render_mode": "rgb_array"}) as server, serve_gateway(server.url) as gateway:
        env = make_remote(f"{server.url}?world=")
        env.reset()
        page = opened(gateway.web_url)
        shows(page, f"() => ({PADDLE})() > 0")
        says(page, "#play", "Take over")
        page.click("#play")
        says(page, "#badge", "agent acts: hold a key")
        page.keyboard.down("ArrowLeft")
        says(page, "#badge", "you act for agent")
        for _ in range(30):
            observation, *_, info = env.step(1)
        assert observation[0] < 60
        assert info["intervened_by"] == page.evaluate("() => localStorage.getItem('name')")
        env.close()


@pytest.mark.slow
def test_a_match_is_played_through_the_gateway(opened):
    served = serve_parallel(Race, web=True, fps=30, match=True, countdown=0.0, agents=lambda observation: 0)
    with served as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        says(page, "#status", "connected")
        page.click("#play")
        says(page, "#badge", "you are upper")
        page.keyboard.press("Enter")
        says(page, "#announcement", "Round 1 has begun.")
        page.keyboard.down("ArrowRight")
        says(page, "#match-title", "You win")


@pytest.mark.slow
def test_one_of_several_environments_is_chosen_through_the_gateway(opened):
    with serve_gym(["CartPole-v1", "MountainCar-v0"], web=True) as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        says(page, "#worlds", place(server.url))
        page.select_option("#env", "MountainCar-v0")
        page.click("#play")
        says(page, "#badge", "playing")
        says(page, "#stage-title", "MountainCar-v0")
        until(lambda: len(server.worlds) == 1)


@pytest.mark.slow
def test_a_lock_step_server_is_played_through_the_gateway_in_a_world_of_one_s_own(opened):
    with serve_gym(Paddle) as server, serve_gateway(server.url) as gateway:  # the world is made with its pictures
        page = opened(gateway.web_url)
        says(page, "#empty-text", "Paddle is ready")
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


class Seen(gymnasium.Env):
    """Draws nothing; what it observes is an image."""

    observation_space = spaces.Box(0, 255, (40, 60, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.full((40, 60, 3), (200, 30, 10), np.uint8), {}

    def step(self, action):
        return np.full((40, 60, 3), (10, 200, 30), np.uint8), 0.0, False, False, {}


def test_a_world_without_pictures_says_so_and_shows_observations_that_are_images(opened):
    with serve_gym(Seen) as server, serve_gateway(server.url) as gateway:
        env = make_remote(f"{server.url}?world=")
        env.reset()
        page = opened(gateway.web_url)
        says(page, "#panel", "This world draws no pictures. Start its server with --web")
        says(page, "#panel", "Its observations are shown")
        pixel = "document.getElementById('canvas').getContext('2d').getImageData(30, 20, 1, 1).data"
        colour = f"() => [...{pixel}].slice(0, 3).join()"
        shows(page, f"() => ({colour})() === '200,30,10'")
        env.step(0)
        shows(page, f"() => ({colour})() === '10,200,30'")
        env.close()


def test_a_world_without_pictures_shows_its_numbers_and_can_be_played(opened):
    with serve_gym(lambda: CountingEnv(10**6)) as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        says(page, "#panel", "Here are the numbers that the agent sees")
        page.keyboard.down("ArrowRight")
        shows(page, "() => Number(document.querySelector('#panel .number:last-child output')?.textContent) > 3")
        page.keyboard.press("Escape")
        env = make_remote(f"{server.url}?world=")
        env.reset()
        says(page, "#badge", "watching")
        says(page, "#panel", "draws no pictures")
        for _ in range(5):
            env.step(env.action_space.sample())
        shows(page, "() => Number(document.querySelector('#panel .number:last-child output')?.textContent) === 5")
        env.close()


def test_a_server_without_an_encoder_for_jpeg_sends_pictures_without_loss(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "PIL", None)  # as where it is not installed
    with serve_gym(Paddle) as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        shows(page, f"() => ({PADDLE})() > 0")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 130")


def test_the_servers_token_never_reaches_the_browser_and_the_gateway_asks_for_its_own(opened, monkeypatch):
    secret = "the-servers-own-secret"
    with (
        serve_gym(Paddle, fps=30, env_kwargs={"render_mode": "rgb_array"}, token=secret) as server,
        serve_gateway(f"{server.url}?token={secret}", token="gateway", auth=Auth(watch_token="guests")) as gateway,
    ):
        page = opened(gateway.web_url)
        came = []
        page.on("websocket", lambda socket: socket.on("framereceived", lambda data: came.append(data)))
        says(page, "#token-problem", "a token is required")
        page.fill("#token", "guests")
        page.keyboard.press("Enter")
        says(page, "#status", "connected")
        page.click("#begin")
        says(page, "#message", "this token is for watching")
        page = opened(f"{gateway.web_url}#token=gateway")
        page.on("websocket", lambda socket: socket.on("framereceived", lambda data: came.append(data)))
        page.click("#begin")
        says(page, "#badge", "playing")
        shows(page, f"() => ({DRAWN})() > 3")
        assert came
        assert not any(secret.encode() in (data if isinstance(data, bytes) else data.encode()) for data in came)


def test_who_may_only_watch_sees_pictures_through_the_gateway(opened):
    tokens = {"token": "gateway", "auth": Auth(watch_token="guests")}
    with (
        serve_gym(Paddle, fps=30, web=True) as server,
        serve_gateway(server.url, **tokens) as gateway,
        make_remote(f"{server.url}?world=") as env,
    ):
        env.reset()
        page = opened(f"{gateway.web_url}#token=guests")
        says(page, "#badge", "watching")
        shows(page, f"() => ({DRAWN})() > 3")


class Guess(gymnasium.Env):
    """An episode of forty steps with the right arrow held, each with the reward 2: without it the episode goes on.

    The page may send the action of no key, the one in the middle, before the key is down.
    """

    length = 40

    observation_space = spaces.Dict(place=spaces.Box(-9, 9, (2,), np.float32))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return {"place": np.zeros(2, np.float32)}, {}

    def step(self, action):
        held = action == 2
        self.steps += held
        over = self.steps >= self.length
        return {"place": np.full(2, self.steps / 10, np.float32)}, 2.0 * held, over, False, {}


class Hasty(Guess):
    """One whose episode is over as fast as CartPole's whose pole nobody balances."""

    length = 10


# Keep for how many milliseconds the page pauses.
PAUSES = """() => {
  const wait = window.setTimeout;
  window.pauses = [];
  window.setTimeout = (then, milliseconds) => {
    window.pauses.push(milliseconds);
    return wait(then, milliseconds);
  };
}"""


def return_of(page, key):
    """Hold a key until the run of a lobby is over; return what it gave."""

    def is_over():
        page.keyboard.down(key)  # again and again, as a keyboard says it
        return page.locator("#panel .result").count()

    until(is_over, 60)
    return float(page.text_content("#panel .result").split("return ")[1].split(" ")[0])


def test_a_person_has_time_for_the_first_key_in_a_lobby(opened):
    """An episode may be over after a third of a second: who is ready sees its start within a frame of the run."""
    with serve_perlert(Hasty, fps=30, port=0, default_action=0) as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        page.evaluate(f"({PAUSES})()")
        page.click('#panel button[data-slot="agent0"]')
        says(page, "#badge", "you are agent0")
        shows(page, "() => pauses.includes(300)")  # nobody is ready
        page.click("#lobby-ready")
        says(page, "#panel", "Simulation will start in")
        page.evaluate("() => { window.pauses = []; }")
        shows(page, "() => pauses.filter((milliseconds) => milliseconds === 1000 / 30).length > 5")
        assert 300 not in page.evaluate("() => pauses")

        assert return_of(page, "ArrowRight") == 20


def test_a_perlert_lobby_is_joined_played_and_its_result_shown_on_the_page(opened):
    with (
        serve_perlert(Guess, fps=20, port=0, countdown=0.0, default_action=0) as server,
        serve_gateway(server.url) as gateway,
    ):
        ann, bob = opened(gateway.web_url), opened(gateway.web_url)
        says(ann, "#worlds", "guess:0")
        says(ann, "#panel", "open")
        ann.fill("#lobby-name", "ann")
        ann.click('#panel button[data-slot="agent0"]')
        says(ann, "#badge", "you are agent0")
        says(bob, "#panel", "ann")
        says(bob, "#worlds", "● agent0")
        assert bob.evaluate("() => document.querySelector('#panel table button')") is None
        ann.click("#lobby-ready")
        says(ann, "#badge", "playing agent0")
        says(ann, "#panel", "PERLERT carries no pictures")
        says(ann, "#legend", "→")
        shows(ann, "() => document.querySelectorAll('#panel .number').length === 2")
        says(ann, "#panel", "place[1]")
        assert return_of(ann, "ArrowRight") == 80
        says(ann, "#announcement", "The run is over")
        ann.keyboard.up("ArrowRight")
        says(ann, "#panel", "Play again")
        ann.click("#lobby-ready")
        says(ann, "#badge", "playing agent0")
        ann.keyboard.press("Escape")  # leaves the slot
        says(bob, "#worlds", "○ agent0")
        says(ann, "#panel", "Register")


def test_who_goes_to_a_lobby_gives_up_the_seat_elsewhere(opened):
    with (
        serve_gym(Paddle, fps=30, env_kwargs={"render_mode": "rgb_array"}) as server,
        serve_perlert(Guess, fps=20, port=0) as lobby,
        serve_gateway([server.url, lobby.url]) as gateway,
    ):
        page = opened(gateway.web_url)
        page.click("#begin")
        says(page, "#badge", "playing")
        page.click('#worlds button[data-world*="guess:0"]')
        says(page, "#panel", "Register")
        shows(page, "() => document.getElementById('play').hidden")
        until(lambda: not any(world_of(server).played.values()))


def test_who_goes_to_a_lobby_before_the_seat_is_there_gives_it_up_once_it_is(opened):
    # Both buttons in one go: the server has not answered yet. The page says when the stream of the seat has ended.
    press = """() => {
      const Real = WebSocket;
      window.WebSocket = class extends Real {
        constructor(...given) {
          super(...given);
          window.WebSocket = Real;
          this.addEventListener("close", () => { window.left = true; });
        }
      };
      document.getElementById("begin").click();
      document.querySelector('#worlds button[data-world*="guess:0"]').click();
    }"""
    with (
        serve_gym(Paddle, fps=30, env_kwargs={"render_mode": "rgb_array"}) as server,
        serve_perlert(Guess, fps=20, port=0) as lobby,
        serve_gateway([server.url, lobby.url]) as gateway,
    ):
        page = opened(gateway.web_url)
        page.wait_for_selector("#begin")
        page.wait_for_selector('#worlds button[data-world*="guess:0"]')
        page.evaluate(press)
        says(page, "#panel", "Register")
        shows(page, "() => window.left")
        assert page.is_hidden("#play")
        until(lambda: not any(world_of(server).played.values()))


def test_a_name_that_a_lobby_cannot_have_is_told(opened):
    with serve_perlert(Guess, fps=20, port=0) as server, serve_gateway(server.url) as gateway:
        page = opened(gateway.web_url)
        says(page, "#panel", "Register")
        page.fill("#lobby-name", "a;b")
        page.click('#panel button[data-slot="agent0"]')
        says(page, "#message", "bad JoinWorld settings")
        says(page, "#panel", "Register")
