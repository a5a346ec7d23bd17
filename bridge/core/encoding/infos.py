"""Join the infos of slots and lanes into one dict of arrays, by the rules of `VectorEnv._add_info`; interventions.

An intervention is the part of an info that says that somebody else acted in an agent's place, and which action the
environment executed. Both ends of a real-time world merge frames, so both need the same rules.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

__all__ = [
    "ACTION",
    "FRAMES",
    "KEYS",
    "PACE",
    "as_rows",
    "batch_interventions",
    "joins",
    "lane_info",
    "merge_interventions",
    "merge_lanes",
    "pick_lanes",
    "split_intervention",
    "with_errors",
    "with_interventions",
]

ACTION = "intervene_action"
"""The action that the environment was stepped with, an element of its action space. Trainers know it by this name."""
FRAMES = "intervened_frames"
"""In real time: the number of frames since the last observation in which somebody else acted."""
PACE = "takeover_fps"
"""In lock-step: the highest rate of steps a second while a person has a seat, whether the person acts or not."""
KEYS = ("intervention", "intervened_by", ACTION, FRAMES)
"""All keys of an intervention."""


def split_intervention(info: Any) -> tuple[Any, dict[str, Any]]:
    """Return an agent's info without its intervention, and the intervention: empty if the agent acted itself.

    An `intervene_action` from the environment itself, as wrappers for teleoperation return it, is treated in the same
    way.
    """
    if not isinstance(info, Mapping) or ACTION not in info:
        return info, {}
    found = {key: info[key] for key in KEYS if key in info}
    return {key: value for key, value in info.items() if key not in found}, {FRAMES: 1, **found}


def merge_interventions(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the interventions of two spans of frames as one: the later action, and the sum of the frames."""
    if not earlier or not later:
        return {**earlier, **later}
    return {**later, FRAMES: earlier[FRAMES] + later[FRAMES]}


def as_rows(block: Mapping[str, Any], lanes: int, chosen: Any = True) -> dict[str, Any]:
    """Return the infos of a world's lanes as arrays with one row per lane and `_key` masks, or nested dicts of them.

    Simulators return infos of any form. A value that is no array with a row per lane is given to all lanes.

    Args:
        block: The infos.
        lanes: The number of lanes.
        chosen: The lanes whose infos to return, bools.
    """
    rows: dict[str, Any] = {}
    for key, value in block.items():
        if _is_mask(key, block):
            continue
        mask = block.get(f"_{key}")
        if not isinstance(mask, np.ndarray) or (mask.dtype, mask.shape) != (np.bool_, (lanes,)):
            mask = np.ones(lanes, np.bool_)
        mask = mask & chosen
        if not mask.any():
            continue
        if isinstance(value, Mapping):
            rows[key] = as_rows(value, lanes, chosen)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (lanes,):
            rows[key] = value
        else:
            rows[key] = np.full(lanes, None)
            rows[key].fill(value)
        rows[f"_{key}"] = mask
    return rows


def _is_mask(key: Any, block: Mapping[str, Any]) -> bool:
    # Only with the key that it masks: an info may have keys of its own that begin with an underscore.
    return isinstance(key, str) and key.startswith("_") and key[1:] in block


def merge_lanes(infos: dict[str, Any], block: Mapping[str, Any], offset: int, lanes: int, num_envs: int) -> None:
    """Merge the infos of a world's lanes into those of all slots, beginning at slot `offset`.

    Args:
        infos: The infos of all slots so far; grows.
        block: The infos of the lanes from `as_rows`. `joins` must have returned True for them.
        offset: The first slot.
        lanes: The number of lanes.
        num_envs: The number of slots.
    """
    for key, array in block.items():
        if _is_mask(key, block):
            continue
        mask = block[f"_{key}"]
        if isinstance(array, Mapping):
            merge_lanes(infos.setdefault(key, {}), array, offset, lanes, num_envs)
        else:
            if key not in infos:
                shape = (num_envs, *array.shape[1:])
                # As `VectorEnv._add_info` fills slots without the key. The values may be arrays of objects.
                objects = array.dtype == object and array.ndim == 1
                infos[key] = np.full(shape, None) if objects else np.zeros(shape, array.dtype)
            infos[key][offset : offset + lanes][mask] = array[mask]
        infos.setdefault(f"_{key}", np.zeros(num_envs, np.bool_))[offset : offset + lanes] |= mask


def lane_info(block: Mapping[str, Any] | list[dict[str, Any]], lane: int) -> dict[str, Any]:
    """Return the info of one lane from the infos of a world's lanes: a list of dicts, or arrays with masks."""
    if isinstance(block, list):
        return block[lane]
    info: dict[str, Any] = {}
    for key, value in block.items():
        if _is_mask(key, block):
            continue
        if not np.asarray(block.get(f"_{key}", True)).reshape(-1)[lane if f"_{key}" in block else 0]:
            continue
        if isinstance(value, Mapping):
            info[key] = lane_info(value, lane)
        else:
            item = value[lane]
            if isinstance(item, np.bool_) and value.ndim == 1 and value.dtype == np.bool_:
                item = bool(item)  # as it was before joining
            # A view would keep the arrays of all lanes alive, and share memory with them.
            info[key] = item.copy() if isinstance(item, np.ndarray) else item
    return info


def pick_lanes(blocks: Sequence[Mapping[str, Any] | list[dict[str, Any]]]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the infos of a world's lanes, lane i from `blocks[i]`: arrays, or a list if arrays would lose data.

    Args:
        blocks: Infos of all lanes of the world: arrays with their `_key` masks, or lists of dicts, one per lane.
    """
    lanes, joined = len(blocks), dict[str, Any]()
    # Most lanes share a block: each block is merged once, with all of its lanes.
    for block in {id(block): block for block in blocks}.values():
        if isinstance(block, list) or not joins(joined, block):
            # An array has one dtype: for a key whose values differ in type or shape, a list of dicts keeps them.
            return [lane_info(own, lane) for lane, own in enumerate(blocks)]
        merge_lanes(joined, as_rows(block, lanes, np.array([own is block for own in blocks])), 0, lanes, lanes)
    return joined


def with_errors(
    block: Mapping[str, Any] | list[dict[str, Any]], errors: Mapping[int, Any], lanes: int
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the infos of a world's lanes with an `error` for some lanes."""
    if isinstance(block, list):
        return [{**own, **({"error": errors[lane]} if lane in errors else {})} for lane, own in enumerate(block)]
    reasons, mask = np.full(lanes, None), np.zeros(lanes, np.bool_)
    for lane in range(lanes):
        if (reason := errors.get(lane, lane_info(block, lane).get("error"))) is not None:
            reasons[lane], mask[lane] = reason, True
    return {**block, "error": reasons, "_error": mask}


def with_interventions(
    block: Mapping[str, Any] | list[dict[str, Any]], interventions: Sequence[Mapping[str, Any]], *, lanes: bool
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return infos with the given interventions in place of their own.

    Args:
        block: The info of one environment, or the infos of lanes.
        interventions: One for each lane.
        lanes: Whether the infos are those of lanes.
    """
    owns = [lane_info(block, lane) if lanes else block for lane in range(len(interventions))]
    found: list[Any] = [
        {**{key: value for key, value in own.items() if key not in KEYS}, **intervention}  # type: ignore[union-attr]
        for own, intervention in zip(owns, interventions, strict=True)
    ]
    return found if lanes else found[0]


def batch_interventions(infos: dict[str, Any], owns: Sequence[Mapping[str, Any]], space: Any) -> None:
    """Batch the actions in `intervene_action` as `step` takes them: as a batch of the action space.

    Args:
        infos: The infos of all slots; changed.
        owns: Each slot's own info.
        space: The action space of one environment.
    """
    count = len(owns)
    try:
        empty: Any = create_empty_array(space, count)
        # A copy, because the rows are views, and `concatenate` writes into `empty` while it reads them.
        rows = list(iterate(batch_space(space, count), copy.deepcopy(empty)))
        rows = [own.get(ACTION, row) for own, row in zip(owns, rows, strict=True)]
        infos[ACTION] = concatenate(space, rows, empty)
    except (gymnasium.error.CustomSpaceError, TypeError, ValueError):  # a space that Gymnasium batches as a tuple
        infos[ACTION] = tuple(own.get(ACTION) for own in owns)
    infos[f"_{ACTION}"] = np.array([ACTION in own for own in owns])


def joins(joined: Mapping[str, Any], block: Mapping[str, Any]) -> bool:
    """True if `block` can be merged into the arrays of `joined`, which have as many lanes or more."""
    for key, value in block.items():
        here = joined.get(key)
        if isinstance(value, Mapping) is not isinstance(here, Mapping) and here is not None:
            return False
        if isinstance(value, Mapping):
            if here is not None and not joins(here, value):
                return False
        elif here is not None and (np.asarray(value).dtype, np.shape(value)[1:]) != (here.dtype, here.shape[1:]):
            return False
    return True
