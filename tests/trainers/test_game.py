"""Stable-Baselines3's PPO learns a game that has a loop of its own, and waits for its actions."""

from __future__ import annotations

import threading

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from bridge import make_remote, serve_game
from bridge.errors import ClosedError

torch.set_num_threads(1)


def reach_a_dot(game) -> None:
    """Play rounds in which a dot is to be reached on a line; each frame costs, and the dot pays."""
    place = dot = frame = 0
    reward = 0.0
    try:
        while True:
            seen = np.array([dot - place, place], np.float32) / 5
            action = game.exchange(
                seen, reward, terminated=place == dot and frame > 0, truncated=frame >= 30, wait=True
            )
            if game.begins:
                random = np.random.default_rng(game.seed)
                place, dot = (int(number) for number in random.choice(np.arange(-5, 6), 2, replace=False))
                frame, reward = 0, 0.0
                continue
            place, frame = int(np.clip(place + action - 1, -5, 5)), frame + 1
            reward = 1.0 if place == dot else -0.1
    except ClosedError:
        pass


def test_ppo_learns_to_reach_a_dot():
    with serve_game(spaces.Box(-2, 2, (2,), np.float32), spaces.Discrete(3)) as game:
        thread = threading.Thread(target=reach_a_dot, args=(game,))
        thread.start()
        env = Monitor(make_remote(game.url))
        try:
            model = PPO("MlpPolicy", env, n_steps=256, learning_rate=3e-3, seed=0, device="cpu")
            model.learn(8_000)
            mean, _ = evaluate_policy(model, env, 20)
            assert mean > 0.3, "at random it is about -2"
        finally:
            env.close()
            game.close()
            thread.join(20)
