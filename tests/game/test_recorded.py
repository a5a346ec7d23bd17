"""A recording of a game holds what the program did: each action that it took, and how its last round ended."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from bridge import make_remote, serve_game
from bridge.errors import SettingError
from bridge.recording.episodes import load_episode
from bridge.recording.exports import rate_of
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from tests.game.loops import ACTION, OBSERVATION, check_recorded, walking
from tests.support import until


@pytest.mark.parametrize("wait", [False, True])
def test_each_recorded_action_is_the_one_that_led_to_the_next_observation(process, wait, tmp_path):
    keywords = {"timeout": 0.02} if wait else {}
    with walking(wait, length=12, process=process, record=tmp_path, default_action=3, **keywords) as walk:
        env = make_remote(walk.game.url)
        random = np.random.default_rng(0)
        for seed in range(8):
            env.reset(seed=seed)
            for _ in range(random.integers(1, 15)):
                _, _, terminated, truncated, _ = env.step(int(random.integers(5)))
                if random.random() < 0.3:
                    # In lock step the program goes on without the agent meanwhile.
                    calls = len(walk.taken)
                    until(lambda calls=calls: len(walk.taken) > calls + 1)
                if terminated or truncated:
                    break
        env.close()
    episodes = read_folder(tmp_path).episodes()
    assert {episode.end for episode in episodes} >= {"terminated"}
    for episode in episodes:
        check_recorded(episode)


def test_the_frames_that_a_program_made_without_its_agent_are_nobodys(process, tmp_path):
    with walking(True, length=12, process=process, record=tmp_path, default_action=3, timeout=0.1) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=0)
        # On a slow machine this may be an action of a later frame than the first.
        _, before, *_ = env.step(1)
        until(lambda: len(walk.begun) > 1)
        _, reward, terminated, *_ = env.step(2)
        assert terminated, "the round was over before"
        env.close()
    episode = read_folder(tmp_path).episodes()[0]
    assert episode.end == "terminated"
    assert set(episode.players) == {"agent", "default"}
    assert sorted(np.asarray(load_episode(episode).actions).tolist()) == [1, *[3] * 11]
    assert before + reward == 1.0 + 3.0 * 11, "the agent gets what it has missed"


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("ends", ["close", "block", "exception"])
def test_the_episode_of_a_closed_game_is_truncated_and_that_of_one_that_raised_has_failed(
    process, wait, ends, tmp_path
):
    steps, errors, found = [], [], []

    def play():
        try:
            with contextlib.closing(make_remote(game.url)) as env:
                env.reset(seed=1)
                while True:
                    steps.append(env.step(1))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=play)
    try:
        # A slow machine may leave a game's process without time for a second.
        with serve_game(OBSERVATION, ACTION, process=process, record=tmp_path, standstill=30.0) as game:
            thread.start()
            position = 0.0
            while len(steps) < 5:
                assert not found, found
                action = game.exchange(np.array([0, position], np.float32), wait=wait)
                position = 0.0 if game.begins else position + action
                time.sleep(0.002)  # a frame
            if ends == "close":
                game.close()
            elif ends == "exception":
                raise ValueError("the dragon has escaped")
    except ValueError as error:
        errors.append(error)
    thread.join(20)
    (episode,) = read_folder(tmp_path).episodes()
    assert episode.end == ("failed" if errors else "truncated")
    data = load_episode(episode)
    assert set(np.asarray(data.actions).tolist()) <= {0, 1}
    assert found, "the agent hears of it"
    if errors:
        said = str(found[0])
        assert "the dragon has escaped" in said
        assert "The game has ended" in said
        assert "reset() to begin a new episode" not in said, "there is none"
    with pytest.raises(SettingError, match="a program with a loop of its own") as refused:
        verify(episode)
    assert "record frames" in str(refused.value)
    assert "--env" not in str(refused.value), "nothing can be named that makes it"


def test_a_film_is_as_fast_as_the_program_was(tmp_path):
    with walking(False, pause=0.1, record=tmp_path) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=0)
        until(lambda: env.step(1)[0][0] > 5)
        env.close()
    episode = max(read_folder(tmp_path).episodes(), key=lambda each: each.length)
    assert 0 < episode.fps <= 10, "a call is 0.1 s after the one before, or later"
    assert rate_of(episode) == episode.fps
    assert rate_of(episode, 24) == 24
