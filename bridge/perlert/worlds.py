"""The environments of instances: worlds that a clock drives, by name and with their slots."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from bridge.errors import SettingError
from bridge.server.serve import recorded
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.multi_agent.source import ParallelSource
from bridge.worlds.realtime.clocked_world import Realtime
from bridge.worlds.scheduling import Runtime

__all__ = ["default_name", "make_world", "slots_of"]

CATCH_UP = 0.5
"""Seconds of frames that are made up for when the server is late; later ones are left out."""


def default_name(env: Any) -> str:
    """Return the NAME that an environment gets unless told: `ALE/Pong-v5` is `pong`."""
    text = env if isinstance(env, str) else getattr(env, "id", None) or getattr(env, "__name__", None) or "world"
    text = re.sub(r"[-_]v[0-9]+\Z", "", re.split(r"[/:.]", str(text))[-1])
    if text == "<lambda>":
        return "world"
    return re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_")[:64] or "world"


def slots_of(agents: Sequence[str], name: str, slots: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return KEY and KIND of the slot of each agent, in order: the agent's name, and that up to its trailing `_N`.

    Args:
        agents: The agents of the environment.
        name: The kind of the one agent of a Gymnasium environment.
        slots: Keys (and, as a mapping, kinds) instead.

    Raises:
        SettingError: `slots` does not fit.
    """
    kinds = [re.sub(r"_?[0-9]+\Z", "", agent) or "agent" for agent in agents]
    if list(agents) == ["agent0"]:
        kinds = [name]
    if slots is None:
        return dict(zip(agents, kinds, strict=True))
    if isinstance(slots, str) or len(slots) != len(agents) or len(set(slots)) < len(slots):
        raise SettingError(f"expected slots with {len(agents)} keys, one for each agent in order, got {slots!r}")
    return dict(slots) if isinstance(slots, Mapping) else dict(zip(slots, kinds, strict=True))


async def make_world(
    env: Any,
    kwargs: Mapping[str, Any],
    runtime: Runtime,
    name: str,
    *,
    fps: float,
    default_action: Callable[[Any, Any, Any], Any] | None = None,
    isolation: Isolation | None = None,
    thread_safe: bool = False,
    journal: Any = None,
) -> Any:
    """Make a world that begins an episode when it is told to.

    Args:
        env: As for `serve_perlert`.
        kwargs: Keywords for the environment's maker.
        runtime: Calls it.
        name: The world's.
        fps: Frames a second.
        default_action: What an agent does that nobody plays, of its name, last observation and action space.
        isolation: What its process may use; None: it lives in this one.
        thread_safe: Whether it has a thread of its own.
        journal: Records it; None: nothing is recorded.

    Raises:
        SettingError: It is something else, or cannot be sent to another process.
        RequestError: It could not be made.
    """
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        env = partial(gymnasium.make, env)
    realtime = Realtime(fps, default_action=default_action, catch_up=CATCH_UP, autoreset=False)
    source = ParallelSource(env, None, kwargs, isolation, realtime=realtime, thread_safe=thread_safe)
    return await recorded(source, journal).make_world(name, {}, runtime)
