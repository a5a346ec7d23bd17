"""The page under axe-core, the checker of accessibility, where npm has installed it: `make check-web`."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, serve_gym, serve_parallel
from tests.browser import AXE, FINDINGS, in_browser, keep, said, says, shows
from tests.support import sampled
from tests.web_envs import Paddle, Race

pytestmark = [in_browser, pytest.mark.slow]


class Numbers(gymnasium.Env):
    """Draws nothing; its observations are more numbers than the page has room for."""

    observation_space = spaces.Box(-1, 1, (40,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.linspace(-1, 1, 40, dtype=np.float32), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make check-web")
@pytest.mark.parametrize(
    ("touch", "scheme"),
    sampled([(False, "light"), (False, "dark"), (True, "light"), (True, "dark")], 3),
    ids=["mouse-light", "mouse-dark", "touch-light", "touch-dark"],
)
def test_axe_finds_nothing(opened, scheme, touch):
    # Without motion: a color half way through its transition is none of the page's.
    options = {
        "color_scheme": scheme,
        "reduced_motion": "reduce",
        "has_touch": touch,
        "is_mobile": touch,
        "bypass_csp": True,
    }
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, **options)
        shows(page, "() => !document.getElementById('play').disabled")
        page.add_script_tag(path=AXE)
        assert page.evaluate(FINDINGS) == [], "before anybody plays"
        page.click("#begin")
        says(page, "#legend", "→")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        assert page.evaluate(FINDINGS) == [], "while somebody plays"
        page.click("#help-open")
        assert page.evaluate(FINDINGS) == [], "in the help"
    with serve_gym(Numbers, web=True, fps=30) as server:
        page = opened(server.web_url, **options)
        page.set_viewport_size({"width": 1280, "height": 600})
        shows(page, "() => !document.getElementById('play').disabled")
        page.add_script_tag(path=AXE)
        page.click("#begin")
        says(page, "#panel", "[39]")
        assert page.evaluate(FINDINGS) == [], "where there are no pictures"
    with serve_parallel(Race, web=True, fps=60, match=True) as server:
        page = opened(server.web_url, **options)
        shows(page, "() => !document.getElementById('play').disabled")
        page.add_script_tag(path=AXE)
        page.click("#play")
        says(page, "#badge", "you are")
        assert page.evaluate(FINDINGS) == [], "in a match"
        page.click("#invite-open")
        assert page.evaluate(FINDINGS) == [], "in an invitation"


def test_the_first_link_skips_to_the_picture_and_stays_on_the_page(opened):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url)
        page.evaluate("() => { window.same = true; }")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        shows(page, "() => document.activeElement.id === 'stage'")
        says(page, "#status", "connected")
        assert page.evaluate("() => window.same")


def test_ends_of_short_episodes_are_not_all_read_aloud(opened):
    with serve_gym(lambda render_mode: Paddle(render_mode, length=3), web=True, fps=30) as server:
        page = opened(server.web_url)
        assert page.get_attribute("#announcement", "aria-live") == "polite"
        keep(page, "#announcement")
        page.click("#begin")
        said(page, "#announcement", "Episode 1 ended. Return 3.00.")
        number = "Number(/^Episode (\\d+) ended/.exec(announcement.textContent)?.[1] ?? 0)"
        shows(page, f"() => {number} >= 12")
        ended, aloud = page.evaluate(f"() => [{number}, window.kept['#announcement'].filter(Boolean)]")
        assert len(aloud) < ended


@pytest.mark.parametrize("reduced", ["reduce", "no-preference"])
def test_nothing_moves_for_those_who_want_little_motion(opened, reduced):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, reduced_motion=reduced)
        seconds = page.evaluate("() => getComputedStyle(document.getElementById('play')).transitionDuration")
        assert all(float(each.strip().removesuffix("s")) == 0 for each in seconds.split(",")) == (reduced == "reduce")


LOOKS = """(selector) => {
  const {backgroundColor, borderTopWidth, borderTopColor} = getComputedStyle(document.querySelector(selector));
  return [backgroundColor, borderTopWidth, borderTopColor].join(" ");
}"""


def test_a_palette_of_the_system_s_own_tells_what_is_chosen_and_held(opened):
    with serve_gym(Paddle, web=True) as server:
        envs = [make_remote(server.url) for _ in range(2)]
        page = opened(server.web_url, forced_colors="active")
        says(page, "#worlds", "agent")
        page.wait_for_selector("#worlds button[aria-current=true]")
        chosen, other = (
            page.evaluate(LOOKS, f"#worlds button[aria-current={current}]") for current in ("true", "false")
        )
        assert chosen != other
        for env in envs:
            env.close()
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, forced_colors="active")
        page.click("#begin")
        says(page, "#legend", "→")
        page.keyboard.down("ArrowRight")
        page.wait_for_selector("kbd.held")
        assert page.evaluate(LOOKS, "kbd.held") != page.evaluate(LOOKS, "kbd:not(.held)")
        icon, ground = page.evaluate("""() => ["::before", null].map((part) =>
            getComputedStyle(document.getElementById("player-play"), part).backgroundColor)""")
        assert icon != ground, "the buttons of a replay have signs"
