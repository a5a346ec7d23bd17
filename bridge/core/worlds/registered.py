"""What other processes need to know of Gymnasium's registry."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import gymnasium

__all__ = ["registered_specs"]


def registered_specs(env: object) -> list[gymnasium.envs.registration.EnvSpec]:
    """Return the specs that this process has of the ids and patterns of a served environment; none of a callable."""
    names: Sequence[str] = [env] if isinstance(env, str) else env if isinstance(env, (list, tuple)) else []
    patterns = [name.rpartition(":")[2] for name in names if isinstance(name, str)]
    return [
        spec
        for key, spec in gymnasium.registry.items()
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    ]
