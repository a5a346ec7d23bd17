"""The seat from which a person takes over from an agent: `role=takeover` in JoinWorld."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.base import Agent
from bridge.core.worlds.hosts import refuse_private
from bridge.core.worlds.settings import read_scalar, refuse_unknown
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.web.watching.match import visible_name
from bridge.web.watching.takeovers import Takeover
from bridge.web.watching.watch import Watch

__all__ = ["TAKEOVER", "TakeoverAgent", "join_takeover"]

TAKEOVER = "takeover"
"""The value of the setting `role`."""
_MAX_NAME = 80


def join_takeover(
    world: EnvWorld,
    settings: Mapping[str, pb.Tensor],
    find_watch: Callable[[EnvWorld], Watch],
    forget: Callable[[EnvWorld], None],
) -> TakeoverAgent:
    """Add a person who takes over from an agent, selected by the settings `agent` or `lane`, and named by `name`.

    Args:
        world: The world.
        settings: The settings of JoinWorld.
        find_watch: Returns the watch between the world and its environment, and creates it if needed.
        forget: Called when the world has no viewers any more.

    Raises:
        RequestError: INVALID_ARGUMENT: a setting is invalid; RESOURCE_EXHAUSTED: another person has the seat.
    """
    facts = world.env.facts
    # A replay has no seats: its episodes have already happened.
    if not world.played:
        raise RequestError(Code.FAILED_PRECONDITION, "nobody plays in this world, so nobody can be taken over from")
    several, lanes = bool(facts.agents), facts.num_envs
    known = ("role", "name", "pace", *(("agent",) if several else ("lane",) if lanes else ()))
    refuse_unknown(settings, known, "JoinWorld")
    world.refuse_if_over()
    if not world.allows_substitutes:
        text = "nobody takes over in a match: take a free seat, or watch with the setting role=spectator"
        raise RequestError(Code.FAILED_PRECONDITION, text)
    who = visible_name(str(_read(settings, "name", str) or ""))[:_MAX_NAME] or "somebody"
    pace = _read_pace(settings)
    key: Any = 0
    if several:
        agents = {str(agent): agent for agent in facts.agents}
        name = _read(settings, "agent", str)
        if name not in agents:
            text = f"expected the setting agent to be one of {', '.join(agents)}, got {name!r:.80}"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        key = agents[name]
        space = facts.agents[key][1]
    else:
        lane = _read(settings, "lane", int) or 0
        if not 0 <= lane < (lanes or 1):
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected the lane to be from 0 to {(lanes or 1) - 1}, got {lane}"
            )
        key, space = int(lane), facts.action_space
    # Created last: if an error was raised after it, nothing would call `forget`.
    watch = find_watch(world)
    if key in watch.takeovers:
        text = f"{watch.takeovers[key].who!r} has the seat already from which one takes over; try again later"
        raise RequestError(Code.RESOURCE_EXHAUSTED, text)
    return TakeoverAgent(world, watch, forget, key, space, who, pace)


def _read_pace(settings: Mapping[str, pb.Tensor]) -> float | None:
    pace = read_scalar(settings, "pace")
    if pace is None:
        return None
    # With a pace below one step per second, a trainer's requests would time out.
    if not isinstance(pace, (np.integer, np.floating)) or not 1 <= pace < np.inf:
        text = f"expected the setting pace to be a number of steps a second, 1 or more, got {pace!r:.80}"
        raise RequestError(Code.INVALID_ARGUMENT, text)
    return float(pace)


def _read(settings: Mapping[str, pb.Tensor], name: str, kind: type) -> Any:
    value = read_scalar(settings, name)
    if value is not None and not isinstance(value, str if kind is str else np.integer):
        wanted = "a text" if kind is str else "an integer"
        raise RequestError(Code.INVALID_ARGUMENT, f"expected the setting {name} to be {wanted}, got {value!r:.80}")
    return value


class TakeoverAgent(Agent):
    """An agent whose Steps replace another agent's action; a Step without an action gives control back.

    Args:
        world: The world.
        watch: The watch between the world and its environment.
        forget: Called when the world has no viewers any more.
        key: The agent's id, or the lane.
        space: The action space.
        who: The person's name.
        pace: The most steps per second of a world in lock-step while the person has the seat; None: no limit.
    """

    def __init__(
        self,
        world: EnvWorld,
        watch: Watch,
        forget: Callable[[EnvWorld], None],
        key: Any,
        space: Any,
        who: str,
        pace: float | None,
    ) -> None:
        self._world = world
        self._watch = watch
        self._forget = forget
        self._key = key
        self._space = space
        self._layout = Layout(space, "action")
        self.actions = dict(enumerate(self._layout.specs, start=1))
        numbers = (("acting", np.bool_), ("steps", np.int64), ("seconds_left", np.float64))
        self.observations = {uid: Spec.number(name, (), kind) for uid, (name, kind) in enumerate(numbers, start=1)}
        # It counts as a viewer: the watch is attached to the environment only while there are viewers.
        watch.add(self)
        watch.takeovers[key] = self._takeover = Takeover(None, who, watch.now(), pace)
        self._acted_at = watch.now()
        self._left = False

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Give control back; nothing is reset."""
        refuse_unknown(settings, (), "Reset")
        self._takeover.action = None

    async def begin(self) -> int:
        """Begin: take the seat."""
        self._takeover.left = False
        self._world.resets.end(self)  # ResetWorld does not wait for it
        self._world.refuse_if_over()
        return pb.RUNNING

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Take over, or give control back."""
        return await self.apply(self.decode(actions))

    def decode(self, actions: Mapping[int, Array]) -> Any:
        """Return the environment's action; None: the agent's own."""
        if not actions:
            return None
        try:
            return self._layout.unpack([actions[uid] for uid in self.actions], check=True)
        except (KeyError, TensorError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad action: {error}") from error

    async def apply(self, action: Any) -> int:
        """Take over, or give control back."""
        self._world.refuse_if_over()
        now = self._watch.now()
        if action is not None:
            self._acted_at = now
        # A page sends Steps without an action even if its person does nothing, so they are no sign of a person.
        elif self._seconds_left() <= 0:
            self._give_back()
            seconds = self._watch.takeover_timeout
            text = (
                f"nothing was done for takeover_timeout={seconds:g} s, so the agent acts again; join again to take over"
            )
            raise RequestError(Code.FAILED_PRECONDITION, text)
        if action is None:
            self._takeover.release(now)
        else:
            self._takeover.hold(action, now)
        self._world.pacer.choose_again()
        return pb.RUNNING

    def _seconds_left(self) -> float:
        """Return the seconds until the agent gets its seat back if no action arrives."""
        if self._takeover.pace is None or self._watch.has_clock:  # it slows nobody down
            return np.inf
        return self._acted_at + self._watch.takeover_timeout - self._watch.now()

    def _give_back(self) -> None:
        # After a timeout gave control back, another person may have the seat.
        if self._watch.takeovers.get(self._key) is self._takeover:
            del self._watch.takeovers[self._key]
            self._world.pacer.choose_again()

    def interrupt(self) -> None:
        """Give control back."""
        self._takeover.action = None

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return whether it acts, the steps of the world, and the seconds until the agent gets its seat back."""
        acting, left = self._takeover.acting, max(0.0, self._seconds_left())
        now = {1: np.asarray(acting), 2: np.asarray(self._watch.mark(), np.int64), 3: np.asarray(left)}
        return {uid: now[uid] for uid in uids}

    def properties(self) -> PropertyTree:
        """Return the properties of the world; for one of several seats, with the keys of this seat."""
        if not self._world.env.facts.agents and self._world.env.facts.num_envs is None:
            return self._world.properties()

        def controls() -> str:
            from bridge.web.controls import controls_of_agent  # imported when a client asks for it

            return controls_of_agent(self._world.env.facts, str(self._key), self._space)

        keys = Property("world.controls", TEXT, "what keys do for a person, as JSON", controls)
        return self._world.properties().merged(PropertyTree([keys]))

    def rest(self) -> bool:
        """Give control back until the client returns."""
        self.interrupt()
        self._takeover.left = True
        return True

    @property
    def plays(self) -> bool:
        """Always False: it acts for another client's agent."""
        return False

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Forward a call; the session only passes calls that a person who takes over may make."""
        refuse_private(request.name)
        self._world.refuse_if_over()
        return await self._world.env.call(request)

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Forward a request for a property."""
        return await self._world.env.answer_property(request)

    def leave(self) -> None:
        """Give control back, and leave the world."""
        if self._left:
            return
        self._left = True
        self._give_back()
        if self._watch.remove(self):
            self._forget(self._world)
