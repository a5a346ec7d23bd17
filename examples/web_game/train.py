"""Train a policy on a game that runs in web pages, with all open pages.

    python train.py

This opens a listener, serves the page at http://127.0.0.1:8000 and waits until it is open in four tabs, each of which
plays. The training uses policy gradients with NumPy; the policy is linear in the positions of the ball and the paddle.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bridge import make_vec_remote
from bridge.dial import DialListener

Array = np.ndarray[Any, Any]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the folder of the page without logging."""

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def probabilities(weights: Array, observations: Array) -> tuple[Array, Array]:
    """Return the features, of shape (tabs, 4), and the probabilities of the three actions, of shape (tabs, 3)."""
    paddle, ball, _ = observations.T
    features = np.stack([np.ones_like(ball), np.clip(4 * (ball - paddle), -1, 1), paddle, ball], axis=1)
    scores = np.exp(features @ weights)
    return features, scores / scores.sum(axis=1, keepdims=True)


def wait_for_tabs(listener: DialListener, tabs: int) -> None:
    """Wait until this many tabs are open: otherwise the first would play several games, and later ones none."""
    there = -1
    while there < tabs:
        if there != (there := len(listener.endpoints())):
            print(f"{there} of {tabs} tabs are open", flush=True)
        time.sleep(0.2)


def main() -> None:
    """Wait for the tabs, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--listen", default="listen://127.0.0.1:6100", help="where the pages dial in")
    parser.add_argument("--page", type=int, default=8000, help="the port of the page; 0: it is served elsewhere")
    parser.add_argument("--tabs", type=int, default=4, help="how many games to play at a time")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each game")
    arguments = parser.parse_args()
    if arguments.page:
        handler = functools.partial(Quiet, directory=str(Path(__file__).parent))
        pages = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.page), handler)
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        print(f"open http://127.0.0.1:{arguments.page} in {arguments.tabs} tabs", flush=True)
    listener = DialListener(arguments.listen, timeout=600.0)
    wait_for_tabs(listener, arguments.tabs)
    envs = make_vec_remote(listener, num_envs=arguments.tabs, blocking=True, timeout=600.0)
    random = np.random.default_rng(0)
    weights = np.zeros((4, 3))
    observations, _ = envs.reset(seed=0)
    since: list[list[Array]] = [[] for _ in range(arguments.tabs)]  # gradients of the choices since the last ball
    returns, running, lost = [], np.zeros(arguments.tabs), 0
    baseline = 0.0  # the moving average of the rewards
    for step in range(1, arguments.steps + 1):
        features, chances = probabilities(weights, observations)
        actions = (chances.cumsum(axis=1) > random.random((arguments.tabs, 1))).argmax(axis=1)
        gradients = features[:, :, None] * (np.eye(3)[actions] - chances)[:, None, :]
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        running += rewards
        lost += int(truncations.sum())  # a tab that was closed
        for tab in range(arguments.tabs):
            since[tab].append(gradients[tab])
            if rewards[tab]:  # each ball gives an update of its own
                weights += 0.03 * (rewards[tab] - baseline) * np.sum(since[tab], axis=0)
                baseline += 0.05 * (rewards[tab] - baseline)
            if rewards[tab] or truncations[tab]:
                since[tab].clear()
            if terminations[tab]:
                returns.append(running[tab])
            if terminations[tab] or truncations[tab]:
                running[tab] = 0.0
        if step % 200 == 0 and returns:
            mean = np.mean(returns[-20:])
            print(f"step {step}: {len(returns)} episodes, {lost} lost, return {mean:.2f} (-5 to 5)", flush=True)
    envs.close()
    listener.close()


if __name__ == "__main__":
    main()
