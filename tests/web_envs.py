"""Environments for tests of the page: a keyboard moves what they draw."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

# Where the paddle is: the mean column of the white pixels; -1 where there are none.
PADDLE = """() => {
  const canvas = document.getElementById("canvas");
  const {width, height} = canvas;
  if (!canvas.dataset.pictures) return -1;
  const {data} = canvas.getContext("2d").getImageData(0, height - 12, width, 1);
  let sum = 0, count = 0;
  for (let x = 0; x < width; x++) if (data[4 * x] > 200) { sum += x; count += 1; }
  return count ? sum / count : -1;
}"""


class Paddle(gymnasium.Env):
    """A white paddle on a blue ground, which goes left and right."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Box(0, 200, (1,), np.int64)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, render_mode=None, length=10**9):
        self.render_mode, self.length = render_mode, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 100, 0
        return np.array([100]), {}

    def step(self, action):
        self.place = int(np.clip(self.place + 2 * int(action), 20, 180))
        self.steps += 1
        return np.array([self.place]), 1.0, self.steps >= self.length, False, {}

    def render(self):
        picture = np.full((150, 200, 3), (10, 20, 200), np.uint8)
        picture[130:145, self.place - 15 : self.place + 15] = 255
        return picture


class Doors(Paddle):
    """The same with two doors and no way to stand still; it notes what was done."""

    action_space = spaces.Discrete(2)
    done: list[int] = []  # noqa: RUF012 - of all of them

    def step(self, action):
        self.done.append(int(action))
        return super().step(2 * int(action) - 1)


class Paddles:
    """The same for two, one above the other, as PettingZoo has it; it ends when both are at the right."""

    metadata = {"render_modes": ["rgb_array"], "name": "paddles"}  # noqa: RUF012
    possible_agents = ("upper", "lower", "third")

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observation_space(self, agent):
        return spaces.Box(0, 200, (1,), np.int64)

    def action_space(self, agent):
        return spaces.Discrete(3, start=-1)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.places = dict.fromkeys(self.agents, 100)
        return {agent: np.array([100]) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        for agent, action in actions.items():
            self.places[agent] = int(np.clip(self.places[agent] + 2 * int(action), 20, 180))
        over = all(self.places[agent] == 180 for agent in ("upper", "lower"))
        names = list(self.agents)
        if over:
            self.agents = []
        observations = {agent: np.array([self.places[agent]]) for agent in names}
        rewards = {agent: float(over) for agent in names}
        return (
            observations,
            rewards,
            dict.fromkeys(names, over),
            dict.fromkeys(names, False),
            {agent: {} for agent in names},
        )

    def render(self):
        picture = np.full((150, 200, 3), (10, 20, 200), np.uint8)
        for row, agent in ((30, "third"), (80, "upper"), (130, "lower")):
            picture[row : row + 15, self.places[agent] - 15 : self.places[agent] + 15] = 255
        return picture

    def close(self):
        pass


class Race(Paddles):
    """The same as a race: who is at the right first has 1, and it ends."""

    def step(self, actions):
        observations, _, _, truncations, infos = super().step(actions)
        there = {agent: float(place == 180) for agent, place in self.places.items()}
        over = any(there.values())
        if over:
            self.agents = []
        rewards = {agent: there[agent] for agent in observations}
        return observations, rewards, dict.fromkeys(observations, over), truncations, infos


def parallel_env(render_mode=None):
    """Make `Paddles`, by the name that says to the command line what it makes."""
    return Paddles(render_mode)
