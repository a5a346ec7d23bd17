"""The keyword arguments common to `make_remote`, `make_vec_remote` and `make_parallel_remote`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from bridge.core.back_off import checked_wait
from bridge.core.client.wire.connection import Transport, checked_transport
from bridge.core.client.world.world_request import MAX_MESSAGE_BYTES, WorldRequest, pack_factory
from bridge.core.encoding.names import ANNOUNCED
from bridge.core.keywords import shown_number
from bridge.core.transport.address import Address, secret_url
from bridge.core.transport.credentials import AccessKeywords, ClientAccess
from bridge.core.transport.messages import Compression, checked_compression
from bridge.errors import SettingError

__all__ = [
    "CONNECT_TIMEOUT",
    "TIMEOUT",
    "EnvOptions",
    "RemoteKeywords",
    "RemoteOptions",
    "VectorOptions",
    "checked_timeout",
    "checked_urls",
    "given_options",
]

TIMEOUT = 60.0
"""Seconds that a client waits for an answer, by default."""
CONNECT_TIMEOUT = 10.0
"""Seconds within which one of several servers must send something, by default."""

Role: TypeAlias = Literal["player", "spectator"]
"""A client's role in a real-time world."""
Wait: TypeAlias = Literal["now", "next_frame"]
"""The event that a real-time world waits for before it answers."""


class RemoteKeywords(AccessKeywords, total=False):
    """The keywords of `RemoteOptions`, for type checkers."""

    env_kwargs: Mapping[str, Any] | None
    render_mode: str | None
    timeout: float
    max_message_bytes: int
    transport: Transport
    compression: Compression | None
    wait: Wait | None
    player: str | None
    diagnostics: bool
    wait_for_server: float
    messages: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteOptions(ClientAccess):
    """The options of environments at a server, and of the communication with it.

    Args:
        env_kwargs: Arguments of the environment's constructor.
        render_mode: The render mode to make it with; frames come by `render()`.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: `http2`, this package's own, which is faster; or `grpcio`, for proxies and servers that have problems
            with it.
        compression: `zstd` (extra `zstd`, at both ends) or `gzip`, for slow networks: the server compresses its answers
            without loss.
        wait: In a real-time world: `now`; or `next_frame`, for one decision per frame: each step returns after the next
            completed frame.
        player: Who acts, for the server's recordings: `agent` or `person`, optionally with a name, as in `person:Ann`.
        diagnostics: In a real-time world: True for infos with `latency`.
        wait_for_server: Seconds to wait for a server that is down, at the start and in a `reset` after a loss: it
            refuses the connection, its name cannot be resolved, or it answers UNAVAILABLE. In a list or a directory,
            one server that answers is enough. 0: the error is raised at once, as any other.
        messages: The names of messages of features, or of other packages, that will be sent: each join tells the
            server, so that it keeps the data that they need from the start.

    Raises:
        SettingError: A value is invalid.
    """

    env_kwargs: Mapping[str, Any] | None = None
    render_mode: str | None = None
    timeout: float = TIMEOUT
    max_message_bytes: int = MAX_MESSAGE_BYTES
    transport: Transport = "http2"
    compression: Compression | None = None
    wait: Wait | None = None
    player: str | None = None
    diagnostics: bool = True
    wait_for_server: float = 0.0
    messages: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = (self.messages,) if isinstance(self.messages, str) else tuple(self.messages)
        if not all(isinstance(name, str) and name and " " not in name for name in names):
            raise SettingError(f"expected messages to be names of messages, got {self.messages!r:.80}")
        object.__setattr__(self, "messages", names)
        object.__setattr__(self, "timeout", checked_timeout(self.timeout))
        object.__setattr__(self, "wait_for_server", checked_wait(self.wait_for_server))
        # All are checked here, before anything is connected, so that a mistake is reported in the user's own call.
        checked_transport(self.transport)
        checked_compression(self.compression)
        super().__post_init__()

    def request(self, url: str, agent: str | None = None, server_name: str | None = None) -> WorldRequest:
        """Return the request for a world at `url`.

        Args:
            url: The URL.
            agent: The agent to join as; None: the first that is free.
            server_name: The name in the server's certificate, if these options have none.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: The URL contradicts these options, or asks for settings of an existing world.
        """
        credentials = self.credentials
        # The URLs of a `grpcs+dns://` directory contain addresses, but certificates contain names.
        if server_name is not None and credentials.tls_server_name is None:
            credentials = dataclasses.replace(credentials, tls_server_name=server_name)
        named = WorldRequest.of(url, credentials)
        address = named.address
        if self.compression is not None:
            if address.compression not in (None, self.compression):
                raise SettingError(
                    f"the URL {address.url!r} asks for another compression than compression={self.compression!r}; "
                    "give one of them"
                )
            address = dataclasses.replace(address, compression=self.compression)
        if self.render_mode or self.env_kwargs:
            _check_is_new(address)
        settings = {"wait": self.wait, "player": self.player, ANNOUNCED: " ".join(self.messages) or None}
        return dataclasses.replace(
            named,
            address=address,
            render_mode=self.render_mode,
            env_kwargs=dict(self.env_kwargs or {}),
            agent=agent,
            join_settings={key: value for key, value in settings.items() if value is not None},
            diagnostics=self.diagnostics,
            max_message_bytes=self.max_message_bytes,
            transport=self.transport,
        )

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that make equal options, without defaults and `render_mode`; no token is printed."""
        found: dict[str, Any] = {"timeout": self.timeout, "max_message_bytes": self.max_message_bytes}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # `remote_spec` adds the world's render mode; token and TLS come from the credentials.
            if field.init and field.name != "render_mode" and value is not field.default:
                found[field.name] = value
        return {**found, **self.credentials.keywords()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvOptions(RemoteOptions):
    """The options of a single environment.

    Args:
        env_id: The environment's id, if the server has several.
        env: A function that makes the environment, with `env_kwargs`. The server must have `allow_env_factories=True`.
        role: In a real-time world: `player`, or `spectator`, whose actions and resets have no effect.
        agent: In a world of several agents, the agent to join as; None: the first that is free. For `make_vec_remote` a
            list has one agent for each URL; with one URL, each agent of the list has a slot. The URLs must name an
            existing world, `?world=NAME`.
    """

    env_id: str | None = None
    env: Callable[..., Any] | None = None
    role: Role | None = None
    agent: str | Sequence[str] | None = None

    def request(self, url: str, agent: str | None = None, server_name: str | None = None) -> WorldRequest:
        """Return the request for a world at `url`, as `RemoteOptions` does, with this environment."""
        asked = super().request(url, agent, server_name)
        named, url = asked.address.env_id, asked.address.url  # this URL has no token
        if named and self.env_id and named != self.env_id:
            raise SettingError(f"the URL {url!r} names {named!r}, but env_id is {self.env_id!r}; give one of them")
        # A function makes the environment by itself: an id beside it would be silently ignored.
        if self.env is not None and (named or self.env_id or asked.address.world is not None):
            raise SettingError(
                f"{url!r} with env={self.env!r:.80}: expected env, an environment id or a world, got two of them"
            )
        if self.env_id:
            _check_is_new(asked.address)
        return dataclasses.replace(
            asked,
            env_id=named or self.env_id,
            join_settings={
                **asked.join_settings,
                **({} if self.role is None else {"role": self.role}),
            },
            env_factory=None if self.env is None else pack_factory(self.env),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorOptions(EnvOptions):
    """The options of a vector of environments.

    Args:
        num_envs: The number of slots; None: one world per URL.
        lanes: With one URL: True for one world of `num_envs` lanes, stepped by one message; False for one world per
            slot.
            None: lanes if `blocking=True` and the server says that the two differ only in speed, otherwise worlds. With
            True also if they differ in more, such as for a world that is stepped in a process of its own.
        spares: URLs of further servers, whose worlds are kept ready and take over the slots of lost ones. If there are
            more `urls` than `num_envs`, the rest are spares too. Not with a directory, whose unused servers are spares.
        connect_timeout: Seconds within which a new connection's server must send something. A silent server is skipped
            if others can take its slots: those of a directory, or the URLs of a list with the same path and query. If
            there are none, it is waited for until `timeout`.
    """

    num_envs: int | None = None
    lanes: bool | None = None
    spares: str | Sequence[str] = ()
    connect_timeout: float = CONNECT_TIMEOUT

    def __post_init__(self) -> None:
        super().__post_init__()
        # By exact type, because True is an int.
        if self.num_envs is not None and (type(self.num_envs) is not int or self.num_envs < 1):
            raise SettingError(f"expected num_envs to be a positive integer, got {shown_number(self.num_envs)}")
        if self.lanes is not None and not isinstance(self.lanes, bool):
            raise SettingError(f"expected lanes to be True, False or None, got {self.lanes!r:.80}")
        object.__setattr__(self, "connect_timeout", checked_timeout(self.connect_timeout, "connect_timeout"))
        if self.spares:
            object.__setattr__(self, "spares", checked_urls(self.spares))


def _check_is_new(address: Address) -> None:
    """Raise SettingError if a URL joins an existing world, for which no construction arguments can be given."""
    if address.world is not None:
        raise SettingError(
            f"{address.url!r} joins a world that exists, so env_id, render_mode and env_kwargs cannot be given"
        )


def given_options(options: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that differ from the defaults of an options dataclass, for functions that take fewer."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {key: value for key, value in keywords.items() if value is not defaults.get(key)}


def checked_urls(urls: Any) -> list[str]:
    """Return the URLs as a list whose `repr` shows no token; raise SettingError if they are invalid."""
    found = [secret_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not found:
        raise SettingError("expected a URL, or a list of them with at least one, got an empty list")
    return found


def checked_timeout(timeout: Any, name: str = "timeout") -> float:
    """Return a timeout in seconds; raise SettingError if it is invalid."""
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
        raise SettingError(f"expected {name} to be a positive number of seconds, got {timeout!r}")
    return float(timeout)
