"""A game in a web page that dials the trainer, `examples/web_game`, in headless Chromium."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote
from bridge.dial import DialListener
from bridge.errors import EnvironmentFailedError, InvalidActionError
from bridge.testing import check_server
from tests.browser import in_browser
from tests.places import ROOT
from tests.support import free_port, until

pytestmark = in_browser
FOLDER = ROOT / "examples" / "web_game"
# An environment with all kinds of spaces, in place of the game.
ECHO = """
import {box, discrete, serve, text} from "./bridge_env.js";
class Echo {
  observationSpace = {numbers: box(-10, 10, [2, 3], "float64"), pixels: box(0, 255, [4], "uint8"), said: text()};
  actionSpace = {numbers: box(-10, 10, [2, 3], "float64"), choice: discrete(3)};
  answer(numbers, said) { return {numbers, pixels: new Uint8Array([1, 2, 3, 255]), said}; }
  async reset(seed) { return this.answer(new Array(6).fill(0), `seed ${seed}`); }
  async step({numbers, choice}) {
    if (choice === 2) throw new Error("the page is broken");
    return {observation: this.answer(numbers, "ä"), reward: 0.1, terminated: false, truncated: choice === 1};
  }
}
serve("ws://127.0.0.1:PORT", () => new Echo(), {name: "echo", token: "secret~?"});
"""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The URL of a server of files, which has the example's folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=FOLDER)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser: Any, site: str) -> Iterator[Any]:
    """Opens the game in a tab that dials a port; nothing in it may raise."""
    context, problems = browser.new_context(), []

    def make(port: int, more: str = "") -> Any:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{site}/index.html?dial=ws://127.0.0.1:{port}{more}")
        return page

    yield make
    context.close()
    assert problems == []


def names(listener: DialListener) -> list[str]:
    return [endpoint.name for endpoint in listener.endpoints()]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "&fps=120"], ids=["lock-step", "real-time"])
def test_the_page_passes_the_conformance_check_through_a_listener(opened: Any, more: str) -> None:
    port = free_port()
    opened(port, more)
    report = check_server(f"listen://127.0.0.1:{port}", timeout=30.0)
    assert report.ok, str(report)
    assert "passed" in str(report)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_episode_and_the_spaces_are_those_of_the_page(opened: Any) -> None:
    with contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0)) as listener:
        opened(listener.port)
        seen = []
        for _ in range(2):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            assert envs.single_action_space.n == 3
            assert envs.single_observation_space.shape == (3,)
            observations, _ = envs.reset(seed=7)
            episode = [observations]
            for step in range(60):
                observations, rewards, terminations, _, _ = envs.step(np.full(2, step % 3))
                episode += [observations, rewards, terminations]
            seen.append(np.concatenate([np.ravel(part) for part in episode]))
            assert not np.array_equal(episode[0][0], episode[0][1])  # each slot has a seed of its own
            envs.close()
        assert np.array_equal(*seen)


def test_spaces_by_name_texts_tokens_and_errors_of_a_page(browser: Any, site: str) -> None:
    with contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0, token="secret~?")) as listener:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{site}/nothing.html")  # a page that holds nothing, of the same site
        page.add_script_tag(type="module", content=ECHO.replace("PORT", str(listener.port)))
        env = make_remote(listener.endpoints()[0].url)
        assert env.observation_space["numbers"].dtype == np.float64
        assert env.action_space["choice"].n == 3
        observation, _ = env.reset(seed=2**64 + 5)
        assert observation["said"] == "seed 5"  # as much as a number of JavaScript holds exactly
        numbers = np.linspace(-1.0, 1.0, 6).reshape(2, 3)
        observation, reward, _, truncated, _ = env.step({"numbers": numbers, "choice": 0})
        assert np.array_equal(observation["numbers"], numbers)
        assert observation["pixels"].tolist() == [1, 2, 3, 255]
        assert observation["said"] == "ä"
        assert (reward, truncated) == (0.1, False)
        with pytest.raises(InvalidActionError):
            env.step({"numbers": numbers * 100, "choice": 0})
        with pytest.raises(EnvironmentFailedError, match="the page is broken"):
            env.step({"numbers": numbers, "choice": 2})
        env.reset()
        assert env.step({"numbers": numbers, "choice": 1})[3]
        env.close()
        context.close()


def test_a_page_with_the_wrong_token_says_so(opened: Any) -> None:
    with contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0, token="secret")) as listener:
        page = opened(listener.port, "&token=wrong")
        page.wait_for_function("() => document.getElementById('status').textContent.includes('the token is wrong')")


@pytest.mark.slow
def test_a_closed_tab_truncates_its_episode_and_a_reopened_one_has_its_slot_again(opened: Any) -> None:
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0)))
        tabs = {name: opened(listener.port, f"&name={name}") for name in "abcd"}
        until(lambda: names(listener) == ["a", "b", "c", "d"])
        envs = closing.enter_context(
            contextlib.closing(make_vec_remote(listener, num_envs=4, blocking=True, connect_timeout=30.0))
        )
        envs.reset(seed=0)

        def places() -> list[str]:
            return [url.partition("//")[2][0] for url in envs.env.urls]

        def step() -> np.ndarray[Any, Any]:
            truncations: np.ndarray[Any, Any] = envs.step(np.ones(4, np.int64))[3]
            return truncations

        assert sorted(places()) == ["a", "b", "c", "d"]
        away = places().index("d")
        step()
        tabs["d"].close()
        truncated = np.zeros(4, np.int64)

        def is_told() -> bool:
            nonlocal truncated
            truncated += step()
            return bool(truncated.any())

        until(is_told)
        for _ in range(3):
            truncated += step()
        assert truncated.tolist() == [int(slot == away) for slot in range(4)]
        assert "d" not in places()
        opened(listener.port, "&name=d")

        def is_back() -> bool:
            step()
            return sorted(places()) == ["a", "b", "c", "d"]

        until(is_back)


@pytest.mark.slow
def test_the_example_trains_a_policy_on_four_tabs_at_once(opened: Any) -> None:
    port = free_port()
    command = [sys.executable, str(FOLDER / "train.py"), "--page", "0", "--steps", "1600"]
    process = subprocess.Popen(
        [*command, "--listen", f"listen://127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(process.stdout or []))
        reading.start()
        tabs = [opened(port) for _ in range(2)]
        until(lambda: "2 of 4 tabs are open\n" in lines, 60)
        assert [tab.locator("canvas").count() for tab in tabs] == [0, 0], "or one tab would play two of the games"
        tabs += [opened(port) for _ in range(2)]
        for tab in tabs:
            tab.wait_for_selector("canvas")
        assert [tab.locator("canvas").count() for tab in tabs] == [1, 1, 1, 1]
        process.wait(240)
        reading.join()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    returns = [float(line.split("return ")[1].split(" ")[0]) for line in lines if "return" in line]
    assert len(returns) == 8, lines
    assert returns[-1] > returns[0] + 2.0  # a fifth of the way from -5 to 5, and more
    assert "0 lost" in lines[-1]
