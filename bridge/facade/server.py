"""The public `Server` and `Limits`: those of the core with the additions of features.

The code for watching and taking over is imported when the first client needs it, or at the start if it will be needed
soon.
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

    It listens from its construction on. `start` serves in a background thread, `run` in the calling thread. As a
    context manager it stops at the end of the block. `serve_gym` and `serve_parallel` return one.
    """

    @grouped(ClientAccess, tls=TLS)
    def dial(self, url: str, *, name: str | None = None, **keywords: Unpack[AccessKeywords]) -> None:
        """Dial a trainer that waits for servers with `listen://`, with retries, from `start` to `stop`.

        The token is the trainer's; it may also be in the URL, `?token=…`. The trainer does not need this server's
        token, because this server has made the connection.

        Args:
            url: The trainer's URL: `grpc://HOST:PORT` or, with TLS, `grpcs://HOST:PORT`; if only HTTPS connections are
                permitted, `wss://HOST:PORT`, or `ws://` without TLS.
            name: The name of this server at the trainer, the same for each connection; None: made from machine and
                process.
            keywords: The fields of `ClientAccess`, which the signature lists.

        Raises:
            AddressError: The URL is malformed.
            SettingError: The server uses grpcio, which cannot dial.
        """
        with feature("dial", "dial="):
            from bridge.dial.dialing import Dialing
        if not self.takes_sockets:
            raise SettingError("expected transport='http2' with dial, got 'grpcio', which cannot dial")
        self.attach(Dialing(self, url, ClientAccess(**keywords).credentials, name))


@dataclasses.dataclass(frozen=True)
class Limits(CoreLimits):
    """The limits of a server: `limits=` of `serve_gym` and `serve_parallel`.

    A request beyond a limit is refused with an error that names the limit, and has no other effect.

    Examples:
        >>> from bridge import Limits, serve_gym
        >>> with serve_gym("CartPole-v1", limits=Limits(max_worlds=8, idle_timeout=600.0)) as server:
        ...     print(server.worlds)
        []

    Args:
        keywords: The fields of `bridge.core.server.limits.CoreLimits`, which the docstring lists.
        takeover_timeout: Seconds that a person who has taken over from an agent may be idle while the agent waits.
        seat_timeout: Seconds that a seat with a `seat_key` is kept for a client that lost its connection.

    Raises:
        SettingError: A value is out of its range.
    """

    takeover_timeout: float = 60.0
    seat_timeout: float = 30.0


Limits.__doc__ = with_texts(inspect.getdoc(Limits) or "", CoreLimits)


def checked_limits(limits: Any) -> Limits:
    """Return the keyword `limits` as `Limits`, or raise SettingError if it has the wrong type."""
    found = core.checked_limits(limits)
    if isinstance(found, Limits):
        return found
    # From a module that knows only the core.
    return Limits(**{field.name: getattr(found, field.name) for field in dataclasses.fields(CoreLimits)})


_SETTINGS = {"frame", "lanes", "role", "seat_key"}
"""The JoinWorld settings that the gallery handles."""


def watching(limits: Limits, quality: int | None, *, at_once: bool) -> Sequence[Observer]:
    """Return the observer for watching and taking over, if this installation has it.

    Args:
        limits: The server's limits.
        quality: The quality of pictures; see `Web`; None: the default.
        at_once: True: import it now, because an import would delay a real-time world, or because people will watch.
    """
    if not has_feature("web"):
        return ()
    lazy = _LazyGallery(limits, quality)
    if at_once:
        lazy.load()
    return (lazy,)


class _LazyGallery(Observer):
    """Delegates to `bridge.web.watching.agents.Gallery`, which it imports when a client first needs it.

    Most servers are used for training, and nobody watches. They save the memory and the time of the import.

    Args:
        limits: The server's limits.
        quality: The quality of pictures; None: the default.
    """

    def __init__(self, limits: Limits, quality: int | None) -> None:
        self._limits, self._quality = limits, quality
        self._background: Background | None = None
        self._loaded: Observer | None = None

    def load(self) -> Observer:
        """Return the gallery; the first call imports it."""
        if self._loaded is None:
            from bridge.web.site import Web
            from bridge.web.watching.agents import Gallery

            # Programs may watch without a page too.
            quality = Web().quality if self._quality is None else self._quality
            self._loaded = Gallery(self._limits.takeover_timeout, self._limits.seat_timeout, quality)
            if self._background is not None:
                self._loaded.start(self._background)
        return self._loaded

    def start(self, background: Background) -> None:
        """Start with the server."""
        self._background = background
        if self._loaded is not None:
            self._loaded.start(background)

    def join(self, world: World, settings: Settings, join: Callable[[Settings], Agent]) -> Agent:
        """Let an agent join a world, through the gallery if the settings are for it."""
        if self._loaded is None and not _SETTINGS & set(settings):
            return join(settings)
        return self.load().join(world, settings, join)

    def keep(self, world: World, agent: Agent) -> bool:
        """Return whether the gallery keeps an agent in its world."""
        return self._loaded is not None and self._loaded.keep(world, agent)

    def describe(self, world: World) -> Mapping[str, object]:
        """Return the gallery's description of a world."""
        return {} if self._loaded is None else self._loaded.describe(world)

    def counts(self, worlds: Sequence[World]) -> Mapping[str, float]:
        """Return the gallery's counts."""
        return {} if self._loaded is None else self._loaded.counts(worlds)

    def close(self) -> None:
        """Close the gallery with the server."""
        if self._loaded is not None:
            self._loaded.close()
