"""Train an agent with the help of a person, who takes over and shows what to do.

    python examples/learn_from_takeover.py                       # a script teaches; five seeds, with and without it
    python examples/learn_from_takeover.py --person --budget 3000    # you teach, at the page that is printed

An agent learns to drive the car of MountainCar up the hill, by Q-learning with tile coding. By itself it reaches the
flag late, and before that it has nothing to learn from. The teacher takes over when an episode lasts too long. In the
meantime, `info` contains the executed action as `intervene_action`: the agent learns from that one, not from its own,
which was never executed. It also keeps the states in which it was helped, to which its own policy had led, with the
teacher's actions, and learns to choose these actions there: the idea of DAgger, with the margin of DQfD. Both kinds of
training have the same budget of steps, including the teacher's. Prints the mean return of the greedy policy after each
twelfth of the budget, with and without a teacher, and from the recording the number of steps of each player. Needs the
extra `record`, and `--person` also `web` and `play`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from bridge import Recording, Web, make_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from bridge.testing import Inspector

ENV = "MountainCar-v0"
PARTS = 12
"""The number of parts of a budget; the policy is evaluated after each."""
PATIENCE = 130
"""Steps of an episode (at most 200) after which the teacher takes over."""
TILINGS, TILES, ACTIONS = 8, 8, 3
LOW, HIGH = np.array([-1.2, -0.07]), np.array([0.6, 0.07])
OFFSETS = np.arange(TILINGS)[:, None] * np.array([1, 3]) / TILINGS % 1
RATE = 0.3 / TILINGS
MARGIN = 5.0
"""The margin by which a teacher's action must be preferred to the others."""
REHEARSALS = 2
"""The number of shown states that are rehearsed after each step."""


class Learner:
    """Q-learning with a teacher's preferences: sums over the tiles of a state, one in each tiling."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.weights = np.zeros((TILINGS * (TILES + 1) ** 2, ACTIONS))
        self.preferences = np.zeros_like(self.weights)
        """The teacher's addition to the values of actions; 0 where no teacher acted."""
        self.shown: list[tuple[np.ndarray, int]] = []
        """The states in which a teacher acted, as tiles, with the actions."""

    def tiles(self, observation: np.ndarray) -> np.ndarray:
        """Return the tiles of a state, shape (TILINGS,)."""
        cells = ((observation - LOW) / (HIGH - LOW) * TILES + OFFSETS).astype(int)
        return (np.arange(TILINGS) * (TILES + 1) + cells[:, 0]) * (TILES + 1) + cells[:, 1]

    def act(self, observation: np.ndarray, exploration: float = 0.0) -> int:
        """Return the best action or, with the probability `exploration`, a random one."""
        if self.random.random() < exploration:
            return int(self.random.integers(ACTIONS))
        return int(self.liked(self.tiles(observation)).argmax())

    def liked(self, tiles: np.ndarray) -> np.ndarray:
        """Return the preference for each action in a state, shape (ACTIONS,)."""
        return (self.weights[tiles] + self.preferences[tiles]).sum(axis=0)

    def learn(
        self, before: np.ndarray, executed: int, reward: float, after: np.ndarray, terminated: bool, taught: bool
    ) -> None:
        """Learn from a step; `taught` is True if a teacher chose the action."""
        tiles = self.tiles(before)
        ahead = 0.0 if terminated else self.weights[self.tiles(after)].sum(axis=0).max()
        self.weights[tiles, executed] += RATE * (reward + ahead - self.weights[tiles, executed].sum())
        if taught:
            self.shown.append((tiles, executed))
        for _ in range(REHEARSALS if self.shown else 0):
            self.rehearse(*self.shown[self.random.integers(len(self.shown))])

    def rehearse(self, tiles: np.ndarray, chosen: int) -> None:
        """Move the teacher's action and its strongest rival apart if the rival is within the margin."""
        liked = self.liked(tiles)
        rival = (liked + MARGIN * (np.arange(ACTIONS) != chosen)).argmax()
        if rival != chosen:
            missing = RATE * (liked[rival] + MARGIN - liked[chosen]) / 2
            self.preferences[tiles, rival] -= missing
            self.preferences[tiles, chosen] += missing


class Script:
    """A scripted teacher: it takes over after `PATIENCE` steps, and pushes in the car's direction.

    It has a seat like a page in a browser, and the trainer's environment executes the key that it holds.
    """

    def __init__(self, url: str) -> None:
        self.person = Inspector(url, timeout=20.0)
        settings = {"role": pack_tensor("takeover"), "name": pack_tensor("script")}
        specs = self.person.ask("join_world", pb.JoinWorldRequest(settings=settings)).specs
        (self.uid,) = specs.actions
        self.person.ask("step", pb.StepRequest())
        self.holds = False

    def look(self, observation: np.ndarray, step: int) -> None:
        """Hold a key, or release it."""
        if step >= PATIENCE:
            action = np.asarray(2 if observation[1] >= 0 else 0)
            self.person.ask("step", pb.StepRequest(actions={self.uid: pack_tensor(action)}))
        elif self.holds:
            self.person.ask("step", pb.StepRequest())
        self.holds = step >= PATIENCE

    def close(self) -> None:
        """Give the seat back."""
        self.person.close()


def evaluate(learner: Learner, episodes: int = 10) -> float:
    """Return the mean return of the greedy policy; these steps do not count towards the budget."""
    env, total = gymnasium.make(ENV), 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=1000 + episode)
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(learner.act(observation))
            total, over = total + float(reward), terminated or truncated
    env.close()
    return total / episodes


def train(
    url: str, budget: int, seed: int, look: Callable[[np.ndarray, int], None] | None = None
) -> tuple[list[float], int]:
    """Train in a server's world; return the greedy policy's return after each part, and the number of taught steps.

    Args:
        url: The URL of the server.
        budget: The number of steps, including the teacher's.
        seed: The seed of the agent, and of its first episode.
        look: Called before each step with the observation and the step's number in the episode; None: no teacher.
    """
    learner, curve, taught = Learner(seed), list[float](), 0
    env = make_remote(f"{url}?world=", player="agent:learner")
    observation, _ = env.reset(seed=seed)
    step = 0
    for count in range(1, budget + 1):
        if look is not None:
            look(observation, step)
        action: Any = learner.act(observation, exploration=0.05)
        after, reward, terminated, truncated, info = env.step(action)
        helped = "intervene_action" in info
        executed = int(info["intervene_action"]) if helped else action
        learner.learn(observation, executed, float(reward), after, terminated, helped)
        taught += helped
        observation, step = after, step + 1
        if terminated or truncated:
            observation, _ = env.reset()
            step = 0
        if count % max(1, budget // PARTS) == 0:
            curve.append(evaluate(learner))
    env.close()
    return curve, taught


def show(name: str, curves: list[list[float]]) -> None:
    """Print the mean curve of all seeds."""
    print(f"{name:>16}: " + " ".join(f"{value:7.1f}" for value in np.mean(curves, axis=0)), flush=True)


def who_acted(folder: Path) -> Counter[str]:
    """Return the number of steps of each player in a recording."""
    return Counter(who for episode in read_folder(folder).episodes() for who in load_episode(episode).by)


def main() -> None:
    """Train with and without a teacher."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=int, default=12000, help="steps of each training (default: 12000)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (default: 5)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the recording goes (default: runs)")
    parser.add_argument("--person", action="store_true", help="train once, with you as the teacher")
    parser.add_argument("--play-fps", type=float, default=30.0, help="steps a second while you have the seat")
    arguments = parser.parse_args()
    budget, alone, helped, taught = arguments.budget, [], [], []
    recording = Recording(arguments.folder, observations=True)
    if arguments.person:
        with serve_gym(ENV, web=Web(play_fps=arguments.play_fps), record=recording) as server:
            print(f"take over at {server.web_url}", flush=True)
            curve, count = train(server.url, budget, 0)
        show("with you", [curve])
        print(f"you acted in {count} of {budget} steps")
    else:
        for seed in range(arguments.seeds):
            with serve_gym(ENV) as server:
                alone.append(train(server.url, budget, seed)[0])
        with serve_gym(ENV, record=recording) as server:
            for seed in range(arguments.seeds):
                teacher = Script(f"{server.url}?world=")
                curve, count = train(server.url, budget, seed, teacher.look)
                teacher.close()
                helped.append(curve)
                taught.append(count)
        show("alone", alone)
        show("with a teacher", helped)
        print(f"the teacher acted in {np.mean(taught):.0f} of {budget} steps")
    for who, steps in sorted(who_acted(arguments.folder).items()):
        print(f"recorded: {who} acted in {steps} steps")


if __name__ == "__main__":
    main()
