"""Search a tree of saved states: one message forks one state into 64 lanes, over the network.

    python examples/tree_search.py

MountainCar needs a detour: to get up the hill on the right, the car must go left first. A greedy policy, which pushes
towards the flag, never gets there. The search takes the state that was tried least, forks it into 64 lanes, and lets
each lane act at random for some steps. If a lane reaches a new place, its state is saved as a node of the tree. Prints
the return of the greedy policy, the size of the tree, and the return of the path that was found, replayed from the
start.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from bridge import SavedState, make_remote, make_vec_remote, serve_gym

ENV, FORKS, RIGHT = "MountainCar-v0", 64, 2
STEPS = 12
"""The number of steps of a fork."""
PLACES = 20
"""The number of parts of each axis, position and velocity: each combination is a place, for which one state is kept."""


@dataclasses.dataclass
class Node:
    """A node of the tree, for one place."""

    state: SavedState
    observation: np.ndarray[Any, Any]
    parent: Node | None
    actions: list[int]
    """The actions that lead here from the parent."""
    tries: int = 0

    def order(self) -> tuple[int, float]:
        """Return the sort key: the least tried first, and among these the one furthest from rest in the valley."""
        return self.tries, -abs(self.observation[0] + 0.5) - 8.0 * abs(self.observation[1])

    def way(self) -> list[int]:
        """Return the actions that lead here from the start."""
        return [] if self.parent is None else [*self.parent.way(), *self.actions]


def place_of(observation: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the place of an observation."""
    low, high = np.array([-1.2, -0.07]), np.array([0.6, 0.07])
    return tuple(((observation - low) / (high - low) * PLACES).astype(int).tolist())


def search(envs: Any, rounds: int, seed: int = 0) -> tuple[dict[tuple[int, ...], Node], list[int]]:
    """Grow a tree from a reset; return its nodes by place, and the path to the goal (empty if none was found)."""
    rng = np.random.default_rng(seed)
    observations, _ = envs.reset(seed=[seed] * FORKS)
    (state,) = envs.save_state(slots=[0])
    tree = {place_of(observations[0]): Node(state, observations[0], None, [])}
    for _ in range(rounds):
        node = min(tree.values(), key=Node.order)
        node.tries += 1
        envs.restore_state(node.state)  # one message: all lanes continue from this state
        actions = np.where(rng.random((STEPS, FORKS)) < 0.3, rng.integers(3, size=(STEPS, FORKS)), -1)
        actions[0] = rng.integers(3, size=FORKS)
        runs = np.ones(FORKS, np.bool_)
        for step in range(STEPS):
            if step:  # most lanes repeat their last action
                actions[step] = np.where(actions[step] < 0, actions[step - 1], actions[step])
            observations, _, terminated, truncated, _ = envs.step(actions[step])
            reached = np.flatnonzero(runs & terminated)
            if reached.size:
                return tree, [*node.way(), *actions[: step + 1, reached[0]].tolist()]
            runs &= ~(terminated | truncated)
        new = {place_of(observations[slot]): slot for slot in np.flatnonzero(runs).tolist()}
        new = {place: slot for place, slot in new.items() if place not in tree}
        if new:
            for (place, slot), state in zip(new.items(), envs.save_state(slots=list(new.values())), strict=True):
                tree[place] = Node(state, observations[slot].copy(), node, actions[:, slot].tolist())
    return tree, []


def play(url: str, actions: list[int], seed: int = 0) -> float:
    """Return the return of an episode that begins with these actions and continues greedily."""
    env = make_remote(url)
    env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(actions.pop(0) if actions else RIGHT)
        total, over = total + float(reward), terminated or truncated
    env.close()
    return total


def main() -> None:
    """Play greedily, search, and replay the path that was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="how often a state is forked at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with serve_gym(ENV) as server:
        print(f"greedy: return {play(server.url, [], arguments.seed):g}")
        envs = make_vec_remote(server.url, num_envs=FORKS, lanes=True, blocking=True)
        tree, way = search(envs, arguments.rounds, arguments.seed)
        envs.close()
        forks = sum(node.tries for node in tree.values())
        print(f"searched: {len(tree)} states, each of {forks} forks into {FORKS} lanes by one message")
        print(f"found: return {play(server.url, way, arguments.seed):g}" if way else "found nothing: try more --rounds")


if __name__ == "__main__":
    main()
