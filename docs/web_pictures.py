"""`python docs/web_pictures.py`: the screenshots of docs/play.md and the README's animation, taken in Chromium.

Needs the extra `test`, and Chromium: `apt-get install --no-install-recommends chromium`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import ale_py
import gymnasium
import numpy as np
from mpe2 import simple_tag_v3
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from bridge import make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.wrappers import BlockingReset

DOCS = Path(__file__).parent
VIEWPORTS = (
    (320, 568, "dark"),
    (390, 844, "light"),
    (844, 390, "light"),
    (768, 1024, "light"),
    (1280, 800, "light"),
    (1920, 1080, "dark"),
)
"""Width, height and color scheme."""


@contextlib.contextmanager
def running(step: Callable[[], Any]) -> Iterator[None]:
    """Call a function again and again meanwhile."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def opened(browser: Browser, url: str, width: int, height: int, **options: Any) -> Page:
    """Open the page."""
    context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=1, **options)
    page = context.new_page()
    page.goto(url)
    page.wait_for_function("() => document.getElementById('status-text').textContent.startsWith('connected')")
    return page


def play(page: Page, seconds: float, *keys: str) -> None:
    """Press keys in turn for some time."""
    for turn in range(int(seconds / 0.4)):
        page.keyboard.down(keys[turn % len(keys)])
        page.wait_for_timeout(330)
        page.keyboard.up(keys[turn % len(keys)])
        page.wait_for_timeout(70)


def chase(observation: Any) -> int:
    """Play tag: run after the one that flees, or from the nearest that run after it."""
    ahead = observation[-4:-2] if len(observation) == 16 else -min(np.split(observation[8:14], 3), key=np.linalg.norm)
    axis = int(abs(ahead[1]) > abs(ahead[0]))
    return 2 * axis + (2 if ahead[axis] > 0 else 1)


def seated(browser: Browser, url: str, name: str, seat: str, **options: Any) -> Page:
    """Open the page at some size, and take a seat."""
    page = opened(browser, url, **options)
    page.fill("#name", name)
    page.keyboard.press("Tab")
    if page.query_selector("#seats button"):
        page.click(f'#seats button[data-seat="{seat}"]')
    else:  # the first seat of a world that is not there yet
        page.click("#play")
    says(page, "#badge", seat)
    return page


def says(page: Page, selector: str, text: str) -> None:
    """Wait until a part of the page says something."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector).textContent.includes(text)", arg=[selector, text]
    )


def match(browser: Browser) -> None:
    """Two people, a program and a policy play tag: in a round, and after it."""
    settings: dict[str, Any] = {"env_kwargs": {"max_cycles": 240}, "fps": 20, "match": True, "agents": chase}
    with serve_parallel(simple_tag_v3, web=True, **settings) as server:
        size = {"width": 1280, "height": 760}
        ann = seated(browser, server.web_url or "", "Ann", "adversary_0", color_scheme="dark", **size)
        ben = seated(browser, server.web_url or "", "Ben", "agent_0", color_scheme="light", **size)
        program = make_remote(f"{server.url}?world=", agent="adversary_1", player="agent:PPO", wait="next_frame")

        def play_round() -> None:
            observation, _ = program.reset()
            ended = False
            while not ended:
                observation, _, terminated, truncated, _ = program.step(chase(observation))
                ended = terminated or truncated

        thread = threading.Thread(target=play_round)
        thread.start()
        for page in (ann, ben):
            page.keyboard.press("Enter")
        says(ann, "#announcement", "has begun")
        play(ann, 5, "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown")
        ann.keyboard.down("ArrowRight")
        ann.wait_for_timeout(200)
        ann.screenshot(path=DOCS / "play-round.png")
        ann.keyboard.up("ArrowRight")
        for page in (ann, ben):
            says(page, "#match-over", "is over")
        ann.keyboard.press("Enter")
        says(ben, "#seats", "✓ ready")
        ben.wait_for_timeout(500)
        ben.screenshot(path=DOCS / "play-match.png")
        thread.join()
        program.close()


def mosaic(browser: Browser) -> None:
    """Sixteen lanes of a trainer, in a light browser."""
    gymnasium.register_envs(ale_py)
    with serve_gym("ALE/Breakout-v5", web=True, num_envs=16) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world="))
        envs.reset(seed=0)
        random = np.random.default_rng(0)
        with running(lambda: envs.step(random.integers(0, 4, 16))):
            page = opened(browser, server.web_url or "", 1280, 760, color_scheme="light")
            page.wait_for_function("() => document.getElementById('canvas').dataset.pictures > 30")
            page.wait_for_timeout(8000)
            page.screenshot(path=DOCS / "play-mosaic.png")
        envs.close()


def phone(browser: Browser) -> None:
    """A phone's width, played with fingers."""
    gymnasium.register_envs(ale_py)
    with serve_gym("ALE/Pong-v5", web=True, fps=30) as server:
        options = {"has_touch": True, "is_mobile": True, "color_scheme": "dark"}
        page = opened(browser, server.web_url or "", 390, 844, **options)
        page.click("#begin")
        page.wait_for_selector("#pad button")
        page.wait_for_timeout(4000)
        page.dispatch_event("#pad button:nth-child(2)", "pointerdown", {"pointerId": 1, "isPrimary": True})
        page.wait_for_timeout(300)
        page.screenshot(path=DOCS / "play-phone.png")


def viewports(browser: Browser) -> None:
    """The screens of tests/web/test_bar.py and others: a person lands on the moon, and is recorded."""
    for width, height, scheme in VIEWPORTS:
        recorded = tempfile.TemporaryDirectory()
        with recorded as folder, serve_gym("LunarLander-v3", web=True, fps=50, record=folder) as server:
            touch: dict[str, Any] = {"has_touch": True, "is_mobile": True} if width < 1000 else {}
            page = opened(browser, server.web_url or "", width, height, color_scheme=scheme, **touch)
            page.wait_for_function("() => !document.getElementById('play').disabled")
            page.click("#begin" if page.is_visible("#begin") else "#play")
            page.wait_for_selector("#legend kbd", state="attached")
            play(page, 2, "ArrowUp", "ArrowLeft")
            page.keyboard.down("ArrowUp")
            page.wait_for_timeout(300)
            page.screenshot(path=DOCS / f"play-{width}x{height}.png")
            page.keyboard.up("ArrowUp")
            page.click("#play")
            page.context.close()


def invitation(browser: Browser) -> None:
    """The link to a seat, with its code."""
    with serve_parallel(simple_tag_v3, web=True, fps=20, match=True, agents=chase) as server:
        page = opened(browser, server.web_url or "", 1280, 760, color_scheme="dark")
        page.wait_for_function("() => !document.getElementById('play').disabled")
        page.fill("#name", "Ann")
        page.click("#play")
        says(page, "#badge", "you are")
        page.click("#invite-open")
        page.select_option("#invite-seat", "agent_0")
        page.screenshot(path=DOCS / "play-invite.png")


def replay(browser: Browser) -> None:
    """A recorded episode of a person, played again."""
    with tempfile.TemporaryDirectory() as folder, serve_gym("LunarLander-v3", web=True, record=folder) as server:
        for who, seed in (("agent:PPO", 1), ("person:Bob", 9), ("person:Ann", 4)):
            env = make_remote(server.url, player=who)
            env.action_space.seed(seed)
            env.reset(seed=seed)
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
            env.close()
        page = opened(browser, server.web_url or "", 1280, 760, color_scheme="dark")
        page.click("#replays")
        page.wait_for_selector("#recordings-list li:nth-child(3)")
        page.click("#recordings-list button")
        page.wait_for_function("() => parseInt(document.getElementById('player-position').textContent) > 60")
        page.screenshot(path=DOCS / "play-replay.png")


def follow_ball(frame: np.ndarray) -> int:
    """Play Breakout: have the paddle follow the ball, and fire where there is none."""
    red = (frame == (200, 72, 72)).all(axis=-1)
    ball, paddle = np.argwhere(red[95:188])[:, 1], np.argwhere(red[189:193, 8:152])[:, 1] + 8
    if not ball.size or not paddle.size:
        return 1
    aside = ball.mean() - paddle.mean()
    return 0 if abs(aside) < 4 else 2 if aside > 0 else 3


def takeover(browser: Browser) -> None:
    """A person takes over from an agent that plays Breakout, and gives back: an animation."""
    gymnasium.register_envs(ale_py)
    settings: dict[str, Any] = {"env_kwargs": {"repeat_action_probability": 0.0}, "fps": 12}
    with serve_gym("ALE/Breakout-v5", web=True, **settings) as server:
        agent = make_remote(f"{server.url}?world=", player="agent:PPO", wait="next_frame")
        newest = [agent.reset(seed=3)[0]]

        def step() -> None:
            newest[0], _, terminated, truncated, _ = agent.step(follow_ball(newest[0]))
            if terminated or truncated:
                newest[0] = agent.reset()[0]

        with running(step):
            page = opened(browser, server.web_url or "", 1280, 760, color_scheme="dark")
            page.wait_for_function("() => document.getElementById('canvas').dataset.pictures > 150")
            acts = {
                14: lambda: page.click("#play"),
                20: lambda: page.keyboard.down("ArrowLeft"),
                27: lambda: page.keyboard.up("ArrowLeft"),
                28: lambda: page.keyboard.down("ArrowRight"),
                38: lambda: page.keyboard.up("ArrowRight"),
                46: lambda: page.click("#play"),
            }
            frames = []
            for number in range(64):
                acts.get(number, lambda: None)()
                picture = Image.open(io.BytesIO(page.screenshot()))
                frames.append(picture.convert("RGB").resize((960, 570), Image.Resampling.LANCZOS))
        agent.close()
    sample = Image.new("RGB", (960, 570 * 3))
    for row, frame in enumerate((frames[4], frames[24], frames[-1])):
        sample.paste(frame, (0, 570 * row))
    palette = sample.quantize(160, method=Image.Quantize.MEDIANCUT, kmeans=2)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    few[0].save(DOCS / "takeover.gif", save_all=True, append_images=few[1:], duration=140, loop=0, optimize=True)


PICTURES = {
    "match": match,
    "mosaic": mosaic,
    "phone": phone,
    "viewports": viewports,
    "invitation": invitation,
    "replay": replay,
    "takeover": takeover,
}


def main() -> int:
    """Take those that are named, or all of them."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None)
    if chromium is None:
        print("chromium is not installed: apt-get install --no-install-recommends chromium", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in sys.argv[1:] or PICTURES:
            PICTURES[name](browser)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
