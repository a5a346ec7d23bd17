"""The page in a real browser: tokens, servers that go and come back, and seats of others."""

from __future__ import annotations

import http.server
import signal
import threading
from pathlib import Path

import pytest

import bridge
from bridge import Auth, make_remote, serve_gym
from tests.browser import in_browser, says, shows
from tests.places import ROOT
from tests.support import server_process
from tests.web_envs import PADDLE, Paddle

pytestmark = [in_browser, pytest.mark.slow]


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
      let hurries = true;
      window.setTimeout = (then, time) => wait(then, hurries && time === 15000 ? 3000 : time);
      window.networks = 0;
      window.WebSocket = class extends Real {
        network = window.networks;
        constructor(...given) {
          super(...given);
          hurries = window.networks === 0; // on a machine that stalls, the new one would be given up too
        }
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
