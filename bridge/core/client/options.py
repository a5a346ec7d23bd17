"""The keywords that `make_remote`, `make_vec_remote` and `make_parallel_remote` have in common."""

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
"""Seconds that a client waits for an answer by default."""
CONNECT_TIMEOUT = 10.0
"""Seconds within which a server of several has to say anything, by default."""

Role: TypeAlias = Literal["player", "spectator"]
"""Who a client is in a real-time world."""
Wait: TypeAlias = Literal["now", "next_frame"]
"""Says what a real-time world waits for before it answers."""


class RemoteKeywords(AccessKeywords, total=False):
    """The keywords that make `RemoteOptions`, for type checkers."""

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
    """How to make an environment at a server, and how to speak with it.

    Args:
        env_kwargs: Arguments of the environment's constructor.
        render_mode: The render mode to make it with; frames come by `render()`.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: `http2`, our own, which is faster; or `grpcio`, for proxies and servers that ours does not suit.
        compression: `zstd` (extra `zstd`, at both ends) or `gzip`, for slow networks: the server compresses its
            answers, without any loss.
        wait: In a real-time world: `now`, or `next_frame`, for one decision a frame: each step returns after the next
            frame that is finished.
        player: Who acts, as the server's recordings say: `agent` or `person`, with a name as in `person:Ann`.
        diagnostics: In a real-time world: whether infos carry `latency`.
        wait_for_server: Seconds to wait for a server that is not up when it is connected to, at the start and in a
            `reset` after a loss: one that refuses the connection, whose name nobody knows, or that answers UNAVAILABLE.
            Of a list or a directory it is enough that one answers. 0: such an error is raised at once, as any other.
        messages: The names of messages of features, or of other packages, that are going to be sent: the server is told
            with each join, so that what they need is kept from the start.

    Raises:
        SettingError: A value is not one of those that it can be.
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
        # All are checked here, before anything is connected: a mistake is reported with the user's own call.
        checked_transport(self.transport)
        checked_compression(self.compression)
        super().__post_init__()

    def request(self, url: str, agent: str | None = None, server_name: str | None = None) -> WorldRequest:
        """Return the request for a world at `url`.

        Args:
            url: Where.
            agent: The agent to join as; None: the first that is free.
            server_name: The name in the server's certificate, where these options have none.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: It contradicts these options, or asks for something of a world that exists already.
        """
        credentials = self.credentials
        # Of `grpcs+dns://` the URLs hold addresses, and certificates hold names.
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
        """Return the keywords that make equal options, but for defaults and `render_mode`; no token prints."""
        found: dict[str, Any] = {"timeout": self.timeout, "max_message_bytes": self.max_message_bytes}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # `remote_spec` adds the render mode that the world has; token and TLS come from the credentials.
            if field.init and field.name != "render_mode" and value is not field.default:
                found[field.name] = value
        return {**found, **self.credentials.keywords()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvOptions(RemoteOptions):
    """Which environment to ask a server for.

    Args:
        env_id: The environment, where the server has several.
        env: A function that makes the environment, with `env_kwargs`: sent to a server with `allow_env_factories=True`.
        role: In a real-time world: `player`, or `spectator`, whose actions and resets change nothing.
        agent: In a world of several agents, which of them to join as; None: the first that is free. For
            `make_vec_remote` a list names one for each URL; with one URL and a list, there is a slot for each agent of
            that list. The URLs name a world that exists, `?world=NAME`.
    """

    env_id: str | None = None
    env: Callable[..., Any] | None = None
    role: Role | None = None
    agent: str | Sequence[str] | None = None

    def request(self, url: str, agent: str | None = None, server_name: str | None = None) -> WorldRequest:
        """Return the request for a world at `url`, as `RemoteOptions` does, with this environment."""
        asked = super().request(url, agent, server_name)
        named, url = asked.address.env_id, asked.address.url  # which holds no token
        if named and self.env_id and named != self.env_id:
            raise SettingError(f"the URL {url!r} names {named!r}, but env_id is {self.env_id!r}; give one of them")
        # A function is an environment already; with a name beside it, one of the two would be ignored in silence.
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
    """How many environments to ask for, and of whom.

    Args:
        num_envs: The number of slots; None: what the URLs give, a world each.
        lanes: With one URL, whether one world of `num_envs` lanes fills all slots, stepped by one message, or each has
            a world. None: lanes with `blocking=True`, where the server says that nothing but speed is changed by them,
            else worlds. True: also where something is, such as in a world that is stepped in a process of its own.
        spares: URLs of further servers, whose worlds stand ready and take over the slots of remotes that are lost.
            Where there are more `urls` than `num_envs`, those beyond are spares too. Not with a directory, whose
            servers that are not needed stand by.
        connect_timeout: Seconds within which a server has to say anything when it is connected to. One that is silent
            for longer is passed over where others can take its slots: those of a directory, or of a list of URLs those
            with the same path and query. With nobody to take them, it is waited for until `timeout`.
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
    """Raise SettingError where a URL joins a world that exists: what it is made of cannot be given."""
    if address.world is not None:
        raise SettingError(
            f"{address.url!r} joins a world that exists, so env_id, render_mode and env_kwargs cannot be given"
        )


def given_options(options: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that differ from the defaults of a dataclass of options, for what has fewer of them."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {key: value for key, value in keywords.items() if value is not defaults.get(key)}


def checked_urls(urls: Any) -> list[str]:
    """Return the URLs as a list, whose `repr` holds no token, or raise SettingError where they are none."""
    found = [secret_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not found:
        raise SettingError("expected a URL, or a list of them with at least one, got an empty list")
    return found


def checked_timeout(timeout: Any, name: str = "timeout") -> float:
    """Return a timeout in seconds, or raise SettingError where it is none."""
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
        raise SettingError(f"expected {name} to be a positive number of seconds, got {timeout!r}")
    return float(timeout)
