"""Step an environment by hand, in any Python from 3.7 on, and write down what it gives: what a server is held against.

    python by_hand.py QUESTION ANSWER

Both are files of pickled plain values. This module is also imported by the tests, in today's Python.
"""

import importlib
import pickle
import sys

import numpy as np


def plain(value):
    """Return a value without NumPy's types, whose pickles differ between its versions."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return ("scalar", value.dtype.str, value.tobytes())
    if isinstance(value, dict):
        return ("dict", [(key, plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(item) for item in value])
    return value


def facts_of(space):
    """Return what a space is, as far as all versions know it."""
    kind = type(space).__name__
    if kind == "Dict":
        return (kind, [(key, facts_of(item)) for key, item in space.spaces.items()])
    if kind == "Tuple":
        return (kind, [facts_of(item) for item in space.spaces])
    if kind == "Discrete":
        return (kind, int(space.n), int(getattr(space, "start", 0)), np.dtype(space.dtype).str)
    if kind == "MultiDiscrete":
        return (kind, np.asarray(space.nvec).tolist(), np.dtype(space.dtype).str)
    if kind == "Box":
        bounds = tuple(
            plain(np.asarray(bound)) for bound in (space.low, space.high, space.bounded_below, space.bounded_above)
        )
        return (kind, tuple(space.shape), np.dtype(space.dtype).str, *bounds)
    return (kind, tuple(space.shape), np.dtype(space.dtype).str)


def read_action(action):
    """Return an action that `plain` has written."""
    if isinstance(action, tuple) and action[0] == "array":
        return np.frombuffer(action[3], action[1]).reshape(action[2]).copy()
    return action


def make(target):
    """Make an environment as its user does."""
    module, _, name = target.rpartition(":")
    if module:
        importlib.import_module(module)
    library = "gymnasium"
    try:
        gym = importlib.import_module(library)
        gym.spec(name)
    except Exception:
        gym = importlib.import_module("gym")
    return gym.make(name)


class Lane:
    """One environment, and where it is."""

    def __init__(self, target, interface):
        self.env, self.interface, self.ended = make(target), interface, False

    def reset(self, seed=None):
        self.ended = False
        if self.interface == "0.21" and seed is not None:
            self.env.seed(seed)
            seed = None
        found = self.env.reset() if seed is None else self.env.reset(seed=seed)
        return found if self.interface == "today's" else (found, {})

    def step(self, action):
        if self.ended:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
        if self.interface != "today's":
            observation, reward, done, info = self.env.step(action)
            truncated = done and info.get("TimeLimit.truncated", False)
            found = observation, float(reward), bool(done and not truncated), bool(truncated), info
        else:
            observation, reward, terminated, truncated, info = self.env.step(action)
            found = observation, float(reward), bool(terminated), bool(truncated), info
        self.ended = found[2] or found[3]
        return found


def play(target, interface, lanes, seed, actions):
    """Return the spaces, the first observations and infos, and what each step gave, for each lane."""
    envs = [Lane(target, interface) for _ in range(lanes)]
    spaces = [facts_of(envs[0].env.observation_space), facts_of(envs[0].env.action_space)]
    found = [[plain(env.reset(seed + lane)) for lane, env in enumerate(envs)]]
    found += [[plain(env.step(read_action(action))) for env, action in zip(envs, step)] for step in actions]
    return spaces, found


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        question = pickle.load(file)
    answer = play(**question)
    with open(sys.argv[2], "wb") as file:
        pickle.dump(answer, file, protocol=2)
