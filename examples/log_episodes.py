"""A user-defined observer: the server writes a line to a CSV file for each finished episode.

    python examples/log_episodes.py --file episodes.csv

Prints the path of the file and the number of episodes in it. An observer gets what environments return, whether the
actions come from a trainer, a person, or a clock.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from bridge import Episode, Episodes, Listener, Observer, make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset


class EpisodeLog(Observer):
    """An observer that writes the return and the length of each episode."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(["world", "lane", "return", "length"])

    def made(self, world) -> Listener:
        """Listen to a new world."""

        def ended(episode: Episode) -> None:
            self._rows.writerow([world.name, episode.lane, episode.reward, episode.length])

        return Episodes(world.env.facts, ended)

    def close(self) -> None:
        """Close the file with the server."""
        self._file.close()


def main() -> None:
    """Serve an environment, and play in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=Path("episodes.csv"))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with serve_gym("CartPole-v1", num_envs=2, observers=[EpisodeLog(arguments.file)]) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=0)
        envs.action_space.seed(0)
        for _ in range(arguments.steps):
            envs.step(envs.action_space.sample())
        envs.close()
    count = len(arguments.file.read_text().splitlines()) - 1
    print(f"{arguments.file} has {count} episodes")


if __name__ == "__main__":
    main()
