"""`python -m benchmarks.web_controls`: twelve environments played at the page, by the keys it shows and by its buttons.

Each environment notes what it is stepped with. Chromium presses each entry of the legend in turn, then touches the
same keys' buttons on a phone, and what was executed meanwhile is compared with what the entry says: that action, the
one for no key, and where an entry has several keys those of fewer of them, as no two are pressed at once. Prints a
line for each environment, and exits with 1 where an action did not happen, or another one did.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.alone import add_busy, measuring
from bridge import Server, serve_gym, serve_parallel

PHONE = {"width": 390, "height": 844}
ENTRIES = """() => [...document.querySelectorAll("#legend button")].map((button) => ({
  label: button.lastChild.textContent,
  keys: [...button.querySelectorAll("kbd")].map((sign) => sign.dataset.key),
}))"""
PLACE = """(name) => {
  const button = document.querySelector(`#pad [data-key="${CSS.escape(name)}"]`);
  button.scrollIntoView({block: "nearest"});
  const {left, top, width, height} = button.getBoundingClientRect();
  return {x: left + width / 2, y: top + height / 2};
}"""
NAMES = {
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "space": " ",
    "return": "Enter",
}
PATIENCE = 20.0
"""Seconds in which an action has to happen."""


@dataclasses.dataclass(frozen=True)
class Game:
    """An environment, and what it is stepped with."""

    name: str
    serve: Callable[[list[Any]], Server]
    """Serves it with a page; it adds each action to the list."""
    actions: Mapping[str, Any]
    """The action that each entry of the legend stands for, by its words."""
    idle: Any
    """The action for no key; None: the world waits for one."""
    order: Sequence[str] = ()
    """The order of the entries, where each press is one move; empty: as they come, each for some time."""


class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes the actions of an environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], noted: list[Any]) -> None:
        super().__init__(env)
        self.noted = noted

    def step(self, action: Any) -> Any:
        """Note the action, and step."""
        self.noted.append(action)
        return self.env.step(action)


def single(env_id: str, **kwargs: Any) -> Callable[[list[Any]], Server]:
    """Serve an environment of Gymnasium in lock-step: Play makes a world of one's own."""

    def serve(noted: list[Any]) -> Server:
        def make(render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
            return Noting(gymnasium.make(env_id, render_mode=render_mode, **kwargs), noted)

        return serve_gym(make, web=True)

    return serve


def noted_agent(env: Any, agent: str, noted: list[Any]) -> Any:
    """Have an environment of PettingZoo note the actions of an agent, whenever it may act."""
    step = env.step

    def note(actions: Any) -> Any:
        if getattr(getattr(env, "aec_env", None), "agent_selection", agent) == agent and agent in actions:
            noted.append(actions[agent])
        return step(actions)

    env.step = note
    return env


def tag(noted: list[Any]) -> Server:
    """Serve the game of tag of docs/play.md, in real time; the others act at random."""
    from mpe2 import simple_tag_v3

    def make(render_mode: str | None = None) -> Any:
        return noted_agent(
            simple_tag_v3.parallel_env(max_cycles=100_000, render_mode=render_mode), "adversary_0", noted
        )

    return serve_parallel(make, fps=10, web=True, agents="random")


def board(noted: list[Any]) -> Server:
    """Serve a board game, which waits for its players; the other one makes the first move that is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the games are about to move to a package of their own
        from pettingzoo.classic import tictactoe_v3
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    def make(render_mode: str | None = None) -> Any:
        env = turn_based_aec_to_parallel(tictactoe_v3.env(render_mode=render_mode))
        return noted_agent(env, "player_1", noted)

    return serve_parallel(make, missing_agent="default", web=True)


ATARI = {"fire": 1, "right": 2, "left": 3}
GAMES = (
    Game(
        "CarRacing",
        single("CarRacing-v3"),
        {"steer: -1": (-1, 0, 0), "steer: 1": (1, 0, 0), "gas: 1": (0, 1, 0), "brake: 1": (0, 0, 1)},
        (0, 0, 0),
    ),
    Game("LunarLander", single("LunarLander-v3"), {"left engine": 1, "main engine": 2, "right engine": 3}, 0),
    Game(
        "LunarLander, continuous",
        single("LunarLander-v3", continuous=True),
        {"main engine: 1": (1, 0), "side engine: -1": (0, -1), "side engine: 1": (0, 1)},
        (0, 0),
    ),
    Game("Breakout", single("ale_py:ALE/Breakout-v5"), ATARI, 0),
    Game("Pong", single("ale_py:ALE/Pong-v5"), {**ATARI, "rightfire": 4, "leftfire": 5}, 0),
    Game(
        "MiniGrid",
        single("minigrid:MiniGrid-DoorKey-5x5-v0"),
        {"left": 0, "right": 1, "forward": 2, "pickup": 3, "drop": 4, "toggle": 5, "done": 6},
        None,
    ),
    Game("FrozenLake", single("FrozenLake-v1"), {"left": 0, "down": 1, "right": 2, "up": 3}, None),
    Game(
        "Taxi",
        single("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"),
        {"down": 0, "up": 1, "right": 2, "left": 3, "take in": 4, "drop off": 5},
        None,
    ),
    Game("Blackjack", single("Blackjack-v1"), {"stick": 0, "hit": 1}, None),
    Game("MountainCar, continuous", single("MountainCarContinuous-v0"), {"push: -1": (-1,), "push: 1": (1,)}, (0,)),
    Game(
        "simple_tag",
        tag,
        {"left": 1, "right": 2, "down": 3, "up": 4},
        0,
    ),
    Game(
        "tic-tac-toe",
        board,
        {f"action {place}": place for place in range(9)},
        None,
        # Four games, in each of which these three win.
        order=[f"action {place}" for place in (0, 4, 8, 1, 4, 7, 2, 4, 6, 3, 4, 5)],
    ),
)


def play(page: Page, game: Game, noted: list[Any], seconds: float, hold: Callable[[Sequence[str], bool], None]) -> int:
    """Play each entry of the legend; return how many actions were executed.

    Args:
        page: Where the person has a seat.
        game: What is played.
        noted: What it is stepped with.
        seconds: To play all entries.
        hold: Presses keys, or releases them.

    Raises:
        AssertionError: An action did not happen, or another one did.
    """
    entries = {entry["label"]: entry["keys"] for entry in page.evaluate(ENTRIES)}
    assert set(entries) == set(game.actions), f"expected entries for {sorted(game.actions)}, found {sorted(entries)}"
    count = 0
    for label in game.order or entries:
        keys = entries[label]
        fewer = [game.actions[other] for other, others in entries.items() if set(others) < set(keys)]
        allowed = [game.actions[label], *fewer, *([] if game.idle is None else [game.idle])]
        quiet(page, game, noted)
        del noted[:]
        end = time.monotonic() + seconds / len(entries)
        hold(keys, True)
        wait(page, lambda label=label: any(same(one, game.actions[label]) for one in noted), f"{label} did not happen")
        while time.monotonic() < end and not game.order:
            page.wait_for_timeout(50)
        hold(keys, False)
        quiet(page, game, noted)
        others = [one for one in noted if not any(same(one, other) for other in allowed)]
        assert not others, f"{label} made {others[0]} of {len(noted)} actions, expected {allowed}"
        count += len(noted)
    return count


def same(one: Any, other: Any) -> bool:
    """True if two actions are equal, but for the precision of a number."""
    return bool(np.allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), atol=1e-6))


def wait(page: Page, done: Callable[[], bool], problem: str) -> None:
    """Wait until something happened."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, problem
        page.wait_for_timeout(20)


def quiet(page: Page, game: Game, noted: list[Any]) -> None:
    """Wait until the last press has had its effect: the world does nothing, or waits for a key."""
    if game.idle is not None:
        seen = len(noted)
        wait(page, lambda: len(noted) > seen + 1 and same(noted[-1], game.idle), "no key still does something")
        return
    while True:
        seen = len(noted)
        page.wait_for_timeout(400)
        if len(noted) == seen:
            return


@contextlib.contextmanager
def seated(browser: Browser, game: Game, phone: bool) -> Iterator[tuple[Page, list[Any]]]:
    """Serve a game and take a seat at its page; give the page, and the list of what is executed."""
    noted: list[Any] = []
    size: dict[str, Any] = {"width": 1280, "height": 800}
    with game.serve(noted) as server:
        touch: dict[str, Any] = {"has_touch": True, "is_mobile": True} if phone else {}
        context = browser.new_context(viewport=PHONE if phone else size, **touch)
        page = context.new_page()
        page.goto(server.web_url or "")
        page.wait_for_function("() => !document.getElementById('play').disabled")
        page.click("#begin" if page.is_visible("#begin") else "#play")
        page.wait_for_selector("#legend kbd", state="attached")
        page.wait_for_function("() => document.getElementById('canvas').dataset.pictures > 0")
        try:
            yield page, noted
        finally:
            context.close()


def by_keys(browser: Browser, game: Game, seconds: float) -> int:
    """Play by the keys that the legend shows."""
    with seated(browser, game, phone=False) as (page, noted):

        def hold(keys: Sequence[str], down: bool) -> None:
            for key in keys:
                (page.keyboard.down if down else page.keyboard.up)(NAMES.get(key, key))

        return play(page, game, noted, seconds, hold)


def by_touch(browser: Browser, game: Game, seconds: float) -> int:
    """Play by the buttons for fingers, one finger for each key."""
    with seated(browser, game, phone=True) as (page, noted):
        touches = page.context.new_cdp_session(page)

        def hold(keys: Sequence[str], down: bool) -> None:
            places = [page.evaluate(PLACE, key) for key in keys]
            points = [{**place, "id": number} for number, place in enumerate(places)] if down else []
            touches.send(
                "Input.dispatchTouchEvent", {"type": "touchStart" if down else "touchEnd", "touchPoints": points}
            )

        return play(page, game, noted, seconds, hold)


def chromium() -> str:
    """Return the path of the browser."""
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None)
    if found is None:
        raise SystemExit("chromium is not installed: apt-get install --no-install-recommends chromium")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Play; print what was executed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.web_controls", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each play of each environment (default: 30)")
    parser.add_argument("--only", help="the environments whose name has this in it")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    failed = 0
    with measuring(parser, arguments.busy), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for game in GAMES:
            if arguments.only and arguments.only.lower() not in game.name.lower():
                continue
            said = []
            for way, how in (("keys", by_keys), ("touch", by_touch)):
                try:
                    said.append(f"{way}: {how(browser, game, arguments.seconds)} steps, all as shown")
                except Exception as error:  # the others are played all the same
                    failed += 1
                    said.append(f"{way}: FAILED, {error}")
            print(f"{game.name:24} {len(game.actions)} actions  " + "; ".join(said), flush=True)
        browser.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
