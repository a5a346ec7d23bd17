"""An environment of several agents (PettingZoo), played by one client, and then by one client per agent.

    python examples/multi_agent.py

First one client plays all agents, as a PettingZoo ParallelEnv. Then two clients share a world: each is one agent, and a
step waits until both have acted. Prints each agent's return, which is the same for both: the speaker and the listener
share their reward. Needs the extra `pettingzoo`, and `pip install mpe2` for the environment.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from mpe2 import simple_speaker_listener_v4

from bridge import make_parallel_remote, make_remote, serve_parallel


def play_all(url: str, steps: int) -> None:
    """Play all agents."""
    env = make_parallel_remote(url)
    env.reset(seed=0)
    totals = dict.fromkeys(env.agents, 0.0)
    for _ in range(steps):
        if not env.agents:  # the episode is over
            env.reset()
        _, rewards, _, _, _ = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        for agent, reward in rewards.items():
            totals[agent] += reward
    env.close()
    print(f"one client played {len(totals)} agents for {steps} steps")
    for agent, total in totals.items():
        print(f"  {agent}: return {total:.2f}")


def play_one(url: str, agent: str, steps: int) -> str:
    """Play one agent of a world, beside other clients."""
    env = make_remote(url, agent=agent)
    env.reset()
    total = 0.0
    for _ in range(steps):
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        total += reward
        if terminated or truncated:
            env.reset()
    env.close()
    return f"  {agent}: return {total:.2f}"


def main() -> None:
    """Serve, and play."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="fewer than 25: an episode")
    arguments = parser.parse_args()
    with serve_parallel(simple_speaker_listener_v4) as server:
        play_all(server.url, arguments.steps)
        with ThreadPoolExecutor() as threads:
            agents = ["speaker_0", "listener_0"]
            lines = list(threads.map(lambda agent: play_one(f"{server.url}?world=", agent, arguments.steps), agents))
        print(f"{len(agents)} clients played an agent each for {arguments.steps} steps", *lines, sep="\n")


if __name__ == "__main__":
    main()
