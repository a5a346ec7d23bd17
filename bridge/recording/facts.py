"""The facts about an environment in a recording: its origin, its spaces, and the versions of its packages."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import time
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from bridge.core.encoding.space_json import space_to_json
from bridge.errors import TensorError
from bridge.recording.rows import FORMAT, as_text
from bridge.recording.writer import Journal

__all__ = ["describe_world", "facts_of", "package_versions"]

# Packages whose versions may change what environments do; the environment's own package is added.
_PACKAGES = (
    "ale-py",
    "Box2D",
    "gymnasium",
    "gymnasium-bridge",
    "minigrid",
    "mpe2",
    "mujoco",
    "numpy",
    "pettingzoo",
    "pygame-ce",
    "pymunk",
)


# Cached: importlib.metadata searches sys.path each time, and in real time each lane of a world has a header.
@functools.lru_cache(maxsize=64)
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions(entry_point: str = "") -> dict[str, str]:
    """Return the versions of Python and of installed packages that may affect the environment, by name.

    Args:
        entry_point: `module:name` of the environment's constructor, whose package is included.
    """
    own = entry_point.partition(":")[0].partition(".")[0]
    found = {name: _version(name) for name in (*_PACKAGES, *([own] if own else []))}
    return {"python": platform.python_version(), **{name: text for name, text in found.items() if text is not None}}


def facts_of(
    journal: Journal,
    kind: str,
    spaces: Mapping[str, Any] | tuple[Any, Any],
    made_by: Mapping[str, Any],
    reward_space: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the header of the files for any environment.

    Args:
        journal: The recording, to which this adds a stream.
        kind: `env`, `lanes` or `agents`.
        spaces: The observation and action space of one environment, or of each agent by its name.
        made_by: What the environment was made of.
        reward_space: The space of array rewards.
        more: Further entries; those that are None are left out.
    """
    options = journal.options
    facts: dict[str, Any] = {
        "format": FORMAT,
        "run": journal.run,
        "stream": journal.number(),
        "kind": kind,
        "started": time.monotonic() + journal.epoch,
        "observations": options.observations,
        "infos": options.infos,
        "frames": options.frames,
        "units": {"time": "s since 1970-01-01", "clock": "s", "acted_at": "s", "t": "steps"},
        "versions": package_versions(str(made_by.get("entry_point") or "")),
    }
    facts.update((name, value) for name, value in made_by.items() if name != "kwargs")
    try:
        facts["kwargs"] = as_text(dict(made_by.get("kwargs") or {}))
    # For example a keyword that is a function. The recording can still be read; a replay reports why it is refused.
    except TensorError as error:
        facts["unknown_kwargs"] = str(error)
    pairs: list[Any] = [spaces]
    if isinstance(spaces, Mapping):
        facts["agents"], pairs = list(spaces), list(spaces.values())
    facts["spaces"] = [[space_to_json(space) for space in pair] for pair in pairs]
    if reward_space is not None:
        facts["reward_space"] = space_to_json(reward_space)
    facts.update((name, value) for name, value in more.items() if value is not None)
    return facts


def describe_world(
    journal: Journal, world: Any, kind: str, made_by: Mapping[str, Any], lane: int | None = None
) -> dict[str, Any]:
    """Return the header of the files for a world, or for one of its lanes.

    Args:
        journal: The recording.
        world: The world.
        kind: `env`, `lanes` or `agents`.
        made_by: What the environment was made of.
        lane: The lane, in a world that steps its lanes one by one; None: all lanes together.
    """
    env, own = world.env, world.env.facts
    spaces: Any = {str(agent): pair for agent, pair in own.agents.items()} or own.spaces
    # `metadata` is the environment's own dict, which may contain anything.
    render_fps = (env.properties().get("world.metadata") or {}).get("render_fps")
    is_rate = isinstance(render_fps, (int, float)) and 0 < render_fps < math.inf
    return facts_of(
        journal, kind, spaces, made_by, own.reward_space,
        world=world.name,
        lanes=own.num_envs if kind == "lanes" else None,
        lane=lane,
        fps=world.fps,
        render_fps=render_fps if is_rate else None,  # for videos
        same_step=own.autoreset is AutoresetMode.SAME_STEP or None,
        recorded_by="server",
    )  # fmt: skip
