"""The keywords that `serve_gym` and `serve_parallel` have in common."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bridge.core.extras import feature, has_feature
from bridge.core.server.auth import Auth, Security, ServingKeywords, ServingOptions
from bridge.core.server.core_server import Transport
from bridge.core.server.registry import Overview, WorldSource
from bridge.core.transport.credentials import TLS
from bridge.core.worlds.environment import Isolation, start_method
from bridge.core.worlds.messages import SessionMessage
from bridge.core.worlds.observers import Observer
from bridge.errors import SettingError
from bridge.facade.server import Limits, Server, checked_limits, watching

if TYPE_CHECKING:
    from bridge.core.adapters.named import ActionNames
    from bridge.core.server.port import PortProtocol
    from bridge.core.worlds.realtime_options import RealTime
    from bridge.recording.record import Recording
    from bridge.states.bounds import States
    from bridge.web.site import Web

__all__ = ["GROUPS", "ServerKeywords", "ServerOptions"]

GROUPS: dict[str, type | str] = {
    "limits": Limits,
    "realtime": "bridge.core.worlds.realtime_options:RealTime",
    "record": "bridge.recording.record:Recording",
    "tls": TLS,
    "auth": Auth,
    "web": "bridge.web.site:Web",
    "states": "bridge.states.bounds:States",
}
"""The dataclasses that keywords take, by keyword. The command line has an option for each of their fields.

A class of a feature, or one that few servers need, is given as `MODULE:CLASS`, and imported only if its fields are
needed."""


_OF_SERVER = {"records": False, "match": False}
"""The entries in a server's overview for features that it does not have: the page reads them for each server."""
_OF_WORLD = dict.fromkeys(("recording", "replay", "match"))
"""The same entries for each world."""


class ServerKeywords(ServingKeywords, total=False):
    """The keywords that make `ServerOptions`, for type checkers."""

    env_kwargs: Mapping[str, Any] | None
    unix_path: str | None
    fps: float | None
    realtime: RealTime | None
    isolation: Literal["process"] | None
    thread_safe: bool
    limits: Limits | None
    transport: Transport
    record: str | os.PathLike[str] | Recording | None
    web: bool | Web
    protocols: Sequence[PortProtocol | str]
    observers: Sequence[Observer | str]
    messages: Sequence[str | SessionMessage]
    message_options: Mapping[str, Mapping[str, Any]] | None
    states: States | Literal[False] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions(ServingOptions):
    """Where and how worlds are served. These keywords are the same for all kinds of worlds.

    Args:
        env_kwargs: Keyword arguments for the environment's constructor. Arguments that a client sends override them.
        unix_path: Also listen on a Unix socket at this path, for clients on this machine: a little faster than TCP, and
            open to this user only. Its URL is `unix://` followed by the path.
        fps: Frames per second of a real-time world, which runs whether or not `step` is called; None: lock-step, where
            each step waits for an action.
        realtime: With `fps`, how frames and late actions are handled; None: the defaults of `RealTime`.
        isolation: `process` runs each world in its own process, so that a crash, an endless loop or a memory leak
            ends only that world; None: all worlds run in the server's process.
        thread_safe: Run each world (in real time, each lane) in its own thread, so that a slow environment does not
            delay others. False: one thread creates and calls all environments of the server, and only one environment
            of the process runs at a time.
        limits: Limits for connections, worlds, bytes and times; None: the defaults of `Limits`.
        transport: The gRPC implementation: `http2`, this package's own, or `grpcio`, the library, for untrusted
            networks and unusual proxies; it is three to five times slower and needs two threads for each connection.
        record: A folder in which every episode is recorded, or `Recording(folder, …)`; None: nothing is recorded.
        web: Also serve a web page and WebSocket at the port, for browsers and for clients behind proxies that pass
            nothing else. The environment is made with `render_mode="rgb_array"` if it supports that and `env_kwargs`
            gives no other mode.
        protocols: Further protocols at the port: names of protocols from other packages (docs/plugins.md),
            `websocket` for `ws://` clients without a page, or `bridge.PortProtocol` objects.
        observers: Instances of subclasses of `bridge.Observer`, which are told what worlds and environments do, or
            names of observers from other packages. With `processes` each process has copies of them.
        messages: Messages that sessions answer: names from installed packages (docs/plugins.md), or
            `bridge.SessionMessage` objects. Their code runs in this server and in the processes of environments.
        message_options: The keyword arguments of these messages, a dict for each name.
        states: Limits for the states that clients save; None: the defaults of `States`; False: clients cannot save.

    Raises:
        SettingError: A group has the wrong class, or a value is out of its range.
    """

    env_kwargs: Mapping[str, Any] | None = None
    unix_path: str | None = None
    fps: float | None = None
    realtime: RealTime | None = None
    isolation: Literal["process"] | None = None
    thread_safe: bool = False
    limits: Limits | None = None
    transport: Literal["http2", "grpcio"] = "http2"
    record: str | os.PathLike[str] | Recording | None = None
    web: bool | Web = False
    protocols: Sequence[PortProtocol | str] = ()
    observers: Sequence[Observer | str] = ()
    messages: Sequence[str | SessionMessage] = ()
    message_options: Mapping[str, Mapping[str, Any]] | None = None
    states: States | Literal[False] | None = None
    bounds: Limits = dataclasses.field(init=False)
    """`limits`, or the defaults."""
    page: Web | None = dataclasses.field(init=False)
    """The page's options; None: there is no page."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", checked_limits(self.limits))
        object.__setattr__(self, "page", _page_of(self.web))

    def kwargs_for(self, env: object, *, made: bool = False) -> Mapping[str, Any] | None:
        """Return the keyword arguments of the environment's constructor; with a page, including its render mode.

        Args:
            env: The served environment, as given by the user.
            made: True if it is an environment object.
        """
        if self.page is None or made:
            return self.env_kwargs
        with feature("web", "web="):
            from bridge.web.watching.render_mode import drawing_kwargs
        return drawing_kwargs(env, self.env_kwargs)

    def isolated(self, *, always: bool = False) -> Isolation | None:
        """Return the limits of worlds' processes; None: worlds run in the server's process. See `Isolation.of`."""
        if self.isolation is not None:
            start_method()  # raises if a world's process would import a main module without a guard
        return Isolation.of(self.isolation, self.bounds.call_timeout, self.bounds.max_world_bytes, always=always)

    def play_fps(self) -> float | None:
        """Return the steps per second at which people play; raises SettingError in real time or for a wrong value."""
        return _checked_play_fps(None if self.page is None else self.page.play_fps, self.fps)

    def action_names(self) -> ActionNames | None:
        """Return the names of actions for people; raises SettingError for malformed names."""
        if self.page is None or self.page.action_names is None:
            return None
        from bridge.core.adapters.named import ActionNames

        return ActionNames.of(self.page.action_names)

    def server(
        self,
        source: WorldSource,
        security: Security,
        *,
        bounds: Limits | None = None,
        protocols: Sequence[PortProtocol] = (),
    ) -> Server:
        """Return a server that is not started.

        Args:
            source: Makes the server's worlds.
            security: The result of `security`.
            bounds: The limits to use instead of `limits`; None: use `limits`.
            protocols: Protocols in addition to those of the options.
        """
        page, bounds = self.page, bounds or self.bounds
        if page is not None and self.transport == "grpcio":
            raise SettingError(
                "expected web=True with transport='http2', got it with 'grpcio', which speaks gRPC alone"
            )
        hosts, of_page = None, list[Any]()
        if page is not None:
            from bridge.web.site import host_names, page_protocols

            hosts, of_page = host_names(page.hosts), page_protocols()
        named_protocols, named_observers = _named(self.protocols, self.observers)
        if page is None and named_protocols:
            from bridge.core.server.http11 import HostNames

            hosts = HostNames((), "start it with web=Web(hosts={name!r}) (--web-hosts {name}), which adds a page")
        return Server(
            self._recorded(source),
            host=self.host,
            port=self.port,
            limits=bounds,
            unix_path=self.unix_path,
            security=security,
            metrics_port=self.metrics_port,
            metrics_host=self.metrics_host,
            transport=self.transport,
            insecure=self.insecure,
            protocols=(*of_page, *protocols, *named_protocols),
            hosts=hosts,
            overview=Overview(page is not None, _OF_SERVER, _OF_WORLD),
            observers=(
                *named_observers,
                *watching(
                    bounds,
                    None if page is None else page.quality,
                    at_once=page is not None or self.fps is not None,
                ),
            ),
            messages=[*self._others(), *self._states()],
        )

    def _others(self) -> Sequence[SessionMessage]:
        """Return the messages of other packages that the options name."""
        if not self.messages and not self.message_options:
            return ()
        from bridge.core.worlds.message_loading import load_messages

        return load_messages(self.messages, self.message_options or {})

    def _states(self) -> Sequence[SessionMessage]:
        """Return the message for saving states, if this installation has it."""
        if self.states is False or (self.states is None and not has_feature("states")):
            return ()
        with feature("states", "states="):
            from bridge.states.bounds import States
            from bridge.states.message import states_message
        if self.states is not None and not isinstance(self.states, States):
            text = f"expected states to be bridge.States(…) or False, got a {type(self.states).__name__}"
            raise SettingError(text)
        return (states_message(self.states or States()),)

    def _recorded(self, source: WorldSource) -> WorldSource:
        """Return the source, with recorded worlds if `record` is given."""
        if self.record is None:
            return source
        with feature("recording", "record="):
            from bridge.recording.served import open_journal, recorded
        made: WorldSource = recorded(source, open_journal(self.record))
        return made


def _named(protocols: object, observers: object) -> tuple[Sequence[PortProtocol], Sequence[Observer]]:
    """Return the protocols and observers that the keywords list, as objects; raises SettingError."""
    if protocols == () == observers:
        return (), ()
    from bridge.facade.ports import find_observers, find_protocols  # few servers have any

    return find_protocols(protocols), find_observers(observers)


def _page_of(web: object) -> Web | None:
    """Return the page's options from the keyword `web`; None: there is no page.

    Raises:
        SettingError: The value is wrong, or this installation has no page.
    """
    if web is False:
        return None
    with feature("web", "web="):
        from bridge.web.site import Web
    if web is not True and not isinstance(web, Web):
        raise SettingError(f"expected web to be True, False or bridge.Web(…), got {web!r:.80}")
    return Web() if web is True else web


def _checked_play_fps(play_fps: float | None, fps: float | None) -> float | None:
    """Return the keyword `play_fps`, or raise SettingError if it is wrong.

    Args:
        play_fps: The keyword.
        fps: The frame rate of a real-time world; None: lock-step.
    """
    if play_fps is None:
        return None
    if fps is not None:
        raise SettingError("play_fps is for lock-step worlds: with fps= a world always runs at that rate; leave it out")
    fits = isinstance(play_fps, (int, float)) and not isinstance(play_fps, bool)
    if not fits or not 1 <= play_fps < float("inf"):
        raise SettingError(f"expected play_fps to be a number of steps a second, 1 or more, got {play_fps!r}")
    return float(play_fps)
