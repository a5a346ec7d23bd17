"""The entries of Gymnasium's registry that other processes need."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import gymnasium

__all__ = ["registered_specs"]


def registered_specs(env: object) -> list[gymnasium.envs.registration.EnvSpec]:
    """Return this process's specs for the ids and patterns of a served environment; empty for a callable."""
    names: Sequence[str] = [env] if isinstance(env, str) else env if isinstance(env, (list, tuple)) else []
    patterns = [name.rpartition(":")[2] for name in names if isinstance(name, str)]
    return [
        spec
        for key, spec in gymnasium.registry.items()
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    ]
