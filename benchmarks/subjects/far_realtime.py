"""Worlds of 60 frames a second behind a round trip of 80 ms: steps, ages of observations, delays of actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script
from bridge import make_vec_remote
from bridge.wrappers import BlockingReset, Throttle

FPS = 60
ROUND_TRIP = 0.08
LANES = 8
WARM_UP = 3.0
"""Seconds, in which the client learns how the clocks differ."""
GAME = """
import sys, time
import gymnasium, numpy as np
from bridge import serve_gym

class Game(gymnasium.Env):
    # Observation: the time of the frame, the action that it used, and the time at which that was used first.
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(10**6)

    def reset(self, *, seed=None, options=None):
        self.used = 0, 0.0
        return np.array([time.monotonic(), 0, 0.0]), {}

    def step(self, action):
        now = time.monotonic()
        if action != self.used[0]:
            self.used = int(action), now
        return np.array([now, *self.used]), 0.0, False, False, {}

lanes = int(sys.argv[2])
with serve_gym(Game, fps=float(sys.argv[1]), **({"num_envs": lanes} if lanes > 1 else {})) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
# Each direction of each connection has a delay, and a jitter that lets nothing overtake. What is lost comes with the
# retransmission, and holds up all that is behind it.
LINK = """
import os, queue, random, socket, sys, threading, time
port, delay, jitter, loss, again = int(sys.argv[1]), *map(float, sys.argv[2:])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()

def write(under_way, sink):
    while True:
        due, data = under_way.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            sink.sendall(data) if data else sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

def read(source, sink):
    under_way, due, data = queue.Queue(), 0.0, b" "
    threading.Thread(target=write, args=(under_way, sink), daemon=True).start()
    while data:
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        late = again if random.random() < loss else 0.0
        due = max(due, time.monotonic() + delay + random.random() * jitter + late)
        under_way.put((due, data))

while True:
    pair = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
    for sock, other in (pair, pair[::-1]):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=read, args=(sock, other), daemon=True).start()
"""
LINKS = {"steady": (ROUND_TRIP / 2, 0.0, 0.0, 0.0), "rough": (ROUND_TRIP / 2 - 0.015, 0.03, 0.02, 0.2)}
"""Seconds one way, seconds of jitter, the probability of a loss, and seconds until what was lost comes."""


class Play:
    """The client's measurements while it plays, over all lanes: each step leaves an action of its own."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._sent: list[dict[int, float]] = [{} for _ in range(envs.num_envs)]
        self._number = 0
        self.ages: list[float] = []
        self.delays: list[float] = []
        self.errors: list[float] = []

    def step(self) -> None:
        """Step once, and note what the answer says."""
        self._number += 1
        begun = time.monotonic()
        observations, _, _, _, infos = self._envs.step(np.full(len(self._sent), self._number % 10**6))
        now, told = time.monotonic(), infos["latency"]["observation_age"].tolist()
        for (at, action, used_at), sent, age in zip(observations.tolist(), self._sent, told, strict=True):
            sent[self._number] = begun
            self.ages.append(now - at)
            self.errors.append(abs(now - at - age))
            if int(action) in sent:
                self.delays.append(used_at - sent.pop(int(action)))

    def run(self, seconds: float) -> float:
        """Play for some seconds; return the steps a second."""
        for figures in (self.ages, self.delays, self.errors):
            figures.clear()
        start, count = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            self.step()
            count += 1
        return count / (time.monotonic() - start)


@contextmanager
def playing(link: str, *, throttle: bool, lanes: int = 1, **keywords: Any) -> Iterator[Play]:
    """Join such a world through a link, and begin to play."""
    with Script(GAME, str(FPS), str(lanes)) as port, Script(LINK, port, *map(str, LINKS[link])) as near:
        remote = make_vec_remote(f"grpc://127.0.0.1:{near}", **keywords)
        envs = BlockingReset(Throttle(remote) if throttle else remote)
        try:
            envs.reset(seed=0)
            play = Play(envs)
            play.run(WARM_UP)
            yield play
        finally:
            envs.close()


def _measured(
    link: str, figure: Callable[[Play], list[float]] | None, share: float, throttle: bool, keywords: dict[str, Any]
) -> Callable[[], Iterator[Measure]]:
    def measured() -> Iterator[Measure]:
        with playing(link, throttle=throttle, **keywords) as play:

            def measure(seconds: float) -> float:
                rate = play.run(seconds)
                return rate if figure is None else float(np.percentile(figure(play), share)) * 1e3

            yield measure

    return measured


def _add(
    link: str, what: str, figure: Callable[[Play], list[float]] | None, throttle: bool = False, lanes: int = 1
) -> str:
    """Register a subject; return its name."""
    name = f"far-{link}-{what}{'-throttled' * throttle}{'-lanes' * (lanes > 1)}"
    share = 95.0 if link == "steady" else 50.0
    text = "" if figure is None else f", {share:g} % of them are below"
    more = f", {lanes} lanes" if lanes > 1 else ", Throttle" * throttle
    title = f"60 fps at 80 ms, {link} link{more}: {what}{text}"
    unit = "steps/s" if figure is None else "ms"
    register = subject(name, title, group=f"far-{what}", unit=unit, higher_is_better=figure is None)
    register(_measured(link, figure, share, throttle, {"lanes": lanes}))
    return name


subject(
    "far-rough-steps-own-answers", "60 fps at 80 ms, rough link, wait=now: steps", group="far-steps", unit="steps/s"
)(_measured("rough", None, 50.0, False, {"wait": "now"}))
for _link in LINKS:
    for _throttle, _lanes in ((False, 1), (True, 1), (False, LANES)):
        goal("B-14", _add(_link, "steps", None, _throttle, _lanes), at_least=55.0)
        _age = _add(_link, "age", lambda play: play.ages, _throttle, _lanes)
        goal("B-14", _age, at_most=(ROUND_TRIP / 2 + (1.5 / FPS)) * 1e3)
        _action = _add(_link, "action", lambda play: play.delays, _throttle, _lanes)
        goal("B-14", _action, at_most=(ROUND_TRIP / 2 + 1 / FPS) * 1e3)
    for _lanes in (1, LANES):
        goal("B-14", _add(_link, "error", lambda play: play.errors, lanes=_lanes), at_most=5.0)
