"""List and find the attributes of an environment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.vector import VectorEnv

from bridge.encoding import values
from bridge.errors import Code, RequestError, TensorError
from bridge.worlds.kinds import BatchVector, Known, has_attribute, layers_of, local_lanes

__all__ = ["find_attribute", "list_attributes", "travels"]

_MOST_NAMES = 100
_MOST_ITEMS = 1000  # a longer list or dict is not looked through


def list_attributes(env: Known) -> list[str]:
    """Return the names of public attributes whose values can be sent, at most 100. Runs no code of the environment.

    Args:
        env: An environment, or a vector environment, whose first lane is inspected.

    Returns:
        The names, those of the outermost wrapper first; none if the lanes run in other processes.
    """
    found: dict[str, object] = {}
    for layer in _layers(env):
        for owner in (layer, *type(layer).__mro__):
            for name, value in getattr(owner, "__dict__", {}).items():
                found.setdefault(name, value)
    return [name for name, value in found.items() if not name.startswith("_") and _listed(value)][:_MOST_NAMES]


def find_attribute(env: Known, name: str) -> None:
    """Raise NOT_FOUND where an environment has no attribute or method of a name."""
    layers = _layers(env)
    if layers and not any(has_attribute(layer, name) for layer in layers):
        raise RequestError(Code.NOT_FOUND, f"the environment has no method or attribute {name!r}")


def _layers(env: Known) -> Sequence[object]:
    """The wrappers, the outermost first, and the environment in them; nothing where that lives in another process."""
    if not isinstance(env, VectorEnv) or isinstance(env, BatchVector):
        return list(layers_of(env))
    lanes = local_lanes(env)
    return list(layers_of(lanes[0])) if lanes else []


def _listed(value: object) -> bool:
    """True if an attribute with a value is listed: one that can be sent, and is not too large to look through.

    None does not count: it may be replaced later by anything, such as the window of an environment once it has drawn.
    """
    return (
        value is not None
        and not (isinstance(value, (list, tuple, dict)) and len(value) > _MOST_ITEMS)
        and travels(value)
    )


def travels(value: object) -> bool:
    """True if the values codec can encode a value, without copying large arrays."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = np.empty(0, value.dtype)
    try:
        values.to_value(value)
    except TensorError:
        return False
    return True
