"""`Server` and its `Limits`, as users get them: those of the core, with what features add to them.

What lets clients watch and take over is imported when the first client asks for it, unless it will be soon.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.core.extras import feature, has_feature
from bridge.core.keywords import grouped, with_texts
from bridge.core.server import limits as core
from bridge.core.server.core_server import CoreServer
from bridge.core.server.limits import CoreLimits
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.observers import Background, Observer
from bridge.core.worlds.settings import Settings
from bridge.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Limits", "Server", "checked_limits", "watching"]


class Server(CoreServer):
    """Serves worlds until it is stopped.

    It listens from its construction on. `start` serves in a background thread, `run` in the calling one. Works as a
    context manager, which stops it. `serve_gym` and `serve_parallel` return one.
    """

    @grouped(ClientAccess, tls=TLS)
    def dial(self, url: str, *, name: str | None = None, **keywords: Unpack[AccessKeywords]) -> None:
        """Dial a trainer that waits for servers with `listen://`, again and again, from `start` to `stop`.

        The trainer expects the token, which may also be in the URL, `?token=…`. It needs none of this server: the
        connection that was made to it is enough.

        Args:
            url: The trainer's: `grpc://HOST:PORT` or, with TLS, `grpcs://HOST:PORT`; where nothing but HTTPS gets out,
                `wss://HOST:PORT`, or `ws://` without TLS.
            name: The name by which the trainer knows this server, the same each time; None: of machine and process.
            keywords: Those of `ClientAccess`, which the signature lists.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: The server speaks by grpcio, which cannot dial.
        """
        with feature("dial", "dial="):
            from bridge.dial.dialing import Dialing
        if not self.takes_sockets:
            raise SettingError("expected transport='http2' with dial, got 'grpcio', which cannot dial")
        self.attach(Dialing(self, url, ClientAccess(**keywords).credentials, name))


@dataclasses.dataclass(frozen=True)
class Limits(CoreLimits):
    """The limits of a server: `limits=` of `serve_gym` and `serve_parallel`.

    A request beyond a limit is refused with an error that names the limit; nothing else is changed by it.

    Examples:
        >>> from bridge import Limits, serve_gym
        >>> with serve_gym("CartPole-v1", limits=Limits(max_worlds=8, idle_timeout=600.0)) as server:
        ...     print(server.worlds)
        []

    Args:
        keywords: Those of `bridge.core.server.limits.CoreLimits`, which the docstring lists.
        takeover_timeout: Seconds that a person who has taken over from an agent, and slows it down, may do nothing.
        seat_timeout: Seconds that a seat with a `seat_key` waits for a client that lost its connection.

    Raises:
        SettingError: A value is out of its range.
    """

    takeover_timeout: float = 60.0
    seat_timeout: float = 30.0


Limits.__doc__ = with_texts(inspect.getdoc(Limits) or "", CoreLimits)


def checked_limits(limits: Any) -> Limits:
    """Return the keyword `limits`, or raise SettingError where it is something else."""
    found = core.checked_limits(limits)
    if isinstance(found, Limits):
        return found
    # Those of a part of this package that knows the core alone.
    return Limits(**{field.name: getattr(found, field.name) for field in dataclasses.fields(CoreLimits)})


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
