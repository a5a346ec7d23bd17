"""The infos of lanes, joined without loss.

Gymnasium joins the infos of several environments into arrays whose dtype the first environment decides: beside an int,
a float of the next loses its fraction. Over several worlds the first lane of each would decide. So the infos of lanes
are collected as they are, and sent as arrays only where all lanes have a key's values in one type, else as a list of
dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

__all__ = ["collect_infos", "join_infos"]


def collect_infos(env: VectorEnv[Any, Any, Any]) -> bool:
    """Let a vector environment return its infos as `{lane: info}`; False where it joins them in a way of its own."""
    if type(env) not in (SyncVectorEnv, AsyncVectorEnv):
        return False

    def keep(infos: dict[Any, Any], info: dict[str, Any], lane: int) -> dict[Any, Any]:
        if info:
            infos[lane] = info
        return infos

    env._add_info = keep  # type: ignore[method-assign,assignment]  # noqa: SLF001 - Gymnasium's hook for it
    return True


def join_infos(infos: Mapping[int, Mapping[str, Any]], lanes: int) -> dict[str, Any] | list[Mapping[str, Any]]:
    """Join the infos of some lanes.

    Returns:
        Arrays over the lanes with `_key` masks, as `VectorEnv._add_info` makes them, where that loses nothing; else a
        list with each lane's dict.
    """
    if not infos:
        return {}
    if not _uniform(list(infos.values())):
        return [infos.get(lane, {}) for lane in range(lanes)]
    joiner: VectorEnv[Any, Any, Any] = VectorEnv()
    joiner.num_envs = lanes
    joined: dict[str, Any] = {}
    for lane, info in infos.items():
        joined = joiner._add_info(joined, dict(info), lane)  # noqa: SLF001 - its rules are the ones to follow
    return joined


def _uniform(infos: list[Mapping[str, Any]]) -> bool:
    """Whether each key's values are of one type over all dicts that have it."""
    kinds: dict[str, Any] = {}
    nested: dict[str, list[Mapping[str, Any]]] = {}
    for info in infos:
        for key, value in info.items():
            if not isinstance(key, str) or key == "final_obs":
                return False
            kind: Any = (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)
            if kinds.setdefault(key, kind) != kind or (type(value) is int and not -(2**63) <= value < 2**63):
                return False
            if isinstance(value, Mapping):
                nested.setdefault(key, []).append(value)
    return all(_uniform(inner) for inner in nested.values())
