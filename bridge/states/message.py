"""The message of states, as the composition root hands it to a server; the rest is imported for the first state."""

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
    # Of this start of the server: what was saved in another one is gone.
    start = secrets.token_hex(8)
    return SessionMessage(FORM, part=partial(_make_part, start=start), handler=partial(_LateHandler, limits, start))


def _make_part(stage: Stage, start: str) -> MessagePart:
    from bridge.states.part import StatesPart

    return StatesPart(stage, start)


class _LateHandler(MessageHandler):
    """Makes a `StatesHandler` for the first request, and hands on to it.

    Args:
        limits: The bounds.
        start: Names this start of the server.
        scheduler: As of every handler.
    """

    def __init__(self, limits: States, start: str, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._limits, self._start = limits, start
        self._made: Any = None

    async def answer(self, request: bytes, asked: AskedMessage) -> bytes:
        """Hand on a request."""
        answer: bytes = await self._made_now().answer(request, asked)
        return answer

    async def joined(self, asked: AskedMessage) -> None:
        """Hand on that a client is going to save states."""
        await self._made_now().joined(asked)

    def _made_now(self) -> Any:
        if self._made is None:
            from bridge.states.handler import StatesHandler

            self._made = StatesHandler(self._limits, self._start, self.scheduler)
        return self._made

    def left(self, client: object) -> None:
        """Hand on that a client is gone."""
        if self._made is not None:
            self._made.left(client)

    def ended(self, home: object) -> None:
        """Hand on that a process is gone."""
        if self._made is not None:
            self._made.ended(home)

    def properties(self) -> Sequence[Property]:
        """Return those of the handler, from the first state on."""
        found: Sequence[Property] = () if self._made is None else self._made.properties()
        return found

    def close(self) -> None:
        """End with the server."""
        if self._made is not None:
            self._made.close()
