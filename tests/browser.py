"""The page in a real browser: Chromium, driven by Playwright.

Debian's Chromium without windows: `apt-get install --no-install-recommends chromium-headless-shell`. Where there is
none, the whole one is used, `chromium`, which takes twice the processor time. Playwright: `pip install playwright`,
which needs no browser of its own. The fixtures are in the `conftest.py` of the folders that have such tests.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.places import ROOT

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
TIMEOUT = 60_000  # milliseconds
AXE = ROOT / "tests" / "web_checks" / "node_modules" / "axe-core" / "axe.min.js"
# What axe-core finds in a page.
FINDINGS = """async () => {
  const {violations} = await axe.run();
  return violations.map(({id, nodes}) => `${id}: ${nodes.map(({html}) => html).join(", ")}`);
}"""
# The color in the middle of the picture.
PIXEL = """() => {
  const canvas = document.getElementById("canvas");
  return [...canvas.getContext("2d").getImageData(canvas.width >> 1, canvas.height >> 1, 1, 1).data].slice(0, 3);
}"""
# Make `known` what the page knows, also what it does not show yet.
KNOWN = "async () => { window.known = (await import('/state.js')).state; }"
# Keep what an element of the page says from now on; of the announcements those that are read aloud.
KEEP = """(selector) => {
  const element = document.querySelector(selector), kept = ((window.kept ??= {})[selector] = []);
  const keep = () => element.ariaLive !== "off" && kept.push(element.textContent);
  new MutationObserver(keep).observe(element, {childList: true, characterData: true, subtree: true});
}"""
# Hold a key for some milliseconds; how long it was held.
TAP = """async (milliseconds) => {
  const event = (kind) => document.dispatchEvent(new KeyboardEvent(kind, {key: "ArrowRight", bubbles: true}));
  const began = performance.now();
  event("keydown");
  await new Promise((resolve) => setTimeout(resolve, milliseconds));
  event("keyup");
  return performance.now() - began;
}"""


def _missing() -> str:
    """What is not installed, or nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    return "" if CHROMIUM else "Chromium is not installed: apt-get install --no-install-recommends chromium"


in_browser = pytest.mark.skipif(bool(_missing()), reason=_missing() or "there is a browser")
"""Marks tests that need a browser."""


@contextmanager
def launched(*arguments: str) -> Iterator[Any]:
    """Run Chromium, with further arguments; yield Playwright's object of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *arguments])
        yield chromium
        chromium.close()


@contextmanager
def opened_in(browser: Any) -> Iterator[Callable[..., Any]]:
    """Give a function that opens a URL in a browser profile of its own.

    No page may raise, or break the policy of its content.
    """
    contexts, problems = [], []

    def make(url: str, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []


def shows(page: Any, condition: str) -> None:
    """Wait until what the page shows meets a condition in JavaScript."""
    page.wait_for_function(condition)


def says(page: Any, selector: str, text: str) -> None:
    """Wait until an element of the page has a text in it, which stays there until the test does something."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
    )


def keep(page: Any, selector: str) -> None:
    """Keep what an element says from now on, for `said`."""
    page.evaluate(KEEP, selector)


def said(page: Any, selector: str, text: str) -> None:
    """Wait until an element has had a text in it since `keep`: by now it may have the next one."""
    page.wait_for_function(
        "([selector, text]) => window.kept[selector].some((each) => each.includes(text))", arg=[selector, text]
    )
