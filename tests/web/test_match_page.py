"""A match on the page, in real browsers: two people and an agent of the server's."""

from __future__ import annotations

import pytest

from bridge import make_remote, serve_parallel
from tests.browser import KNOWN, in_browser, keep, said, says, shows
from tests.support import until, world_of
from tests.web_envs import Race

pytestmark = [in_browser, pytest.mark.slow]


def still(observation):
    return 0


@pytest.fixture
def server():
    with serve_parallel(Race, web=True, fps=30, match=True, countdown=1.5, agents=still) as serving:
        yield serving


def enter(opened, server, name, seat=None, **options):
    """Open the page, say a name, and take a seat."""
    page = opened(server.web_url, **options)
    says(page, "#status", "connected")
    page.fill("#name", name)
    page.keyboard.press("Tab")
    if seat is None:
        page.click("#play")
    else:
        page.click(f'#seats button[data-seat="{seat}"]')
    says(page, "#badge", "you are")
    return page


def seats(page):
    return [text.split("\n") for text in page.locator("#seats li").all_inner_texts()]


@pytest.mark.slow
def test_two_browsers_and_an_agent_play_a_match_to_its_end_and_again(opened, server):
    ann = enter(opened, server, "Ann")
    says(ann, "#badge", "you are upper")
    says(ann, "#match-title", "You are upper")
    ben = enter(opened, server, " Ben\u202e ", "lower")
    assert ben.input_value("#name") == "Ben"
    says(ann, "#announcement", "Ben takes lower.")
    viewer = opened(server.web_url)
    says(viewer, "#seats", "Ben")
    assert seats(viewer) == [
        ["upper", "Ann", "not ready"],
        ["lower", "Ben", "not ready"],
        ["third", "still", "Sit here"],
    ]
    assert viewer.is_hidden("#ready")
    ann.keyboard.press("Enter")
    says(ben, "#announcement", "Ann is ready.")
    says(ann, "#match-hint", "Waiting for Ben.")
    says(viewer, "#match-hint", "Waiting for Ben.")
    keep(viewer, "#announcement")  # that the round has begun is next
    ben.click("#ready")
    said(viewer, "#announcement", "It begins in")
    for page in (ann, ben, viewer):
        shows(page, "() => document.getElementById('match').hidden")
    says(ben, "#announcement", "Round 1 has begun.")
    assert seats(viewer)[0][:2] == ["upper", "Ann"]
    ann.keyboard.down("ArrowRight")
    says(ann, "#match-title", "You win")
    ann.keyboard.up("ArrowRight")
    says(ben, "#match-title", "Ann wins")
    says(viewer, "#match-title", "Ann wins")
    says(ann, "#match-over", "Round 1 is over")
    says(ann, "#announcement", "Round 1 is over. You win. Your return is 1.")
    assert ann.locator("#match-returns li").all_inner_texts()[0].split("\n") == ["Ann (you)", "upper", "1"]
    assert ann.locator("#match-returns li.won").count() == 1
    assert ann.get_attribute("#announcement", "aria-live") == "polite"

    says(ann, "#ready", "Rematch")
    ann.click("#ready")
    says(ben, "#match-hint", "Ann waits for you. Press Enter for a rematch.")
    ben.keyboard.press("Enter")
    before = int(ben.get_attribute("#canvas", "data-pictures"))
    says(ben, "#announcement", "Round 2 has begun.")
    shows(ben, f"() => document.getElementById('canvas').dataset.pictures > {before} + 5")
    ben.keyboard.down("ArrowRight")
    says(ben, "#match-title", "You win")
    says(ann, "#match-title", "Ben wins")
    ben.keyboard.up("ArrowRight")


@pytest.mark.slow
def test_a_result_stays_with_those_who_played(opened, server):
    ann, ben = enter(opened, server, "Ann"), enter(opened, server, "Ben", "lower")
    for page in (ann, ben):
        page.keyboard.press("Enter")
    for page in (ann, ben):
        says(page, "#announcement", "Round 1 has begun.")
    ann.keyboard.down("ArrowRight")
    says(ann, "#match-title", "You win")
    ann.keyboard.up("ArrowRight")
    ann.keyboard.press("Escape")
    says(ben, "#announcement", "Ann leaves upper.")
    rosa = enter(opened, server, "Rosa", "upper")
    says(rosa, "#match-title", "Ann wins")
    assert rosa.locator("#match-returns li").all_inner_texts()[0].split("\n") == ["Ann", "upper", "1"]
    says(ben, "#match-title", "Ann wins")
    assert "Ben (you)" in ben.inner_text("#match-returns")


@pytest.mark.slow
def test_who_leaves_and_who_comes_in_a_round(opened, server):
    """The server's agent plays on in the seat of whoever leaves; whoever comes plays in the next round."""
    ann, ben = enter(opened, server, "Ann"), enter(opened, server, "Ben", "lower")
    for page in (ann, ben):
        page.keyboard.press("Enter")
    says(ann, "#announcement", "Round 1 has begun.")
    says(ben, "#announcement", "Round 1 has begun.")
    ben.keyboard.press("Escape")
    says(ben, "#badge", "watching")
    says(ann, "#announcement", "Ben leaves lower.")
    cyd = enter(opened, server, "Cyd", "lower")
    says(cyd, "#match-hint", "This round goes on.")
    assert seats(cyd)[1] == ["lower you", "still", "0", "Cyd plays next"]
    cyd.click("#ready")
    says(cyd, "#match-hint", "You play in the next one.")
    ann.keyboard.down("ArrowRight")
    says(cyd, "#match-title", "Ann wins")
    ann.keyboard.up("ArrowRight")
    assert "still" in cyd.inner_text("#match-returns")
    says(ann, "#match-title", "You win")
    ann.keyboard.press("Enter")
    says(cyd, "#announcement", "Round 2 has begun.")
    cyd.keyboard.down("ArrowRight")
    says(cyd, "#match-title", "You win")
    for page in (ann, cyd):
        page.keyboard.press("Escape")
    until(lambda: not any(world_of(server).played.values()))


@pytest.mark.slow
def test_a_person_changes_their_mind_and_plays_with_a_program(opened, server):
    ann = enter(opened, server, "Ann")
    env = make_remote(f"{server.url}?world=", agent="lower", player="agent:PPO", timeout=20)
    says(ann, "#seats", "PPO")
    assert seats(ann)[1] == ["lower", "PPO", "program"]
    other = enter(opened, server, "Ben", "third")
    ann.click("#ready")
    says(ann, "#ready", "Not ready")
    ann.click("#ready")
    says(ann, "#ready", "Ready")
    says(other, "#match-hint", "Press Enter")
    other.keyboard.press("Enter")
    says(other, "#match-hint", "Waiting for Ann.")
    ann.keyboard.press("Enter")
    env.reset()
    while not any((last := env.step(1))[2:4]):
        pass
    assert last[1] == 1.0
    says(ann, "#match-title", "PPO wins")
    says(ann, "#play", "Stop")
    viewer = opened(server.web_url)
    says(viewer, "#play", "Full")
    assert viewer.is_disabled("#play")
    env.close()


def test_a_policy_that_raises_ends_the_round_in_words_and_everybody_stays(opened):
    calls = []

    def broken(observation):
        calls.append(observation)
        if len(calls) == 1:
            raise LookupError("no such weights")
        return 0

    with serve_parallel(Race, web=True, fps=30, match=True, countdown=0.2, agents={"third": broken}) as server:
        ann = enter(opened, server, "Ann")
        ann.keyboard.press("Enter")
        says(ann, "#match-title", "It was broken off")
        says(ann, "#match-hint", "LookupError in the policy of 'third': no such weights")
        ann.click("#ready")
        says(ann, "#announcement", "Round 2 has begun.")
        ann.keyboard.down("ArrowRight")
        says(ann, "#match-title", "You win")


def test_a_name_is_remembered_and_nobody_needs_one(opened, server):
    page = enter(opened, server, "Ann")
    page.reload()
    says(page, "#status", "connected")
    shows(page, "() => document.getElementById('name').value === 'Ann'")
    other = opened(server.web_url)
    says(other, "#status", "connected")
    other.click("#play")
    says(other, "#badge", "you are")
    says(other, "#seats", "person ")


def test_a_match_fits_a_phone_and_a_finger(opened, server):
    page = enter(opened, server, "An extremely long name for a player", has_touch=True, is_mobile=True)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.tap("#ready")
    shows(page, "() => document.getElementById('match').hidden")
    page.dispatch_event("#pad button:last-child", "pointerdown", {"pointerId": 1, "isPrimary": True})
    says(page, "#match-title", "You win")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


class Dense(Race):
    """The returns change with each step."""

    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        return observations, {agent: reward + 0.5 for agent, reward in rewards.items()}, *rest


def test_a_seat_that_is_pressed_while_the_returns_change_is_taken(opened):
    with serve_parallel(Dense, web=True, fps=30, match=True, countdown=0, agents=still) as server:
        ann = enter(opened, server, "Ann")
        viewer = opened(server.web_url)
        says(viewer, "#seats", "Sit here")
        ann.keyboard.press("Enter")
        viewer.wait_for_selector("#seats output")
        viewer.hover('#seats button[data-seat="lower"]')
        viewer.mouse.down()
        before = viewer.text_content("#seats output")
        shows(viewer, f"() => document.querySelector('#seats output').textContent !== '{before}'")
        viewer.mouse.up()
        says(viewer, "#badge", "you are lower")


def test_a_seat_that_is_pressed_while_another_one_is_taken_is_taken(opened):
    with serve_parallel(Dense, web=True, fps=30, match=True, agents=still) as server:
        enter(opened, server, "Ann")
        viewer = opened(server.web_url)
        viewer.evaluate(KNOWN)
        viewer.hover('#seats button[data-seat="lower"]')
        viewer.mouse.down()
        enter(opened, server, "Ben", "third")
        shows(viewer, "() => known.server.worlds[0].match.seats[2].kind === 'person'")
        viewer.mouse.up()
        says(viewer, "#badge", "you are lower")
