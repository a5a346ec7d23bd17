"""The environments of instances: real-time worlds that begin an episode when they are told to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from bridge.errors import InvalidActionError, PacketError, SettingError
from bridge.perlert.protocol.codec import TextCodec
from bridge.server.serve import recorded
from bridge.worlds.default_actions import default_action
from bridge.worlds.isolated.world import Isolation
from bridge.worlds.multi_agent.source import ParallelSource
from bridge.worlds.policies import Policy, as_policy
from bridge.worlds.realtime.clocked_world import RealtimeOptions
from bridge.worlds.scheduling import Runtime

__all__ = ["StandIns", "default_name", "make_world", "slots_of"]

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


class StandIns:
    """What agents do whose client has not said what to do, or who have none: a world's function for default actions."""

    def __init__(self) -> None:
        self.bots: dict[str, Policy] = {}
        """By the agent's name; they act while no client holds the slot."""
        self.taken: frozenset[str] = frozenset()
        """The agents whose slots clients hold. The world's thread reads it, so it is replaced and never changed."""
        self._actions: dict[str, Any] = {}

    def __call__(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return the action of an agent."""
        name = str(agent)
        if name in self.bots and name not in self.taken:
            return self.bots[name](observation)
        return self._actions[name] if name in self._actions else default_action(agent, observation, space)

    def add_bot(self, name: str, policy: Any, space: Any) -> None:
        """Let a policy, or `"random"`, act for an agent."""
        self.bots[name] = as_policy("bots", policy, space)

    def add_action(self, name: str, action: Any, space: Any) -> None:
        """Set what an agent does until its client's first valid action, read from what its text would be."""
        codec = TextCodec(space, named=False, decimals=None)
        try:
            self._actions[name] = codec.decode(codec.encode(action))
        except (InvalidActionError, PacketError) as error:
            raise SettingError(f"expected a default_action of {space} for {name}, got {action!r}") from error


async def make_world(
    env: Any,
    runtime: Runtime,
    name: str,
    stand_ins: StandIns | None,
    *,
    fps: float,
    kwargs: Mapping[str, Any] | None = None,
    isolation: Isolation | None = None,
    thread_safe: bool = False,
    journal: Any = None,
) -> Any:
    """Make a world that begins an episode when it is told to.

    Args:
        env: As for `serve_perlert`.
        runtime: Calls it.
        name: The world's.
        stand_ins: Act where no client does; None: with the first action that is allowed, or zeros.
        fps: Frames a second.
        kwargs: Keywords for the environment's maker.
        isolation: What its process may use; None: it lives in this one.
        thread_safe: Whether it has a thread of its own.
        journal: Records it; None: nothing is recorded.

    Raises:
        SettingError: It is something else, or cannot be sent to another process.
        RequestError: It could not be made.
    """
    if isinstance(env, str | gymnasium.envs.registration.EnvSpec):
        env = partial(gymnasium.make, env)
    realtime = RealtimeOptions(fps, default_action=stand_ins, catch_up=CATCH_UP, autoreset=False)
    source = ParallelSource(env, None, kwargs, isolation, realtime=realtime, thread_safe=thread_safe)
    return await recorded(source, journal).make_world(name, {}, runtime)
