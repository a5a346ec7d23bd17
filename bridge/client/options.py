"""The keywords that `make_remote`, `make_vec_remote` and `make_parallel_remote` have in common."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from bridge.client.wire.connect import Transport, checked_transport
from bridge.client.world.world_request import WorldRequest
from bridge.errors import SettingError
from bridge.keywords import unknown_keyword
from bridge.transport.compression import Compression, checked_compression
from bridge.transport.credentials import TLS, ClientCredentials, TokenLike

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import AutoresetMode

    from bridge.client.slots.waiting import OnLost

__all__ = [
    "CONNECT_TIMEOUT",
    "MAX_MESSAGE_BYTES",
    "TIMEOUT",
    "BlockingKeywords",
    "OtherKeywords",
    "RemoteKeywords",
    "RemoteOptions",
    "Role",
    "VectorKeywords",
    "Wait",
    "checked_timeout",
    "given_options",
    "is_openenv",
    "is_perlert",
    "refuse_unknown_keywords",
]

TIMEOUT = 60.0
"""Seconds that a client waits for an answer by default."""
CONNECT_TIMEOUT = 10.0
"""Seconds within which a server of several has to say anything, by default."""
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
"""Bytes in a request or answer that a client takes by default."""

Role: TypeAlias = Literal["player", "spectator"]
"""Who a client is in a real-time world."""
Wait: TypeAlias = Literal["now", "next_frame"]
"""Says what a real-time world waits for before it answers."""


class OtherKeywords(TypedDict, total=False):
    """The keywords that only environments behind `perlert://` and `openenv://` URLs have."""

    tag: str | None
    key: bytes | str | None
    use_profile: bool
    start_timeout: float
    config: Any
    """A `bridge.perlert.PlayerConfig`."""
    action_space: Space[Any] | None
    observation_space: Space[Any] | None


class RemoteKeywords(TypedDict, total=False):
    """The keywords that make `RemoteOptions`, for type checkers."""

    env_id: str | None
    env_kwargs: Mapping[str, Any] | None
    render_mode: str | None
    timeout: float
    max_message_bytes: int
    transport: Transport
    token: TokenLike | None
    token_file: str | os.PathLike[str] | None
    tls: TLS | None
    compression: Compression | None
    env: Callable[..., Any] | None
    role: Role | None
    wait: Wait | None
    player: str | None
    diagnostics: bool


class VectorKeywords(RemoteKeywords, OtherKeywords, total=False):
    """The keywords of `make_vec_remote` beside `blocking`, for type checkers."""

    num_envs: int | None
    agent: str | Sequence[str] | None
    spares: str | Sequence[str]
    connect_timeout: float


class BlockingKeywords(VectorKeywords, total=False):
    """Those of `make_vec_remote(…, blocking=True)`: also the keywords of `BlockingReset`."""

    blocking_timeout: float | None
    autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
    on_lost: OnLost
    max_failures: int | None
    step_timeout: float | None


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """Which environment to ask a server for, and how to speak with it.

    Raises:
        SettingError: A value is not one of those that it can be.
    """

    env_id: str | None = None
    """The environment, where the server has several."""
    env_kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment's constructor."""
    render_mode: str | None = None
    """The render mode to make it with."""
    agent: str | None = None
    """The agent to join as, in a world of several; None: the first that is free."""
    timeout: float = TIMEOUT
    """Seconds to wait for any answer."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """The largest request or answer, in bytes."""
    transport: Transport = "http2"
    """`http2`, our own HTTP/2, which is faster; or `grpcio`, the library."""
    token: TokenLike | None = None
    """The token that the server expects; None: that of `token_file`, or of the variable `BRIDGE_TOKEN`."""
    token_file: str | os.PathLike[str] | None = None
    """A file that holds the token."""
    tls: TLS | None = None
    """The CA of the server's certificate, and for a server that asks for one the client's own certificate."""
    compression: Compression | None = None
    """The compression of the server's answers: `zstd`, `gzip`; None: none."""
    env: Callable[..., Any] | None = None
    """A function that makes the environment, sent to the server; `env_kwargs` are its arguments."""
    role: Role | None = None
    """In a real-time world: `player`, or `spectator`, whose actions and resets change nothing."""
    wait: Wait | None = None
    """In a real-time world: `now`, or `next_frame`, for one decision a frame."""
    player: str | None = None
    """Who acts, as the server's recordings say: `agent` or `person`, with a name as in `person:Ann`; None: `agent`."""
    diagnostics: bool = True
    """In a real-time world: whether infos carry `latency` (U-11)."""
    credentials: ClientCredentials = dataclasses.field(init=False, repr=False)
    """The credentials of `token`, `token_file` and `tls`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", checked_timeout(self.timeout))
        checked_transport(self.transport)
        checked_compression(self.compression)
        credentials = ClientCredentials.of(token=self.token, token_file=self.token_file, tls=self.tls)
        object.__setattr__(self, "credentials", credentials)
        for name in ("token", "token_file"):  # kept where it does not print
            object.__setattr__(self, name, None)

    def request(self, url: str, agent: str | None = None, server_name: str | None = None) -> WorldRequest:
        """Return the request for a world at `url`.

        Args:
            url: Where.
            agent: The agent to join as; None: that of these options.
            server_name: The name in the server's certificate, where these options have none.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: It contradicts these options.
        """
        credentials = self.credentials
        if server_name is not None and credentials.tls_server_name is None:
            credentials = dataclasses.replace(credentials, tls_server_name=server_name)
        return WorldRequest.of(
            url,
            self.env_id,
            self.render_mode,
            self.env_kwargs,
            agent or self.agent,
            {"role": self.role, "wait": self.wait, "player": self.player},
            self.diagnostics,
            credentials=credentials,
            compression=self.compression,
            env=self.env,
        )

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that make equal options, but for defaults and `render_mode`; no token prints."""
        found: dict[str, Any] = {"timeout": self.timeout, "max_message_bytes": self.max_message_bytes}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.init and field.name != "render_mode" and value is not field.default:
                found[field.name] = value
        return {**found, **self.credentials.keywords()}


def given_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call that differ from their defaults."""
    parameters = inspect.signature(function).parameters
    return {key: value for key, value in options.items() if value is not parameters[key].default}


def refuse_unknown_keywords(function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError, as Python does, where there are any."""
    for name in keywords:
        raise unknown_keyword(function.__name__, name, inspect.signature(function).parameters)


def is_perlert(url: Any) -> bool:
    """Tell whether a URL is of the datagram protocol, which has environments of its own."""
    return isinstance(url, str) and url.strip().startswith("perlert://")


def is_openenv(url: Any) -> bool:
    """Tell whether a URL is of OpenEnv, which has environments of its own."""
    return isinstance(url, str) and url.strip().startswith(("openenv://", "openenvs://"))


def checked_timeout(timeout: Any, name: str = "timeout") -> float:
    """Return a timeout in seconds, or raise SettingError where it is none."""
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
        raise SettingError(f"expected {name} to be a positive number of seconds, got {timeout!r}")
    return float(timeout)
