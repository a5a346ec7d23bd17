"""A person at the page takes over from a trainer in lock-step: its pace, single steps, and the way back."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Limits, Recording, Web, make_remote, serve_gym
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from tests.browser import TAP, in_browser, keep, says, shows
from tests.inside import let_holds_lapse
from tests.places import ROOT
from tests.support import keeping, until
from tests.web.taking_over import Trainer, take_over
from tests.web_envs import Paddle

pytestmark = [in_browser, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "learn_from_takeover.py"

LET_GO = 'document.dispatchEvent(new KeyboardEvent("keyup", {key: "ArrowRight", bubbles: true}))'
# A key goes down and up in one task of the page, as where a busy machine delivers both late.
TAP_AT_ONCE = """() => {
  const event = (kind) => document.dispatchEvent(new KeyboardEvent(kind, {key: "ArrowRight", bubbles: true}));
  event("keydown");
  event("keyup");
}"""


@contextlib.contextmanager
def taps_on_paddle(opened, monkeypatch):
    """A page that has taken over from a trainer at 2 steps a second, and the trainer."""
    let_holds_lapse(monkeypatch, 30.0)  # a tap waits that long for the trainer's step, on a machine that stalls, too
    with serve_gym(Paddle, web=Web(play_fps=2)) as server, Trainer(server) as trainer:
        page = opened(server.web_url)
        take_over(page)
        until(lambda: trainer.last.get("takeover_fps") == 2)
        yield page, trainer


def test_a_trainer_runs_at_the_pace_of_the_person_and_at_full_speed_again(opened):
    with serve_gym(Paddle, web=Web(play_fps=10)) as server, Trainer(server) as trainer:
        page = opened(server.web_url)
        take_over(page)
        until(lambda: trainer.last.get("takeover_fps") == 10)
        first = len(trainer.steps)
        page.keyboard.down("ArrowLeft")
        until(lambda: trainer.interventions >= 20)
        page.keyboard.up("ArrowLeft")
        kept = trainer.steps[first:]
        assert all(info.get("takeover_fps") == 10 for _, _, info in kept if "intervention" in info)
        # A page that a busy machine keeps quiet for a second slows nobody down: the steps meanwhile are not marked.
        paced = [(sent, arrived) for sent, arrived, info in kept if "takeover_fps" in info]
        # The server makes the steps between these two times, however late the trainer is told. The next step follows
        # one that came late at once.
        assert len(paced) - 2 <= 10 * (paced[-1][1] - paced[0][0])
        page.keyboard.press("Escape")
        until(lambda: "takeover_fps" not in trainer.last)
        first = len(trainer.steps)
        until(lambda: len(trainer.steps) > first + 200)


def test_a_tap_is_one_step_of_the_trainer_s_world(opened, monkeypatch):
    with taps_on_paddle(opened, monkeypatch) as (page, trainer):
        for count in (1, 2, 3):
            taken = page.evaluate(TAP, 30)
            until(lambda count=count: trainer.interventions >= count)
            if taken > 400:  # on a machine that stalls, the key is held for two steps
                return
        seen = len(trainer.steps)
        until(lambda: len(trainer.steps) >= seen + 2)
        assert trainer.interventions == 3
        page.keyboard.press("Escape")


def test_a_tap_that_is_over_before_the_page_looks_again_is_a_step_all_the_same(opened, monkeypatch):
    with taps_on_paddle(opened, monkeypatch) as (page, trainer):
        for count in (1, 2, 3):
            page.evaluate(TAP_AT_ONCE)
            until(lambda count=count: trainer.interventions >= count)
        seen = len(trainer.steps)
        until(lambda: len(trainer.steps) >= seen + 2)
        assert trainer.interventions == 3
        page.keyboard.press("Escape")


def test_a_key_that_is_let_go_and_tapped_at_once_is_a_tap_of_its_own(opened, monkeypatch):
    with taps_on_paddle(opened, monkeypatch) as (page, trainer):
        page.keyboard.down("ArrowRight")
        until(lambda: trainer.interventions >= 1)
        page.evaluate(f"() => {{ {LET_GO}; ({TAP_AT_ONCE})(); }}")
        until(lambda: trainer.interventions >= 2)
        page.keyboard.press("Escape")


def test_a_tap_that_is_over_before_the_next_step_of_a_world_of_one_s_own_acts_in_it(opened):
    make, made = keeping(Paddle)
    with serve_gym(make, web=Web(play_fps=2)) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        until(lambda: made and getattr(made[-1], "steps", 0) > 0)  # it has none before its reset
        for place in (102, 104, 106):
            page.evaluate(TAP_AT_ONCE)
            until(lambda place=place: made[-1].place == place)
        seen = made[-1].steps
        until(lambda: made[-1].steps >= seen + 2)
        assert made[-1].place == 106
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


def test_who_does_nothing_is_counted_down_and_gives_the_seat_back(opened):
    with serve_gym(Paddle, web=True, limits=Limits(takeover_timeout=4.0)) as server, Trainer(server) as trainer:
        page = opened(server.web_url)
        says(page, "#play", "Take over")
        page.click("#play")
        says(page, "#badge", "hold a key, or agent goes on without you in")
        page.keyboard.down("ArrowLeft")
        says(page, "#badge", "you act for agent")
        keep(page, "#badge")
        page.keyboard.up("ArrowLeft")
        says(page, "#message", "nothing was done for takeover_timeout=4 s, so the agent acts again")
        badges = page.evaluate("() => window.kept['#badge']")
        shown = [int(found[1]) for each in badges if (found := re.search(r"goes on without you in (\d) s", each))]
        assert shown == sorted(shown, reverse=True)
        assert shown[-1] < 4, "they are counted down"
        says(page, "#badge", "watching")
        says(page, "#play", "Take over")
        until(lambda: trainer.last == {})


def test_a_trainer_is_told_who_acts_without_what_is_invisible_in_the_name(opened):
    with serve_gym(Paddle, web=Web(play_fps=20)) as server, Trainer(server) as trainer:
        page = opened(server.web_url)
        page.evaluate("() => localStorage.setItem('name', 'An\\u202en\\u001b[31m\\u200b')")
        take_over(page)
        page.keyboard.down("ArrowLeft")
        until(lambda: trainer.interventions > 0)
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Escape")
        told = {info["intervened_by"] for _, _, info in list(trainer.steps) if "intervention" in info}
        assert told == {"Ann[31m"}


@pytest.mark.parametrize("play_fps", [0, 0.5, -1, True, "fast", float("inf")])
def test_a_rate_of_play_that_is_none_is_refused(play_fps):
    with pytest.raises(Exception, match="expected play_fps to be a number of steps a second, 1 or more"):
        serve_gym(Paddle, web=Web(play_fps=play_fps))


def test_a_world_of_one_s_own_runs_at_the_rate_of_play(opened):
    with serve_gym(Paddle, web=Web(play_fps=5)) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        count = "() => Number(document.getElementById('canvas').dataset.pictures)"
        shows(page, f"() => ({count})() > 0")
        began, first = time.monotonic(), page.evaluate(count)
        shows(page, f"() => ({count})() > {first} + 10")
        assert page.evaluate(count) - first - 2 <= 5 * (time.monotonic() - began)
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


def test_an_agent_learns_from_what_a_person_does_at_the_page(opened, tmp_path):
    """The training of the example, with a script at the page that pushes the car where it is going."""
    spec = importlib.util.spec_from_file_location("learn_from_takeover", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    seen = [(np.zeros(2), 0)]
    found = []
    taken_over = threading.Event()

    def look(*looked):
        seen.append(looked)
        taken_over.wait(60)  # alone, the agent would have made all its steps before the page is there

    with serve_gym(example.ENV, web=Web(play_fps=60), record=Recording(tmp_path, observations=True)) as server:

        def train():
            found.append(example.train(server.url, 900, 0, look))

        page = opened(server.web_url)
        page.evaluate("() => localStorage.setItem('name', 'Ann')")
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            says(page, "#play", "Take over")
            page.click("#play")
            says(page, "#badge", "agent acts: hold a key")
            taken_over.set()
            held = None
            while trainer.is_alive():
                observation, step = seen[-1]
                wanted = None if step < 20 else "ArrowRight" if observation[1] >= 0 else "ArrowLeft"
                if wanted != held:
                    if held is not None:
                        page.keyboard.up(held)
                    if wanted is not None:
                        page.keyboard.down(wanted)
                    held = wanted
                page.evaluate("() => new Promise(requestAnimationFrame)")
        finally:
            taken_over.set()
            trainer.join()
    ((curve, taught),) = found
    assert len(curve) == example.PARTS
    assert taught > 200
    episodes = [load_episode(episode) for episode in read_folder(tmp_path).episodes()]
    by = [who for episode in episodes for who in episode.by]
    assert by.count("person:Ann") == taught
    assert by.count("agent:learner") == 900 - taught
    # A person who holds the right keys gets the car up, which an agent alone does not in so few steps.
    assert any(episode.by[-1] == "person:Ann" and len(episode.by) < 200 for episode in episodes[:-1])


def test_a_world_that_is_gone_is_not_taken_over_after_a_reload(opened):
    with serve_gym(Paddle, web=True) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        page = opened(server.web_url)
        says(page, "#play", "Take over")
        page.click("#play")
        says(page, "#badge", "agent acts")
        page.goto("about:blank")
        env.close()
        until(lambda: not server.worlds)
        page.goto(server.web_url)
        says(page, "#message", "The world in which you took over is gone.")
        page.wait_for_selector("#empty")


class Blind(gymnasium.Env):
    """Draws nothing."""

    observation_space = spaces.Box(0, 9, (1,), np.int64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0]), {}

    def step(self, action):
        return np.array([int(action)]), 0.0, False, False, {}


@contextlib.contextmanager
def idle(server):
    """An agent that thinks: it has reset the world, and makes no step."""
    env = make_remote(f"{server.url}?world=")
    env.reset(seed=0)
    yield env
    env.close()


def counted(page):
    """Return a list that gets an entry for each connection of the page from now on: [its messages so far]."""
    sockets = []

    def add(socket):
        count = [0]
        sockets.append(count)
        socket.on("framereceived", lambda _: count.__setitem__(0, count[0] + 1))

    page.on("websocket", add)
    return sockets


@pytest.mark.parametrize("agent", [idle, Trainer], ids=["idle", "stepping"])
@pytest.mark.parametrize("make", [Paddle, Blind])
def test_who_gives_back_takes_over_again(opened, make, agent):
    """In a world that stands still, too, where the answers to who looks on wait for seconds."""
    with serve_gym(make, web=True) as server, agent(server):
        page = opened(server.web_url)
        received = counted(page)
        page.reload()
        waited_for = []
        for _ in range(4):
            says(page, "#play", "Take over")
            says(page, "#badge", "watching")
            # It has joined, knows the keys, and has shown what there is: now it asks for what comes next.
            until(lambda: page.evaluate("() => new Promise(requestAnimationFrame)") and received[-1][0] >= 3)
            watching, before = received[-1], received[-1][0]
            take_over(page)
            waited_for.append(watching[0] - before)
            assert page.text_content("#play") == "Give back"
            page.click("#play")
        if agent is idle:
            assert min(waited_for) == 0, "but for a wait that happens to end then"


def test_a_world_whose_agent_has_left_is_played_not_taken_over(opened):
    with serve_gym(Paddle, web=True) as server:
        with idle(server):
            page = opened(server.web_url)
            take_over(page)
        says(page, "#badge", "agent has left: nothing moves until it is back")
        page.click("#play")
        says(page, "#play", "Play")
        page.click("#play")
        says(page, "#badge", "playing your own world")
        page.keyboard.press("Escape")
        says(page, "#play", "Play")
        until(lambda: server.worlds in ([], [""]))
