"""Programs with a loop of their own, for tests: in a thread, until a test has seen enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge import serve_game
from bridge.errors import ClosedError
from bridge.recording.episodes import load_episode

OBSERVATION = spaces.Box(-1e6, 1e6, (2,), np.float32)
ACTION = spaces.Discrete(5)


class Walk:
    """A game: the action is added to a position, which is the reward, too. A round ends after some frames.

    Args:
        game: What `serve_game` returned.
        wait: Whether it waits for actions.
        length: The frames of a round.
        pause: Seconds between two calls, where it does not wait.
    """

    def __init__(self, game: Any, *, wait: bool, length: int = 10**9, pause: float = 0.002) -> None:
        self.game, self.wait, self.length, self.pause = game, wait, length, pause
        self.taken: list[Any] = []
        """What each call returned."""
        self.begun: list[tuple[Any, Any]] = []
        """Seed and options of each round."""
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        position = frame = 0
        reward = 0.0
        try:
            while not self.over.is_set():
                ends = frame >= self.length
                seen = np.array([frame, position], np.float32)
                action = self.game.exchange(seen, reward, terminated=ends, wait=self.wait)
                self.taken.append(action)
                if self.game.begins:
                    self.begun.append((self.game.seed, self.game.options))
                    position = frame = 0
                else:
                    position += int(action)
                    reward = float(action)
                    frame += 1
                if not self.wait:
                    self.over.wait(self.pause)
        except ClosedError:
            pass  # a wait ends so
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Walk:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.game.close()
        self._thread.join(20)
        if self.error is not None:
            raise self.error


@contextmanager
def walking(wait: bool, length: int = 10**9, pause: float = 0.002, **keywords: Any) -> Iterator[Walk]:
    """Serve a `Walk` that runs in a thread."""
    with Walk(serve_game(OBSERVATION, ACTION, **keywords), wait=wait, length=length, pause=pause) as walk:
        yield walk


def check_recorded(episode: Any) -> None:
    """Check that each recorded action of a `Walk` is the one that led to the next observation, in all of its frames."""
    data = load_episode(episode)
    seen, actions = np.array(data.observations), np.asarray(data.actions)
    frames = np.ones(len(actions))
    if episode.stream.header.get("fps"):
        frames = np.diff(episode.stream.cells("frame_number", episode.own).to_numpy())
    elif episode.end == "truncated":  # of the last action the program has shown nothing
        frames[-1:] = 0
    np.testing.assert_array_equal(np.diff(seen[:, 0]), frames)
    np.testing.assert_array_equal(np.diff(seen[:, 1]), actions * frames)


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run a function in a thread that has ended when this ends."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
