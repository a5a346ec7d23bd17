"""Reseed the random generators of a running environment, as a restore with a seed does."""

from __future__ import annotations

from typing import Any

from bridge.states.generators import seed_generators
from bridge.states.graph import restore, take
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError

__all__ = ["reseed"]


def reseed(env: Any, seed: int) -> None:
    """Reseed the random generators of an environment. Its episode goes on.

    Args:
        env: The environment, with its wrappers.
        seed: The seed. The result is that of a restore with this seed, by copy if possible, otherwise by replay.
    """
    try:
        snapshot, _ = take(env)
    except CannotCopyError:
        seed_generators(layers_of(env), seed)
    else:
        restore(snapshot, env, seed=seed)
