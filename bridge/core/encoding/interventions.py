"""The part of an info that says that somebody else acted in an agent's place, and what the environment executed.

Both ends of a real-time world merge frames that no step told one by one, so both need the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ACTION", "FRAMES", "KEYS", "PACE", "merge_interventions", "split_intervention"]

ACTION = "intervene_action"
"""The action that the environment was stepped with, an element of its action space. Trainers know it by this name."""
FRAMES = "intervened_frames"
"""In real time: in how many of the frames since the last observation somebody else acted."""
PACE = "takeover_fps"
"""In lock-step: the most steps a second while a person has a seat, acting or not."""
KEYS = ("intervention", "intervened_by", ACTION, FRAMES)
"""All keys of an intervention."""


def split_intervention(info: Any) -> tuple[Any, dict[str, Any]]:
    """Return an agent's info without its intervention, and that: empty where the agent acted itself.

    An environment that gives `intervene_action` by itself, as wrappers for teleoperation do, is treated alike.
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
