"""Seats that survive a reload, invitations to them, and what everybody has got in all rounds."""

from __future__ import annotations

import base64
import re
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from bridge import Limits, Web, make_remote, serve_gym, serve_parallel
from tests.browser import in_browser, keep, says, shows
from tests.support import until
from tests.web.taking_over import Trainer, take_over
from tests.web_envs import Paddle, Paddles, Race

pytestmark = [in_browser, pytest.mark.slow]
CODE = """async () => {
  const svg = document.getElementById("invite-code").cloneNode(true);
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.setAttribute("width", "400");
  svg.setAttribute("height", "400");
  svg.querySelector("rect").setAttribute("fill", "#fff");
  const image = new Image();
  image.src = "data:image/svg+xml;base64," + btoa(svg.outerHTML);
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 400;
  canvas.getContext("2d").drawImage(image, 0, 0);
  const {data} = canvas.getContext("2d").getImageData(0, 0, 400, 400);
  let text = "";
  for (let at = 0; at < data.length; at += 4) text += String.fromCharCode(data[at]);
  return btoa(text);
}"""


def sit(page, name, seat):
    page.fill("#name", name)
    page.keyboard.press("Tab")
    if page.query_selector("#seats button"):
        page.click(f'#seats button[data-seat="{seat}"]')
    else:
        page.click("#play")
    says(page, "#badge", f"you are {seat}")


def test_a_reload_in_a_round_keeps_the_seat_and_the_round(opened):
    with serve_parallel(Paddles, web=True, fps=30, match=True) as server:
        ann = opened(server.web_url)
        sit(ann, "Ann", "upper")
        ann.keyboard.press("Enter")
        says(ann, "#seats", "plays")
        shows(ann, "() => document.getElementById('match').hidden")
        ann.reload()
        says(ann, "#badge", "you are upper")
        shows(
            ann, "() => document.getElementById('match').hidden"
        )  # she plays in the round that runs, not the next one
        says(ann, "#seats li.mine", "Ann")
        ann.keyboard.press("Escape")
        says(ann, "#badge", "watching")
        ann.reload()
        says(ann, "#status-text", "connected")
        shows(ann, "() => !document.getElementById('play').disabled")
        says(ann, "#badge", "watching")


def test_a_seat_of_a_real_time_world_waits_and_is_nobody_else_s(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        ann = opened(server.web_url)
        ann.click("#begin")
        says(ann, "#badge", "playing")
        ann.goto("about:blank")
        eve = opened(server.web_url)
        says(eve, "#play", "Take over")  # the seat is taken
        ann.goto(server.web_url)
        says(ann, "#badge", "playing")
        says(ann, "#legend", "→")


def test_a_person_who_took_over_has_the_place_again_after_a_reload(opened):
    with serve_gym(Paddle, web=Web(play_fps=20)) as server, Trainer(server) as trainer:
        page = opened(server.web_url)
        take_over(page)
        page.reload()
        says(page, "#badge", "agent acts: hold a key")
        before = trainer.interventions
        page.keyboard.down("ArrowLeft")
        until(lambda: trainer.interventions > before)
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Escape")
        until(lambda: trainer.last == {})


def test_a_world_of_one_s_own_is_played_again_after_a_reload(opened):
    with serve_gym(Paddle, web=True) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing your own world")
        page.reload()
        says(page, "#badge", "playing your own world")
        page.keyboard.press("Escape")
        until(lambda: server.worlds == [])


def test_a_link_invites_to_a_seat_and_its_code_says_the_same(opened):
    asked = []
    with serve_parallel(Paddles, web=True, fps=30, match=True, token="a-token-for-all") as server:
        ann = opened(f"{server.web_url}#token=a-token-for-all")
        sit(ann, "Ann", "upper")
        ann.click("#invite-open")
        ann.select_option("#invite-seat", "third")
        link = ann.input_value("#invite-link")
        said = parse_qs(urlsplit(link).fragment, keep_blank_values=True)
        assert said == {"world": [""], "seat": ["third"], "token": ["a-token-for-all"]}
        reader = pytest.importorskip("zxingcpp", reason="zxing-cpp is not installed")
        pixels = np.frombuffer(base64.b64decode(ann.evaluate(CODE)), np.uint8).reshape(400, 400)
        assert [code.text for code in reader.read_barcodes(np.ascontiguousarray(pixels))] == [link]
        ann.uncheck("#invite-token")
        assert "token" not in ann.input_value("#invite-link")
        # Without HTTPS a page may not write to the clipboard.
        ann.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
        ann.click("#invite-copy")
        says(ann, "#invite-hint", "The link is selected: copy it.")
        ann.click("#invite-close")

        ben = opened("about:blank")
        ben.on("request", lambda request: asked.append(request.url))
        ben.goto(link)
        says(ben, "#announcement", "You are invited to play third: press Play.")
        assert ben.url == server.web_url, "the token does not stay in the address"
        ben.click("#play")
        says(ben, "#badge", "you are third")
        assert not any("a-token-for-all" in url.partition("#")[0] for url in asked)
        eve = opened(link)
        says(eve, "#announcement", "You are invited to play third, but somebody has the seat.")
        ann.click("#invite-open")
        ann.click("#invite-close")
        shows(ann, "() => document.activeElement.id === 'stage'")
        ann.keyboard.press("Enter")  # is for the match, not for the button that opened the invitation
        says(ann, "#seats", "✓ ready")


def test_all_rounds_are_counted_for_each_player(opened):
    with serve_parallel(Race, web=True, fps=60, match=True, countdown=0.5, agents=lambda observation: 0) as server:
        page = opened(server.web_url)
        sit(page, "Ann", "upper")
        for number in (1, 2):
            page.keyboard.press("Enter")
            shows(page, "() => document.getElementById('match').hidden")
            page.keyboard.down("ArrowRight")
            says(page, "#match-over", f"Round {number} is over")
            page.keyboard.up("ArrowRight")
        says(page, "#match-standings-rows", "Ann")
        assert page.locator("#match-standings-rows tr").all_inner_texts() == ["Ann\t2\t2\t1"]


def called(page):
    return page.evaluate("() => localStorage.getItem('name')")


@pytest.mark.parametrize("fps", [None, 30], ids=["lock-step", "real time"])
def test_a_world_says_who_plays_in_it_a_person_or_an_agent(opened, fps):
    with serve_gym(Paddle, web=True, fps=fps) as server:
        page = opened(server.web_url)
        page.click("#begin")
        says(page, "#badge", "playing")
        says(page, "#worlds", f"● {called(page)}")  # person 1234, where no name was chosen
        page.keyboard.press("Escape")
    with serve_gym(Paddle, web=True, fps=fps) as server:
        page = opened(server.web_url)
        for player, shown in (
            ("agent:PPO", "● agent PPO"),
            ("person:Ann", "● person Ann"),
            ("agent", "● agent"),
            # What would turn the text around, or is not seen, is left out; markup is text.
            ("person:<b>Zo\u202e\u200bë", "● person <b>Zoë"),
            ("person:\u200b", "● person"),
            (f"agent:{'y' * 58}", f"● agent {'y' * 58}"),
        ):
            env = make_remote(f"{server.url}?world=", player=player)
            env.reset()
            page.wait_for_function(
                "(text) => document.querySelector('#worlds .chip.on')?.textContent === text", arg=shown
            )
            env.close()
            shows(page, "() => !document.getElementById('worlds').textContent.includes('●')")


@pytest.mark.parametrize("fps", [None, 30], ids=["lock-step", "real time"])
def test_each_seat_says_who_has_it_and_who_takes_over(opened, fps):
    with serve_parallel(Paddles, web=True, fps=fps) as server:
        ann = make_remote(f"{server.url}?world=", agent="upper", player="person:Ann")
        ppo = make_remote(f"{server.url}?world=", agent="third", player="agent:PPO")
        page = opened(server.web_url)
        says(page, "#worlds", "● upper: person Ann")
        says(page, "#worlds", "○ lower")
        says(page, "#worlds", "● third: agent PPO")
        if fps:  # in lock-step nothing moves before all have seats
            page.select_option("#seat", "third")
            page.click("#play")
            says(page, "#badge", "third")
            says(page, "#worlds", f"{called(page)} takes over")
            page.click("#play")
            shows(page, "() => !document.getElementById('worlds').textContent.includes('takes over')")
        ann.close()
        ppo.close()


def test_who_would_take_over_reads_beforehand_that_another_person_has(opened):
    with serve_gym(Paddle, web=True) as server, Trainer(server):
        ann, eve = opened(server.web_url), opened(server.web_url)
        says(eve, "#play", "Take over")
        assert eve.is_enabled("#play")
        take_over(ann)
        says(eve, "#play", "Taken")
        assert eve.is_disabled("#play")
        assert eve.get_attribute("#play", "title") == f"{called(ann)} has taken over: wait until they give back"
        assert ann.text_content("#play") == "Give back"
        ann.click("#play")
        says(eve, "#play", "Take over")
        says(ann, "#play", "Take over")
        assert ann.is_enabled("#play")
        take_over(eve)
        eve.keyboard.press("Escape")


def is_offered(page):
    """Ask for a seat; return whether the server has heard by now that it was left."""
    page.click("#play")
    shows(page, "() => message.textContent")
    return page.is_visible("#offer")


def test_a_seat_that_was_left_is_offered_with_the_time_that_it_is_kept(opened):
    with serve_gym(Paddle, web=Web(play_fps=20), limits=Limits(seat_timeout=8)) as server, Trainer(server) as trainer:
        ann, eve = opened(server.web_url), opened(server.web_url)
        take_over(ann)
        says(eve, "#play", "Taken")
        keep(eve, "#message")
        ann.goto("about:blank")
        until(lambda: is_offered(eve))
        # In one go: the seat is free after some seconds.
        pressed = eve.evaluate("""() => {
          const before = offer.textContent;
          offer.click();
          return [before, offer.textContent, offer.disabled];
        }""")
        assert pressed == ["Take it then", "Waiting…", True]
        texts = eve.evaluate("() => window.kept['#message']")
        kept = re.compile(r"The seat agent was left, and is kept for [1-8] s for who had it\.")
        assert any(map(kept.fullmatch, texts)), texts
        says(eve, "#badge", "agent acts: hold a key")
        eve.wait_for_selector("#problem", state="hidden")
        before = trainer.interventions
        eve.keyboard.down("ArrowLeft")
        until(lambda: trainer.interventions > before)
        eve.keyboard.up("ArrowLeft")
        eve.keyboard.press("Escape")


def test_an_offer_that_nobody_accepts_says_when_the_seat_is_free(opened):
    with serve_gym(Paddle, web=Web(play_fps=20), limits=Limits(seat_timeout=8)) as server, Trainer(server):
        ann, eve = opened(server.web_url), opened(server.web_url)
        take_over(ann)
        says(eve, "#play", "Taken")
        ann.goto("about:blank")
        until(lambda: is_offered(eve))
        says(eve, "#message", "The seat agent is free now.")
        assert eve.text_content("#play") == "Take over", "nobody has said yes"
        eve.click("#offer")
        says(eve, "#badge", "agent acts: hold a key")
        eve.keyboard.press("Escape")
