"""The page's Record and Replay in a real browser, as `tests/web/test_page.py` has one."""

from __future__ import annotations

import numpy as np
import pytest

from bridge import Auth, Recording, make_remote, make_vec_remote, serve_gym
from bridge.recording.reader import RecordedEpisode, read_folder
from bridge.recording.replay import verify
from bridge.wrappers import BlockingReset
from tests.browser import in_browser, keep, said, says, shows
from tests.inside import let_holds_lapse
from tests.support import until, world_of
from tests.web_envs import PADDLE, Paddle

pytestmark = [in_browser, pytest.mark.slow]
SEEK = """(step) => {
  const bar = document.getElementById("player-seek");
  bar.value = String(step);
  bar.dispatchEvent(new Event("input"));
  bar.dispatchEvent(new Event("change"));
}"""


def tool(page, name):
    """Press a tool of the bar, which a narrow one has behind a button."""
    if page.is_visible("#more"):
        page.click("#more")
    page.click(f"#{name}")


def short_paddle(render_mode=None):
    return Paddle(render_mode, length=45)


def recorded(folder) -> list[RecordedEpisode]:
    """The episodes with steps of a folder, which may have no file yet."""
    files = [*folder.glob("*.parquet"), *folder.glob("*.arrow")]
    return [episode for episode in read_folder(folder).episodes() if episode.length] if files else []


def places(episode) -> list[int]:
    """Where the paddle is at each step of a recorded episode."""
    found = [100]
    for action in episode.stream.samples("action", episode.own[1:]):
        found.append(int(np.clip(found[-1] + 2 * int(action), 20, 180)))
    return found


def test_a_list_that_is_still_being_read_does_not_ask_again_what_was_chosen(opened, tmp_path):
    def still_read(socket):
        server = socket.connect_to_server()
        server.on_message(lambda data: socket.send(data.replace(b'"reading": false', b'"reading": true ')))

    with serve_gym(short_paddle, web=True, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        while not env.step(0)[2]:
            pass
        env.close()
        until(lambda: recorded(tmp_path))
        page = opened("about:blank")
        page.route_web_socket("**/*", still_read)
        page.goto(server.web_url)
        page.click("#replays")
        page.wait_for_selector("[data-episode]")
        page.evaluate("""() => {
          window.said = [];
          const hint = document.getElementById("recordings-hint");
          new MutationObserver(() => window.said.push(hint.textContent)).observe(hint, {childList: true});
          document.querySelector("[data-episode]").click();
        }""")
        says(page, "#badge", "replay")
        assert page.evaluate("() => window.said") == ["Preparing the replay…"]


@pytest.mark.slow
def test_a_person_s_episode_is_recorded_and_replayed_pixel_for_pixel(opened, tmp_path):
    with serve_gym(short_paddle, web=True, record=tmp_path) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        says(page, "#record-text", "Recording")
        page.keyboard.down("ArrowRight")
        shows(page, f"() => ({PADDLE})() > 110")
        keep(page, "#announcement")
        said(page, "#announcement", "ended. Return 45.00.")
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])
        name = page.evaluate("() => localStorage.getItem('name')")
        # On a machine that stalls, an episode may be over before the key is down.
        moved = lambda: [one for one in recorded(tmp_path) if one.end == "terminated" and places(one)[-1] > 110]  # noqa: E731
        until(moved)
        episode = moved()[0]
        assert episode.players == [f"person:{name}"]
        assert verify(episode, short_paddle).ok, "the page seeds what it begins"
        path = places(episode)

        page.click("#replays")
        row = f"[data-episode='{episode.id}']"
        page.wait_for_selector(row)
        says(page, row, name)
        says(page, row, f"{episode.length} steps")
        page.click(row)
        says(page, "#badge", "replay")
        says(page, "#player-about", name)
        shows(page, f"() => ({PADDLE})() > 0")
        page.wait_for_function("() => document.getElementById('player-play').dataset.icon === 'play'")
        says(page, "#player-position", f"{episode.length} / {episode.length}")  # it stands still at its end
        for step in (episode.length, 0, 7, 30, 12):
            page.evaluate(SEEK, step)
            says(page, "#player-position", f"{step} / ")
            shows(page, f"() => Math.abs(({PADDLE})() - {path[step]}) < 2")
        # Play goes on from there, pause stands still.
        page.select_option("#player-speed", "0.25")
        page.click("#player-play")
        # By the page itself: the replay is over after some seconds.
        position = "parseInt(document.getElementById('player-position').textContent)"
        shows(page, f"() => {position} > 13 && (document.getElementById('player-play').click(), true)")
        page.wait_for_function("() => document.getElementById('player-play').dataset.icon === 'play'")
        position = page.evaluate(f"() => {position}")
        assert 13 < position < episode.length
        shows(page, f"() => Math.abs(({PADDLE})() - {path[position]}) < 2")
        assert page.is_hidden("#play")
        assert page.is_hidden("#record")
        page.click("#player-close")
        assert page.evaluate("() => document.activeElement.id") == "replays"
        says(page, "#empty-text", "is ready")
        page.wait_for_selector("#player", state="hidden")
        until(lambda: server.status()["slots"] == 0)


def test_recording_is_switched_on_and_off_for_a_world(opened, tmp_path):
    with serve_gym(Paddle, web=True, record=tmp_path) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=1)
        page = opened(server.web_url)
        says(page, "#record-text", "Recording")
        assert page.get_attribute("#record", "aria-pressed") == "true"
        says(page, "#worlds", "● rec")
        page.click("#record")
        says(page, "#announcement", "Recording is off")
        assert world_of(server).properties().get("world.recording") == "off"
        page.wait_for_function("() => document.getElementById('record').getAttribute('aria-pressed') === 'false'")
        page.click("#record")
        says(page, "#announcement", "Recording is on")
        assert world_of(server).properties().get("world.recording") == "on"
        env.close()


def test_what_was_said_of_a_world_s_recording_goes_with_the_world(opened, tmp_path):
    with serve_gym(Paddle, web=True, record=tmp_path) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#record-text", "Recording")
        page.click("#record")
        says(page, "#announcement", "Recording is off")
        page.click("#play")  # the world ends, and the next one is recorded
        page.wait_for_function("() => document.getElementById('announcement').textContent === ''")


def test_the_title_of_the_recordings_is_not_broken_in_its_words_on_a_phone(opened, tmp_path):
    with serve_gym(Paddle, web=True, record=tmp_path) as server:
        page = opened(server.web_url)
        page.set_viewport_size({"width": 320, "height": 568})
        page.click("#more")
        page.click("#replays")
        title = page.locator("#recordings-title")
        lines = "(node) => node.offsetHeight / parseFloat(getComputedStyle(node).fontSize)"
        assert title.evaluate(lines) < 2  # one line
        inside = "(node) => node.scrollWidth <= node.clientWidth"
        assert page.locator("#recordings").evaluate(inside)


def test_a_server_that_records_nothing_says_how_to_have_it_record(opened):
    with serve_gym(Paddle, web=True) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset()
        page = opened(server.web_url)
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 0")
        for button in ("#record", "#replays"):
            page.wait_for_function("id => document.querySelector(id).title.includes('--record FOLDER')", arg=button)
            assert page.is_disabled(button)
        env.close()


@pytest.mark.slow
def test_a_token_for_looking_on_switches_nothing_and_shows_nothing(opened, tmp_path):
    tokens = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}
    with serve_gym(Paddle, web=True, record=tmp_path, **tokens) as server:
        env = make_remote(f"{server.url}?world=", token="for-players")
        env.reset(seed=1)
        for _ in range(5):
            env.step(1)
        page = opened(f"{server.web_url}#token=for-watchers")
        says(page, "#record-text", "Recording")
        page.click("#record")
        says(page, "#message", "this token is for watching")
        assert world_of(server).properties().get("world.recording") == "on"
        until(lambda: recorded(tmp_path))
        page.click("#replays")
        page.click("#recordings-list button")
        says(page, "#recordings-hint", "this token is for watching")
        env.close()


@pytest.mark.slow
def test_one_lane_of_a_mosaic_is_taken_over_and_recorded_so(opened, tmp_path, monkeypatch):
    let_holds_lapse(monkeypatch, 30.0)  # the agent acts while a page is quiet, as on a machine that stalls
    with serve_gym(Paddle, web=True, num_envs=4, record=tmp_path) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world=", player="agent:PPO"))
        envs.reset(seed=0)
        page = opened(server.web_url)
        page.select_option("#seat", "lane 2")
        page.click("#play")
        says(page, "#badge", "lane 2 acts: hold a key")
        page.keyboard.down("ArrowLeft")
        says(page, "#badge", "you act for lane 2")
        for _ in range(5):
            observations, *_, infos = envs.step(np.ones(4, np.int64))
        assert infos["intervention"].tolist() == [False, False, True, False]
        assert observations.reshape(-1).tolist() == [110, 110, 90, 110]
        name = page.evaluate("() => localStorage.getItem('name')")
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Escape")
        envs.close()
    who = {episode.lane: episode.players for episode in read_folder(tmp_path).episodes()}
    assert who == {0: ["agent:PPO"], 1: ["agent:PPO"], 2: [f"person:{name}"], 3: ["agent:PPO"]}


def test_at_a_phone_s_width_the_bar_and_the_list_fit(opened, tmp_path):
    with serve_gym(short_paddle, web=True, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        for _ in range(45):
            env.step(1)
        env.close()
        until(lambda: recorded(tmp_path))
        page = opened(server.web_url, has_touch=True, is_mobile=True)
        page.set_viewport_size({"width": 390, "height": 844})
        says(page, "#status", "connected")
        tool(page, "replays")
        page.wait_for_selector("#recordings-list button")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        page.click("#recordings-list button")
        says(page, "#badge", "replay")
        shows(page, f"() => ({PADDLE})() > 0")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("name", ["Ann", "person 7935"])
def test_a_player_has_one_name_in_the_worlds_and_in_the_recordings(opened, tmp_path, name):
    shown = "person Ann" if name == "Ann" else name
    with serve_gym(short_paddle, web=True, fps=60, record=tmp_path) as server:
        page = opened(server.web_url)
        page.evaluate("(name) => localStorage.setItem('name', name)", name)
        page.click("#begin")
        page.keyboard.down("ArrowRight")
        page.wait_for_function(
            "(text) => document.querySelector('#worlds .chip.on')?.textContent === text", arg=f"● {shown}"
        )
        until(lambda: any(one.end == "terminated" for one in recorded(tmp_path)))
        page.keyboard.press("Escape")
        page.click("#replays")
        page.wait_for_selector("#recordings-list .chip.on")
        assert set(page.locator("#recordings-list .chip.on").all_text_contents()) == {shown}
        page.click("#recordings-list button")
        page.wait_for_selector("#player-about .chip.on")
        assert page.text_content("#player-about .chip.on") == shown


def test_what_somebody_has_played_is_listed_and_the_rest_on_demand(opened, tmp_path):
    """In real time a world plays on after its player: of two seconds with nobody nothing is to be seen first."""
    recording = Recording(tmp_path, unattended=True)
    with serve_gym(short_paddle, web=True, fps=60, record=recording) as server:
        page = opened(server.web_url)
        keep(page, "#announcement")
        page.click("#begin")
        said(page, "#announcement", "Episode 1 ended")
        page.keyboard.press("Escape")
        says(page, "#badge", "watching")
        name = page.evaluate("() => localStorage.getItem('name')")
        idle = [["default"]]
        until(lambda: [one.players for one in recorded(tmp_path) if one.end == "terminated"][-1:] == idle, 60)
        page.click("#replays")
        page.wait_for_selector("#recordings-list button")
        says(page, "#recordings-hint", "Choose one")
        assert page.is_hidden("#recordings-progress")
        listed = page.locator("#recordings-list .who").all_text_contents()
        assert listed
        assert set(listed) == {name}
        says(page, "#recordings-idle", "in which nobody acted")
        page.click("#recordings-idle")
        more = page.locator("#recordings-list .who").all_text_contents()
        assert more[: len(listed)] == listed, "they stay first"
        assert set(more[len(listed) :]) == {"nobody"}
        page.select_option("#recordings-order", "best")
        assert page.locator("#recordings-list .who").all_text_contents()[: len(listed)] == listed
        page.click("#recordings-idle")
        assert page.locator("#recordings-list .who").all_text_contents() == listed


def test_a_list_that_takes_long_says_what_is_read_and_shows_the_last_one_meanwhile(opened, tmp_path):
    def slow(socket):
        server = socket.connect_to_server()
        server.on_message(lambda data: socket.send(data.replace(b'"reading": false', b'"reading": true ')))

    with serve_gym(short_paddle, web=True, record=tmp_path) as server:
        env = make_remote(server.url, player="agent:PPO")
        env.reset(seed=0)
        while not env.step(0)[2]:
            pass
        env.close()
        until(lambda: recorded(tmp_path))
        page = opened("about:blank")
        page.route_web_socket("**/*", slow)
        page.goto(server.web_url)
        page.click("#replays")
        says(page, "#recordings-hint", "Reading 1 file of recordings…")
        assert page.is_visible("#recordings-progress")
        page.wait_for_selector("[data-episode]")
        page.click("#recordings-close")
        page.click("#replays")
        assert page.locator("[data-episode]").count() == 1, "at once"
