"""Lanes that begin their next episodes within the Step that ends the last ones, for a client that asks for it.

A client that has set the property `world.autoreset` to `same_step` gets with the answer to a Step also the answer to
what it would ask next: the Reset of the lanes that ended, and the Step that begins their episodes. The environment is
called as if it had asked, so observers and recordings see the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding import values
from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.base import answer_to
from bridge.core.worlds.settings import masked, wrong
from bridge.errors import Code
from bridge.pb import bridge_pb2

if TYPE_CHECKING:
    from bridge.core.worlds.agent import EnvAgent

__all__ = ["SameStep"]

_IN_NEXT_STEP, _IN_SAME_STEP = "next_step", "same_step"


class SameStep:
    """What an agent of lanes is told, where its client asks for next episodes within the same Step.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: EnvAgent) -> None:
        self._agent: EnvAgent = weakref.proxy(agent)  # it owns this, and is to be freed at once
        self._on = False
        self._unbegun: Sequence[int] = ()
        """The lanes that the Step before ended, and that failed to begin their next episodes with it."""

    def reset(self, options: object) -> None:
        """Note that a Reset of the client's own begins episodes: of all lanes, or of those of its `reset_mask`."""
        mask = options.get("reset_mask") if isinstance(options, Mapping) else None
        self._unbegun = [] if mask is None else [lane for lane in self._unbegun if not mask[lane]]

    def placed(self, lanes: Sequence[int]) -> None:
        """Note that lanes are in another situation, from which they go on."""
        self._unbegun = [lane for lane in self._unbegun if lane not in lanes]

    async def stepped(self, lanes: list[int], ended: Array) -> None:
        """Begin the next episodes of lanes that a Step ended, where the client asks for that.

        Args:
            lanes: These lanes, in rising order.
            ended: The same as bools `(lanes,)`.
        """
        if not (self._on and self._agent.asks_as_usual):
            return
        if self._unbegun:
            # The client takes the step in which they begin for an episode of its own, which was cut, and asks anew.
            ended[list(self._unbegun)] = True
            lanes = ended.nonzero()[0].tolist()
        if lanes:
            await self._begin_next(lanes, ended)

    async def _begin_next(self, lanes: list[int], ended: Array) -> None:
        """Begin the next episodes of lanes that ended, and keep what the Step is answered."""
        agent, world = self._agent, self._agent.world
        # First: notes are told once, and the client reads this part first. Copies, because an environment may write
        # what it observes next into the same arrays.
        *parts, info = agent.values(agent.usual)
        told: list[Any] = [np.array(part) for part in parts]
        self._unbegun = ()
        # Messages of protobuf that stand one behind the other are read as one: the info, and what is beside it.
        beside = bridge_pb2.Value()
        begun = beside.begun
        begun.lanes.extend(lanes)
        try:
            options = None if len(lanes) == len(ended) else masked(None, ended)
            agent.take_reset(await world.env.reset(seed=None, options=options))
            self._unbegun = agent.take_failures()
            if self._unbegun:
                agent.truncated[list(self._unbegun)] = True
            rows, begun_info = agent.begun(lanes)
            begun.rows.extend(rows)
            if begun_info != values.EMPTY_DICT:
                begun.info = begun_info
        except Exception as error:  # the Reset would have been refused; the step was taken all the same
            refused = answer_to("reset", error)
            if refused.code is Code.INTERNAL:
                world.report_failure(refused.message)
            begun.code, begun.message = int(refused.code), refused.message
        agent.answer = [*told, cast(bytes, info) + beside.SerializeToString()]

    def properties(self) -> PropertyTree:
        """Return the property by which the client asks for it, where the lanes can do so."""
        facts = self._agent.world.env.facts
        if facts.autoreset is not AutoresetMode.NEXT_STEP or not facts.resets_lanes:
            return PropertyTree()
        text = f"when lanes that ended begin anew for this client: {_IN_NEXT_STEP}, {_IN_SAME_STEP}"
        return PropertyTree([Property("world.autoreset", TEXT, text, self._mode, self._set_mode)])

    def _mode(self) -> str:
        return _IN_SAME_STEP if self._on else _IN_NEXT_STEP

    def _set_mode(self, mode: object) -> None:
        if mode not in (_IN_NEXT_STEP, _IN_SAME_STEP):
            raise wrong("world.autoreset", f"{_IN_NEXT_STEP} or {_IN_SAME_STEP}", mode)
        self._on, self._unbegun = mode == _IN_SAME_STEP, ()
