"""A world with a user-defined pacer: three clients share an environment, and vote on each action.

    python examples/voting_world.py

The pacer is a class for `serve_gym(world=…)`: it decides who takes part, and when the environment is stepped. Here that
is when all three have voted. Prints the episode's return, which is the same for all.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from bridge import Decision, Turn, TurnPacer, make_remote, serve_gym


class Voting(TurnPacer):
    """A pacer that steps with the action of most voters; in a tie, with the lowest of these actions."""

    players = ("first", "second", "third")

    def decide(self, turn: Turn) -> Decision:
        """Step when all have voted."""
        if len(turn.actions) < len(self.players):
            return turn.wait()
        votes = Counter(map(int, turn.actions.values()))
        return turn.step(min(votes, key=lambda action: (-votes[action], action)))


def play(url: str, action: int) -> float:
    """Play an episode as one of the voters, always voting for the same action; return its return."""
    env = make_remote(url)
    env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(action)
        total, over = total + reward, terminated or truncated
    env.close()
    return total


def main() -> None:
    """Serve the world, and vote in it: two voters for 0, one for 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id with a Discrete action space")
    arguments = parser.parse_args()
    with serve_gym(arguments.env, world=Voting) as server, ThreadPoolExecutor(3) as threads:
        totals = list(threads.map(play, [f"{server.url}?world="] * 3, [0, 0, 1]))
    print(f"3 voters played an episode: returns {totals}")


if __name__ == "__main__":
    main()
