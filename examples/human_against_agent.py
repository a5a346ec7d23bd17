"""In the browser, a person flees from three agents, in real time.

    python examples/human_against_agent.py

Open the printed page, choose the seat `agent_0`, and move with the keys that the page shows. The agents, `adversary_0`
to `adversary_2`, run straight at you; replace `chase` by trained policies. Prints how often you were caught. With
`--bot`, a program flees instead of you. Needs the extras `web` and `pettingzoo`, and `pip install mpe2` for the
environment.
"""

from __future__ import annotations

import argparse
import threading

import numpy as np
from mpe2 import simple_tag_v3

from bridge import make_remote, make_vec_remote, serve_parallel
from bridge.wrappers import BlockingReset

CHASERS = ["adversary_0", "adversary_1", "adversary_2"]
LEFT, RIGHT, DOWN, UP = 1, 2, 3, 4


def towards(offsets: np.ndarray) -> np.ndarray:
    """Return the actions that move along the longer side of the offsets, shape (n, 2), to a target."""
    x, y = offsets.T
    return np.where(np.abs(x) > np.abs(y), np.where(x > 0, RIGHT, LEFT), np.where(y > 0, UP, DOWN))


def chase(observations: np.ndarray) -> np.ndarray:
    """Return the agents' actions: elements 12 and 13 of each observation are the runner's relative position."""
    return towards(observations[:, 12:14])


def flee(url: str, stop: threading.Event) -> None:
    """Play the person's part with a program: run away from the first agent."""
    env = make_remote(url, agent="agent_0", wait="next_frame", player="agent:runner")
    observation, _ = env.reset()
    while not stop.is_set():
        observation, _, terminated, truncated, _ = env.step(int(towards(-observation[None, 8:10])[0]))
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()


def main() -> None:
    """Serve, and play the agents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--fps", type=float, default=10.0)
    parser.add_argument("--bot", action="store_true", help="let a program flee")
    arguments = parser.parse_args()
    with serve_parallel(simple_tag_v3, env_kwargs={"max_cycles": 200}, fps=arguments.fps, web=True) as server:
        print(f"play at {server.web_url}", flush=True)
        print(f"the agents chase agent_0 for {arguments.seconds:g} s", flush=True)
        stop, url = threading.Event(), f"{server.url}?world="
        runner = threading.Thread(target=flee, args=(url, stop))
        if arguments.bot:
            runner.start()
        envs = BlockingReset(make_vec_remote(url, agent=CHASERS, wait="next_frame"))
        observations, _ = envs.reset()
        caught, frames = 0, int(arguments.seconds * arguments.fps)
        for _ in range(frames):
            observations, rewards, _, _, _ = envs.step(chase(observations))
            caught += int(rewards[0] > 0)  # each touch gives 10 to all agents
        stop.set()
        if arguments.bot:
            runner.join()
        envs.close()
        print(f"agent_0 was caught in {caught} of {frames} frames")


if __name__ == "__main__":
    main()
