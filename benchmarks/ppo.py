"""PPO in NumPy, for a loop over slots of which some are away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ppo"]

Floats = NDArray[np.float64]
_GAMMA, _LAMBDA, _CLIP, _ENTROPY, _RATE = 0.99, 0.95, 0.2, 0.01, 2e-3


class _Net:
    """One hidden layer of tanh, and Adam."""

    def __init__(self, inputs: int, outputs: int, scale: float, rng: np.random.Generator, hidden: int = 64) -> None:
        self._weights = [
            rng.standard_normal((inputs, hidden)) / np.sqrt(inputs),
            np.zeros(hidden),
            rng.standard_normal((hidden, outputs)) * scale / np.sqrt(hidden),
            np.zeros(outputs),
        ]
        self._first = [np.zeros_like(array) for array in self._weights]
        self._second = [np.zeros_like(array) for array in self._weights]
        self._updates = 0

    def __call__(self, inputs: Floats) -> Floats:
        """Return the outputs, `(batch, outputs)`."""
        first, bias, second, last = self._weights
        result: Floats = np.tanh(inputs @ first + bias) @ second + last
        return result

    def descend(self, inputs: Floats, slope: Floats) -> None:
        """Take a step against the loss whose slope by the outputs is given, `(batch, outputs)`."""
        first, bias, second, _ = self._weights
        hidden = np.tanh(inputs @ first + bias)
        inner = (slope @ second.T) * (1 - hidden**2)
        slopes = [inputs.T @ inner, inner.sum(0), hidden.T @ slope, slope.sum(0)]
        size = np.sqrt(sum(float((array**2).sum()) for array in slopes))
        self._updates += 1
        for array, grad, mean, square in zip(self._weights, slopes, self._first, self._second, strict=True):
            grad *= min(1.0, 0.5 / (size + 1e-8))
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad**2 - square)
            unbiased = mean / (1 - 0.9**self._updates), square / (1 - 0.999**self._updates)
            array -= _RATE * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)


@dataclasses.dataclass
class _Transition:
    observation: Floats
    action: int
    chance: float
    reward: float
    after: Floats
    terminated: bool
    goes_on: bool
    """True if the next transition of the slot follows on it."""


class Ppo:
    """Acts and learns in all slots that have an observation.

    Args:
        slots: How many.
        size: Numbers of an observation that it looks at, the first ones.
        actions: How many there are.
        seed: Of the policy.
        batch: Transitions from one update to the next.
    """

    def __init__(self, slots: int, size: int, actions: int, seed: int, batch: int = 2048) -> None:
        self._rng = np.random.default_rng(seed)
        self._size, self._batch = size, batch
        self._policy, self._value = _Net(size, actions, 0.01, self._rng), _Net(size, 1, 1.0, self._rng)
        self._memory: list[list[_Transition]] = [[] for _ in range(slots)]
        self._chances = np.zeros(slots)
        self._actions = np.zeros(slots, np.int64)
        self._returns = np.zeros(slots)
        self.updates = 0
        """How often it has learned."""
        self.returns: list[float] = []
        """Of the episodes that ended, in order."""

    def act(self, rows: Sequence[Any]) -> NDArray[np.int64]:
        """Choose an action for each slot, `(slots,)`; those without an observation, None, get any."""
        here = [slot for slot, row in enumerate(rows) if row is not None]
        if here:
            chances = _softmax(self._policy(np.stack([rows[slot][: self._size] for slot in here])))
            chosen = (chances.cumsum(1) < self._rng.random((len(here), 1))).sum(1).clip(max=chances.shape[1] - 1)
            self._actions[here], self._chances[here] = chosen, chances[np.arange(len(here)), chosen]
        return self._actions.copy()

    def see(self, before: Sequence[Any], rows: Sequence[Any], rewards: Floats, terminated: NDArray[np.bool_]) -> None:
        """Take what came of the actions, and learn once there is enough.

        Args:
            before: What `act` was given.
            rows: What `step` gave; None: the slot was lost, or is away.
            rewards: `(slots,)`.
            terminated: `(slots,)`.
        """
        for slot, (row, after) in enumerate(zip(before, rows, strict=True)):
            memory = self._memory[slot]
            if row is None:
                continue
            if after is None:  # the episode was cut off: nobody knows what came of the action
                self._returns[slot] = 0.0
                if memory:
                    memory[-1].goes_on = False
                continue
            over = bool(terminated[slot])
            pair, reward = (row[: self._size], after[: self._size]), float(rewards[slot])
            action, chance = int(self._actions[slot]), float(self._chances[slot])
            memory.append(_Transition(pair[0], action, chance, reward, pair[1], over, not over))
            self._returns[slot] += reward
            if over:
                self.returns.append(float(self._returns[slot]))
                self._returns[slot] = 0.0
        if sum(map(len, self._memory)) >= self._batch:
            self._learn()

    def _learn(self) -> None:
        advantages, transitions = [], []
        for memory in self._memory:
            if not memory:
                continue
            values = self._value(np.stack([item.observation for item in memory]))[:, 0]
            afters = self._value(np.stack([item.after for item in memory]))[:, 0]
            ahead, found = 0.0, np.zeros(len(memory))
            for index in reversed(range(len(memory))):
                item = memory[index]
                error = item.reward + _GAMMA * afters[index] * (not item.terminated) - values[index]
                ahead = error + _GAMMA * _LAMBDA * ahead * item.goes_on
                found[index] = ahead
            advantages.append(found)
            transitions += memory
        advantage = np.concatenate(advantages)
        observations = np.stack([item.observation for item in transitions])
        target = advantage + self._value(observations)[:, 0]
        action = np.array([item.action for item in transitions])
        chance = np.array([item.chance for item in transitions])
        for _ in range(4):
            order = self._rng.permutation(len(transitions))
            for some in np.array_split(order, max(1, len(order) // 256)):
                self._improve(observations[some], action[some], chance[some], advantage[some], target[some])
        self._memory = [[] for _ in self._memory]
        self.updates += 1

    def _improve(
        self, observations: Floats, action: NDArray[np.int64], chance: Floats, advantage: Floats, target: Floats
    ) -> None:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        chances, rows = _softmax(self._policy(observations)), np.arange(len(action))
        ratio = chances[rows, action] / chance
        free = np.where(advantage > 0, ratio < 1 + _CLIP, ratio > 1 - _CLIP)
        chosen = np.zeros_like(chances)
        chosen[rows, action] = 1.0
        slope = -(free * advantage * ratio)[:, None] * (chosen - chances)
        logs = np.log(chances + 1e-12)
        slope += _ENTROPY * chances * (logs - (chances * logs).sum(1, keepdims=True))
        self._policy.descend(observations, slope / len(action))
        self._value.descend(observations, (self._value(observations) - target[:, None]) / len(action))


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    result: Floats = powers / powers.sum(1, keepdims=True)
    return result
