"""Lanes that begin their next episodes in the same Step that ends the previous ones, if the client asks for it.

If a client has set the property `world.autoreset` to `same_step`, the response to a Step also contains the responses
to the client's next requests: the Reset of the lanes that ended, and the Step that begins their episodes. The
environment is called as if the client had sent these requests, so observers and recordings see no difference.
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
    """The responses of an agent of lanes whose client asks for next episodes in the same Step.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: EnvAgent) -> None:
        self._agent: EnvAgent = weakref.proxy(agent)  # it owns this, and is to be freed at once
        self._on = False
        self._unbegun: Sequence[int] = ()
        """The lanes that the previous Step ended, and whose next episodes failed to begin in it."""

    def reset(self, options: object) -> None:
        """Note that the client's own Reset begins episodes, in all lanes or in those of its `reset_mask`."""
        mask = options.get("reset_mask") if isinstance(options, Mapping) else None
        self._unbegun = [] if mask is None else [lane for lane in self._unbegun if not mask[lane]]

    def placed(self, lanes: Sequence[int]) -> None:
        """Note that lanes were put into another situation, from which they continue."""
        self._unbegun = [lane for lane in self._unbegun if lane not in lanes]

    async def stepped(self, lanes: list[int], ended: Array) -> None:
        """Begin the next episodes of lanes that a Step ended, if the client asks for it.

        Args:
            lanes: The numbers of these lanes, ascending.
            ended: The same lanes as a mask, bool, shape `(lanes,)`.
        """
        if not (self._on and self._agent.asks_as_usual):
            return
        if self._unbegun:
            # The client counts the step that begins them as an episode that was truncated, and asks for a new one.
            ended[list(self._unbegun)] = True
            lanes = ended.nonzero()[0].tolist()
        if lanes:
            await self._begin_next(lanes, ended)

    async def _begin_next(self, lanes: list[int], ended: Array) -> None:
        """Begin the next episodes of lanes that ended, and keep the response to the Step."""
        agent, world = self._agent, self._agent.world
        # Read before the reset: each note is sent once, in the values that the client reads first. The arrays are
        # copied, because an environment may write its next observation into the same arrays.
        *parts, info = agent.values(agent.usual)
        told: list[Any] = [np.array(part) for part in parts]
        self._unbegun = ()
        # Protobuf reads concatenated messages as one merged message: here the info, and the fields beside it.
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
        except Exception as error:  # the Reset is refused, but the step was made
            refused = answer_to("reset", error)
            if refused.code is Code.INTERNAL:
                world.report_failure(refused.message)
            begun.code, begun.message = int(refused.code), refused.message
        agent.answer = [*told, cast(bytes, info) + beside.SerializeToString()]

    def properties(self) -> PropertyTree:
        """Return the property by which the client asks for it; empty if the lanes do not support it."""
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
