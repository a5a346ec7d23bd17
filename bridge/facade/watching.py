"""What lets clients watch and take over: imported when the first client asks for it, unless it will be soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bridge.core.extras import has_feature
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.observers import Background, Observer
from bridge.core.worlds.settings import Settings
from bridge.facade.server import Limits

__all__ = ["watching"]

_SETTINGS = {"frame", "lanes", "role", "seat_key"}
"""The JoinWorld settings of which it knows something that worlds do not."""


def watching(limits: Limits, quality: int | None, *, at_once: bool) -> Sequence[Observer]:
    """Return what lets clients watch and take over in the worlds of a server, where this installation has it.

    Args:
        limits: The server's.
        quality: Of pictures, as of `Web`; None: the default.
        at_once: Whether it is imported now: for worlds that others wait for, or that people are going to look at.
    """
    if not has_feature("web"):
        return ()
    lazy = _LazyGallery(limits, quality)
    if at_once:
        lazy.load()
    return (lazy,)


class _LazyGallery(Observer):
    """Stands for `bridge.web.watching.agents.Gallery` until a client asks for something of it.

    Most servers train, and nobody looks: they need not have the modules, which take memory and time to import.

    Args:
        limits: The server's.
        quality: Of pictures; None: the default.
    """

    def __init__(self, limits: Limits, quality: int | None) -> None:
        self._limits, self._quality = limits, quality
        self._background: Background | None = None
        self._loaded: Observer | None = None

    def load(self) -> Observer:
        """Return the gallery; it is imported where that was not done."""
        if self._loaded is None:
            from bridge.web.site import Web
            from bridge.web.watching.agents import Gallery

            # Programs watch, and take pictures, where there is no page, too.
            quality = Web().quality if self._quality is None else self._quality
            self._loaded = Gallery(self._limits.takeover_timeout, self._limits.seat_timeout, quality)
            if self._background is not None:
                self._loaded.start(self._background)
        return self._loaded

    def start(self, background: Background) -> None:
        """Begin with a server."""
        self._background = background
        if self._loaded is not None:
            self._loaded.start(background)

    def join(self, world: World, settings: Settings, join: Callable[[Settings], Agent]) -> Agent:
        """Let an agent into a world, as the gallery does where the settings are for it."""
        if self._loaded is None and not _SETTINGS & set(settings):
            return join(settings)
        return self.load().join(world, settings, join)

    def keep(self, world: World, agent: Agent) -> bool:
        """Return whether the gallery keeps an agent in its world."""
        return self._loaded is not None and self._loaded.keep(world, agent)

    def describe(self, world: World) -> Mapping[str, object]:
        """Return what the gallery says of a world."""
        return {} if self._loaded is None else self._loaded.describe(world)

    def counts(self, worlds: Sequence[World]) -> Mapping[str, float]:
        """Return what the gallery counts."""
        return {} if self._loaded is None else self._loaded.counts(worlds)

    def close(self) -> None:
        """End with the server."""
        if self._loaded is not None:
            self._loaded.close()
