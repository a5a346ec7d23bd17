"""Episodes of a made-up environment, given to a journal as a server gives them; the one helper that knows tapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.recording.facts import facts_of
from bridge.recording.rows import Encoder, Kind, Row
from bridge.recording.tape import Tape

PAIR = (spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(4))


def tape_of(journal: Any) -> Tape:
    """A tape of a made-up environment."""
    facts = facts_of(journal, "env", PAIR, {"env_id": "Made-up-v0"})
    return Tape(journal, Encoder({**facts, "observations": True}))


def reset_row(at: float, *, observation: Any = None, seed: int = 1) -> Row:
    """A row of a reset."""
    return Row(Kind.RESET, at, observation=np.zeros(3) if observation is None else observation, seed=seed)


def step_row(at: float, action: int = 1, observation: Any = None, *, terminated: bool = False) -> Row:
    """A row of a step, rewarded with 1."""
    seen = np.zeros(3) if observation is None else observation
    return Row(Kind.STEP, at, "agent", action, seen, 1.0, terminated)


def fill(tape: Tape, episodes: int, steps: int = 10, size: int = 24) -> None:
    """Record episodes."""
    for number in range(episodes):
        tape.add(reset_row(float(number), seed=number), size)
        for step in range(steps):
            seen, last = np.full(3, step / 100), step == steps - 1
            tape.add(step_row(number + step / 100, step % 4, seen, terminated=last), size)
