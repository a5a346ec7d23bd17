"""Record an expert in an environment, and clone a policy from the recording.

    python examples/record_and_clone.py --folder runs

A hand-written expert balances CartPole over the network, and the server records it. Then a linear policy is fitted to
the recorded observations and actions by least squares, and plays. Prints the mean returns of the expert and of the
clone. The same option records a person at the server's page or in `gymnasium-bridge play`, as in notebooks/05.
Needs the extra `record`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bridge import Recording, make_remote, serve_gym
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder


def expert(observation: np.ndarray) -> int:
    """Push in the direction in which the pole falls, with a correction towards the center."""
    place, speed, angle, turn = observation
    return int(angle + 0.25 * turn + 0.02 * place + 0.05 * speed > 0)


def play(url: str, policy: Callable[[np.ndarray], int], episodes: int, player: str) -> float:
    """Return the mean return of some episodes."""
    env = make_remote(url, player=player)
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy(observation))
            total += reward
            over = terminated or truncated
        returns.append(total)
    env.close()
    return float(np.mean(returns))


def clone(folder: Path) -> Callable[[np.ndarray], int]:
    """Fit a policy to the expert's actions."""
    recorded = [load_episode(episode) for episode in read_folder(folder).episodes()]
    recorded = [episode for episode in recorded if set(episode.by) == {"agent:expert"}]
    observations = np.concatenate([np.stack(episode.observations[:-1]) for episode in recorded])
    actions = np.concatenate([np.asarray(episode.actions) for episode in recorded])
    weights, *_ = np.linalg.lstsq(observations, 2.0 * actions - 1.0, rcond=None)
    return lambda observation: int(observation @ weights > 0)


def main() -> None:
    """Record, clone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--episodes", type=int, default=10)
    arguments = parser.parse_args()
    with serve_gym("CartPole-v1", record=Recording(arguments.folder, observations=True)) as server:
        mean = play(server.url, expert, arguments.episodes, "agent:expert")
    print(
        f"recorded {arguments.episodes} episodes in {arguments.folder}/, "
        f"which `gymnasium-bridge runs {arguments.folder}` lists"
    )
    print(f"the expert: mean return {mean:.1f} of at most 500")
    policy = clone(arguments.folder)
    with serve_gym("CartPole-v1") as server:
        mean = play(server.url, policy, arguments.episodes, "agent:clone")
    print(f"its clone:  mean return {mean:.1f} of at most 500")


if __name__ == "__main__":
    main()
