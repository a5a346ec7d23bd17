"""The environments of instances: real-time worlds that begin an episode when they are told to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from bridge.errors import InvalidActionError, PacketError, SettingError
from bridge.perlert.protocol.codec import TextCodec
from bridge.server.serve import recorded
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.multi_agent.source import ParallelSource
from bridge.worlds.realtime.clocked_world import RealtimeOptions
from bridge.worlds.scheduling import Runtime

__all__ = ["as_received", "default_name", "make_world", "slots_of"]

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

    `name` is the kind of the one agent of a Gymnasium environment; `slots` are keys, or keys with kinds, instead.

    Raises:
        SettingError: `slots` does not fit.
    """
    if isinstance(slots, str) or (slots is not None and len(set(slots)) != len(agents)):
        raise SettingError(f"expected slots with {len(agents)} keys, one for each agent in order, got {slots!r}")
    if isinstance(slots, Mapping):
        return dict(slots)
    kinds = [re.sub(r"_?[0-9]+\Z", "", agent) or "agent" for agent in agents]
    if list(agents) == ["agent0"]:
        kinds = [name]
    return dict(zip(agents if slots is None else slots, kinds, strict=True))


def as_received(action: Any, codec: TextCodec) -> Any:
    """Return an action that is given as `default_action` as a client's would be read."""
    try:
        return codec.decode(codec.encode(action))
    except (InvalidActionError, PacketError) as error:
        raise SettingError(f"expected a default_action of {codec.space}, got {action!r}") from error


async def make_world(
    env: Any,
    runtime: Runtime,
    name: str,
    stand_in: Callable[[Any, Any, Any], Any],
    *,
    fps: float,
    kwargs: Mapping[str, Any] | None = None,
    isolation: Isolation | None = None,
    thread_safe: bool = False,
    journal: Any = None,
) -> Any:
    """Make a world that begins an episode when it is told to, of an environment as `serve_perlert` takes it.

    `stand_in`, given an agent, its last observation and its action space, acts where no client does.

    Raises:
        SettingError: It is something else, or cannot be sent to another process.
        RequestError: It could not be made.
    """
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        env = partial(gymnasium.make, env)
    realtime = RealtimeOptions(fps, default_action=stand_in, catch_up=CATCH_UP, autoreset=False)
    source = ParallelSource(env, None, kwargs, isolation, realtime=realtime, thread_safe=thread_safe)
    return await recorded(source, journal).make_world(name, {}, runtime)
