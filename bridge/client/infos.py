"""Infos of slots and of lanes joined into one dict of arrays, by the rules of `VectorEnv._add_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["lane_info", "merge_lanes"]


def merge_lanes(infos: dict[str, Any], block: Mapping[str, Any], offset: int, lanes: int, num_envs: int) -> None:
    """Put the infos of a world's lanes into those of all slots, from slot `offset` on.

    Args:
        infos: Of all slots so far; grows.
        block: Arrays of length `lanes` with their `_key` masks, or nested dicts of them.
        offset: The first slot.
        lanes: The number of lanes.
        num_envs: The number of slots.
    """
    for key, value in block.items():
        if key.startswith("_") and key[1:] in block:
            continue
        mask = np.asarray(block.get(f"_{key}", np.ones(lanes, np.bool_)))
        if isinstance(value, Mapping):
            merge_lanes(infos.setdefault(key, {}), value, offset, lanes, num_envs)
        else:
            array = np.asarray(value)
            if key not in infos:
                shape = (num_envs, *array.shape[1:])
                infos[key] = np.full(shape, None) if array.dtype == object else np.zeros(shape, array.dtype)
            infos[key][offset : offset + lanes][mask] = array[mask]
        infos.setdefault(f"_{key}", np.zeros(num_envs, np.bool_))[offset : offset + lanes] |= mask


def lane_info(block: Mapping[str, Any] | list[dict[str, Any]], lane: int) -> dict[str, Any]:
    """Return one lane's own info out of those of a world's lanes: a list of dicts, or arrays with masks."""
    if isinstance(block, list):
        return block[lane]
    info: dict[str, Any] = {}
    for key, value in block.items():
        if key.startswith("_") and key[1:] in block:
            continue
        if not np.asarray(block.get(f"_{key}", True)).reshape(-1)[lane if f"_{key}" in block else 0]:
            continue
        if isinstance(value, Mapping):
            info[key] = lane_info(value, lane)
        else:
            item = value[lane]
            if isinstance(item, np.bool_) and value.ndim == 1 and value.dtype == np.bool_:
                item = bool(item)  # as it was before it was joined
            info[key] = item.copy() if isinstance(item, np.ndarray) else item
    return info
