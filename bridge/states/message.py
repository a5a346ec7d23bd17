"""The message of states, which the composition root hands to a server. Other modules are imported at the first use."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from bridge.core.encoding.properties import Property
from bridge.core.worlds.messages import AskedMessage, MessageHandler, MessagePart, SessionMessage, Stage
from bridge.core.worlds.scheduling import Scheduler
from bridge.states.bounds import FORM, States

__all__ = ["states_message"]


def states_message(limits: States) -> SessionMessage:
    """Return the message that serves states within some limits."""
    # Identifies this start of the server: states of an earlier start no longer exist.
    start = secrets.token_hex(8)
    return SessionMessage(FORM, part=partial(_make_part, start=start), handler=partial(_LateHandler, limits, start))


def _make_part(stage: Stage, start: str) -> MessagePart:
    from bridge.states.part import StatesPart

    return StatesPart(stage, start)


class _LateHandler(MessageHandler):
    """Makes a `StatesHandler` at the first request, and forwards to it.

    Args:
        limits: The limits.
        start: Identifies this start of the server.
        scheduler: The server's scheduler.
    """

    def __init__(self, limits: States, start: str, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._limits, self._start = limits, start
        self._made: Any = None

    async def answer(self, request: bytes, asked: AskedMessage) -> bytes:
        """Forward a request."""
        answer: bytes = await self._made_now().answer(request, asked)
        return answer

    async def joined(self, asked: AskedMessage) -> None:
        """Forward that a client will save states."""
        await self._made_now().joined(asked)

    def _made_now(self) -> Any:
        if self._made is None:
            from bridge.states.handler import StatesHandler

            self._made = StatesHandler(self._limits, self._start, self.scheduler)
        return self._made

    def left(self, client: object) -> None:
        """Forward that a client has left."""
        if self._made is not None:
            self._made.left(client)

    def ended(self, home: object) -> None:
        """Forward that a process has ended."""
        if self._made is not None:
            self._made.ended(home)

    def properties(self) -> Sequence[Property]:
        """Return the handler's properties, once the handler exists."""
        found: Sequence[Property] = () if self._made is None else self._made.properties()
        return found

    def close(self) -> None:
        """Close the handler, when the server stops."""
        if self._made is not None:
            self._made.close()
