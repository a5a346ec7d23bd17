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
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.worlds.environment import EnvFacts

__all__ = ["FinalInfos", "collect_infos", "join_infos"]


def collect_infos(env: AsyncVectorEnv) -> None:
    """Change an AsyncVectorEnv to return its infos as `{lane: info}`."""

    def keep(infos: dict[Any, dict[str, object]], info: dict[str, object], lane: int) -> dict[Any, dict[str, object]]:
        if info:
            # In SAME_STEP mode it is called twice for a lane that ended: with the end, and with the new beginning. The
            # later values win; the end has keys of its own, `final_obs` and `final_info`.
            infos[lane] = {**infos.get(lane, {}), **info}
        return infos

    env._add_info = keep  # type: ignore[method-assign,assignment]  # noqa: SLF001 - Gymnasium's hook for it


def join_infos(infos: Mapping[int, Mapping[str, object]], lanes: int) -> dict[str, object] | list[Mapping[str, object]]:
    """Join the infos of some lanes.

    Returns:
        Arrays over the lanes with `_key` masks, as `VectorEnv._add_info` makes them, where that loses nothing; else a
        list with each lane's dict.
    """
    if not infos:
        return {}
    if not _uniform(list(infos.values())):
        return [infos.get(lane, {}) for lane in range(lanes)]
    joiner = VectorEnv[Any, Any, Any]()
    joiner.num_envs = lanes
    joined: dict[str, object] = {}
    for lane, info in infos.items():
        joined = joiner._add_info(joined, dict(info), lane)  # noqa: SLF001 - its rules are the ones to follow
    return joined


def _uniform(infos: list[Mapping[str, object]]) -> bool:
    """True if each key's values are of one type over all dicts that have it."""
    kinds: dict[str, object] = {}
    nested: dict[str, list[Mapping[str, object]]] = {}
    for info in infos:
        for key, value in info.items():
            # A final observation may be of any space, which a list of dicts carries as it is.
            if not isinstance(key, str) or key == "final_obs":
                return False
            kind: object = (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)
            # An integer beyond int64 fits no array of integers.
            if kinds.setdefault(key, kind) != kind or (type(value) is int and not -(2**63) <= value < 2**63):
                return False
            if isinstance(value, Mapping):
                nested.setdefault(key, []).append(value)
    return all(_uniform(inner) for inner in nested.values())


class FinalInfos:
    """Finds the final observations in the infos of a simulator that resets lanes in the step that ends them.

    Gymnasium's name for them is `final_obs`, and was `final_observation`; simulators give a batch of all lanes there.

    Args:
        facts: Those of the simulator.
    """

    def __init__(self, facts: EnvFacts) -> None:
        self._kind = facts.kind
        self._lanes = facts.num_envs or 0
        self._space = batch_space(facts.observation_space, self._lanes)
        self._told = False

    def read(self, info: object, terminated: object, truncated: object, notes: list[str]) -> object:
        """Return the infos of a step with `final_obs` as Gymnasium gives it: an array of objects, None where none is.

        Args:
            info: As the simulator gave it.
            terminated: Of each lane.
            truncated: Of each lane.
            notes: Is told once where there are no final observations.
        """
        ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
        if not ended.any() or not isinstance(info, Mapping):
            return info
        # With their `_key` masks, which are written anew.
        rest = {key: value for key, value in info.items() if str(key).lstrip("_") not in _FINAL}
        found = next((info[key] for key in _FINAL[:2] if info.get(key) is not None), None)
        if found is not None:
            # Gymnasium's own form is an array of objects; ManiSkill and others give arrays with a row for each lane.
            batch = found if isinstance(found, np.ndarray) and found.dtype == object else iterate(self._space, found)
            rows = np.full(self._lanes, None)
            for lane, row in enumerate(batch):
                # A batch has a row for lanes that go on, too.
                rows[lane] = row if ended[lane] else None
            rest.update(final_obs=rows, _final_obs=ended)
        elif not self._told:
            self._told = True
            notes.append(
                f"{self._kind} resets a lane in the step that ends it, and gives no final observation (final_obs in "
                "its infos): what a truncated episode ended with is not known"
            )
        if (final_info := info.get("final_info")) is not None:
            rest.update(final_info={**final_info} if isinstance(final_info, Mapping) else final_info, _final_info=ended)
        return rest


_FINAL = ("final_obs", "final_observation", "final_info")
