"""Serve an environment, and play it over the network, in one file.

    python examples/minimal.py

Prints the server's URL, and the returns of three episodes of CartPole with a random policy: the number of steps for
which the pole stayed up.
"""

from __future__ import annotations

import argparse

from bridge import make_remote, serve_gym

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--episodes", type=int, default=3)
arguments = parser.parse_args()

with serve_gym("CartPole-v1") as server:
    print(f"serving CartPole-v1 at {server.url}")
    env = make_remote(server.url)  # from here on like any gymnasium.Env
    env.action_space.seed(0)
    for episode in range(arguments.episodes):
        observation, info = env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
            total += reward
            over = terminated or truncated
        print(f"episode {episode}: return {total:g}")
    env.close()
print(f"{arguments.episodes} episodes were played over the network; the server has stopped")
