"""The random generators of an environment in an episode, seeded anew: as a restore with a seed does."""

from __future__ import annotations

from typing import Any

from bridge.states.generators import seed_generators
from bridge.states.graph import restore, take
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError

__all__ = ["reseed"]


def reseed(env: Any, seed: int) -> None:
    """Seed the random generators of an environment anew; it goes on from where it is.

    Args:
        env: The environment, with its wrappers.
        seed: As of a restore: of one that can be copied as of a copy, of another one as of a replay.
    """
    try:
        snapshot, _ = take(env)
    except CannotCopyError:
        seed_generators(layers_of(env), seed)
    else:
        restore(snapshot, env, seed=seed)
