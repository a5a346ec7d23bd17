"""A trainer that a person takes over from, and how the page does it."""

from __future__ import annotations

import contextlib
import threading
import time

from bridge import make_remote
from tests.browser import says

PAUSE = 0.005  # seconds from one step to the next


class Trainer:
    """Steps the default world in a thread of its own, some hundred times a second.

    It is far quicker than any person, and leaves the processor to the page and its server.

    Attributes:
        steps: For each step: the time before it was sent, the time after its answer arrived, and the info.
    """

    def __init__(self, server):
        self.steps: list[tuple[float, float, dict]] = []
        self._env = make_remote(f"{server.url}?world=")
        self._env.reset(seed=0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self):
        while not self._over.wait(PAUSE):
            sent = time.monotonic()
            info = self._env.step(0)[4]
            self.steps.append((sent, time.monotonic(), info))

    @property
    def interventions(self):
        return sum("intervention" in info for _, _, info in list(self.steps))

    @property
    def last(self):
        return self.steps[-1][2] if self.steps else {}

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()
        with contextlib.suppress(Exception):
            self._env.close()


def take_over(page):
    says(page, "#play", "Take over")
    page.click("#play")
    says(page, "#badge", "agent acts: hold a key")
