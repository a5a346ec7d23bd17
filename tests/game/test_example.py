"""`examples/game_loop.py`: alone, with an agent over the network, and with a person in Chromium who takes over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from bridge.cli import main
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from tests.browser import in_browser, launched, opened_in, says, shows
from tests.places import ROOT

EXAMPLE = ROOT / "examples" / "game_loop.py"


@contextmanager
def running(*options):
    """Run the example without a display; give the line with its URLs, and the process."""
    command = [sys.executable, str(EXAMPLE), *map(str, options)]
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as game:
        try:
            yield game.stdout.readline(), game
        finally:
            game.kill()


@pytest.mark.parametrize("options", [[], ["--agent"]])
def test_it_runs_alone_and_with_an_agent(options):
    with running("--seconds", 2, *options) as (_, game):
        out, errors = game.communicate(timeout=60)
        assert re.fullmatch(r"\d+ dots, [\d.]+ frames a second\n", out), errors
        assert errors == ""


def test_it_has_at_most_80_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 80


@in_browser
@pytest.mark.slow
def test_a_person_in_a_browser_takes_over_from_an_agent_and_gives_back_and_both_are_exported(tmp_path):
    folder = tmp_path / "runs"
    with (
        running("--agent", "--web", "--record", folder) as (line, game),
        launched() as chromium,
        opened_in(chromium) as opened,
    ):
        page = opened(re.search(r"http://\S+", line).group())
        says(page, "#worlds", "Dots")
        says(page, "#play", "Take over")
        page.click("#play")
        says(page, "#badge", "agent acts: hold a key")
        shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")
        page.keyboard.down("ArrowRight")
        says(page, "#badge", "you act")
        before = page.evaluate("() => Number(document.getElementById('canvas').dataset.pictures)")
        shows(page, f"() => document.getElementById('canvas').dataset.pictures > {before + 3}")
        page.keyboard.up("ArrowRight")
        says(page, "#badge", "agent acts")
        page.keyboard.press("Escape")
        game.terminate()  # SDL makes it the event QUIT
        out, errors = game.communicate(timeout=60)
        assert "dots" in out, errors
    episodes = read_folder(folder).episodes()
    assert episodes
    players = [player for episode in episodes for player in episode.players]
    assert "agent" in players
    assert any(player.startswith("person") for player in players)
    person = next(episode for episode in episodes if any(each.startswith("person") for each in episode.players))
    data = load_episode(person)
    assert len(data.observations) == len(data.actions) + 1
    assert main(["export", str(folder), "--lerobot", str(tmp_path / "dataset"), "--unfinished", "--fps", "30"]) == 0
