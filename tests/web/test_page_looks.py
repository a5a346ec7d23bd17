"""The page in a real browser: sizes, contrast, help, and what a picture costs."""

from __future__ import annotations

import json
import os

import pytest

from bridge import serve_gym, serve_parallel
from tests.browser import in_browser, says, shows
from tests.web_envs import PADDLE, Paddle, Race

pytestmark = in_browser


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_fullscreen_has_the_picture_and_its_buttons(opened):
    with serve_gym(Paddle, fps=20, web=True) as server:
        page = opened(server.web_url)
        page.get_by_role("button", name="Fullscreen").click()
        shows(page, "() => document.fullscreenElement?.id === 'stage'")
        page.get_by_role("button", name="Fullscreen").click()
        shows(page, "() => document.fullscreenElement === null")


@pytest.mark.slow
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
          window.count = () => [window.ages, window.frames_asked, Number(canvas.dataset.pictures), performance.now()];
          new MutationObserver((all) => { window.ages += all.length; })
            .observe(document.getElementById("age"), {childList: true, characterData: true, subtree: true});
          return window.count();
        }""")
        # Looked at by a clock: Playwright asks for frames otherwise.
        page.wait_for_function(f"() => window.count()[2] > {before[2]} + 90", polling=100)
        ages, asked, _, time = (now - then for now, then in zip(page.evaluate("window.count()"), before, strict=True))
        assert ages <= time / 250 + 2, "four times a second, however many pictures come"
        assert asked == 0


BANDS = """() => {
  const raised = document.createElement("i");
  raised.style.background = "var(--raised)";
  document.body.append(raised);
  const {backgroundColor} = getComputedStyle(raised);
  raised.remove();
  return [getComputedStyle(document.getElementById("frame")).backgroundColor, backgroundColor];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_a_picture_leaves_free_has_the_color_of_the_page(opened, scheme):
    with serve_gym(Paddle, web=True, fps=30) as server:
        page = opened(server.web_url, color_scheme=scheme)
        shows(page, "() => !document.getElementById('play').disabled")
        frame, raised = page.evaluate(BANDS)
        assert frame != raised, "dark, below texts that are light"
        page.click("#begin")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        frame, raised = page.evaluate(BANDS)
        assert frame == raised
        page.evaluate("() => document.getElementById('stage').requestFullscreen()")
        shows(page, "() => document.fullscreenElement !== null")
        frame, raised = page.evaluate(BANDS)
        assert frame == "rgb(5, 7, 12)", "as a film has it"
        page.evaluate("() => document.exitFullscreen()")


def test_behind_the_words_of_a_match_it_stays_dark(opened):
    with serve_parallel(Race, web=True, fps=60, match=True, agents=lambda observation: 1) as server:
        page = opened(server.web_url, color_scheme="light")
        page.click("#play")
        says(page, "#badge", "you are")
        page.click("#ready")
        says(page, "#match-over", "Round 1 is over")
        assert page.evaluate("() => document.getElementById('canvas').dataset.pictures > 0")
        frame, raised = page.evaluate(BANDS)
        assert frame != raised


def test_a_number_of_steps_in_the_thousands_has_no_decimals(opened):
    with serve_gym(Paddle, web=True) as server:
        page = opened(server.web_url)
        says(page, "#status-text", "connected")
        for steps, text in ((2357.2, "4714"), (5.2, "10.4")):  # within half a second
            shown = page.evaluate(
                """async (steps) => {
                  const [{state}, {figures}] = await Promise.all([import("/state.js"), import("/figures.js")]);
                  const now = performance.now();
                  state.frames.arrived = [now - 500, now];
                  state.frames.steps = [[now - 500, 0], [now, steps]];
                  figures();
                  return document.getElementById("steps").textContent;
                }""",
                steps,
            )
            assert shown == text
