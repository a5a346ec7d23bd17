"""The environment that a server makes as it starts: what it lacks shows at once, and the first world uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from gymnasium import Space

from bridge.encoding.spaces import Layout
from bridge.errors import Code, RequestError, TensorError
from bridge.worlds.environment import Call
from bridge.worlds.scheduling import PendingResult

__all__ = ["MadeAhead"]


class _Closable(Protocol):
    def close(self) -> Call[None]:
        """Close it."""


R = TypeVar("R")
E = TypeVar("E", bound=_Closable)


class MadeAhead(Generic[R, E]):
    """Holds at most one environment until a world takes it. Of a robot or an emulator there is but one."""

    def __init__(self) -> None:
        self._making: PendingResult[None] | None = None
        """Done once an environment has been made, or could not be."""
        self._made: tuple[R, E] | None = None
        """The request, and the environment."""

    async def make(
        self,
        request: R,
        making: Call[E],
        spaces: Callable[[E], Iterable[tuple[Space[object], str]]],
    ) -> E:
        """Make the environment, check that its spaces travel, and return it; it stays held here.

        Args:
            request: What it answers to, as `take` gives it.
            making: Makes it.
            spaces: Returns its spaces, each with a name for messages.

        Raises:
            RequestError: It could not be made, or has a space that does not travel.
        """
        done = self._making = PendingResult()
        try:
            made = await making
            self._made = (request, made)
            for space, name in spaces(made):
                Layout(space, name)
            return made
        except TensorError as error:
            await self.close()
            text = f"this environment has a space that does not travel: {error}"
            raise RequestError(Code.FAILED_PRECONDITION, text) from error
        finally:
            self._making = None
            done.set_result(None)

    async def take(self, request: R | None) -> E | None:
        """Return the environment if it was made for this request, which waits while it is being made; else None.

        One that was made for another request is closed, because there may be no second one at a time.
        """
        if self._making is not None:
            await self._making
        if self._made is not None and _equal(self._made[0], request):
            (_, made), self._made = self._made, None
            return made
        await self.close()
        return None

    async def close(self) -> None:
        """Close the environment, where no world has taken it."""
        made, self._made = self._made, None
        if made is not None:
            await made[1].close()


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arguments that are arrays
        return False
