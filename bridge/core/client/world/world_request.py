"""Which world a client asks for, and what it then knows of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.transport.address import Address, parse_address
from bridge.core.transport.credentials import ClientCredentials
from bridge.errors import SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["MAX_MESSAGE_BYTES", "WorldInfo", "WorldRequest", "pack_factory"]

MAX_MESSAGE_BYTES = 512 * 1024 * 1024
"""Bytes in a request or answer that a client takes by default."""


@dataclasses.dataclass(frozen=True)
class WorldRequest:
    """Which world a client wants."""

    address: Address
    """The server."""
    env_id: str | None = None
    """The environment, where a server has several."""
    render_mode: str | None = None
    """The render mode to make it with."""
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For its constructor."""
    agent: str | None = None
    """The agent to join as, in a world of several; None: the first that is free."""
    join_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """JoinWorld settings: `role` and `wait` of a real-time world."""
    diagnostics: bool = True
    """True: ask a real-time world for times (U-11)."""
    env_factory: bytes | None = dataclasses.field(default=None, repr=False)
    """A pickled function that makes the environment there."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """The largest request or answer, in bytes."""
    transport: str = "http2"
    """How to connect, as for `connect`."""
    lanes_if_alike: int | None = None
    """Make a world of so many lanes, if the server says that it is as good as a world for each; None: do not ask."""
    names: bool = False
    """True if the names of the environment's attributes and methods are wanted."""
    plain_spaces: bool = False
    """True if a space of a class of its own is read as the plain one that stands for it, without a warning."""

    @classmethod
    def of(cls, url: str, credentials: ClientCredentials | None = None, **fields: Any) -> WorldRequest:
        """Ask for what a URL says.

        Args:
            url: The URL.
            credentials: What is shown to the server, besides the token of the URL.
            fields: Further fields.

        Raises:
            AddressError: The URL cannot be read.
        """
        address = parse_address(url)
        if credentials is not None:
            address = address.with_credentials(credentials)
        return cls(address, address.env_id, **fields)

    @property
    def kind(self) -> Any:
        """The environment, settings and agent, on any server; None: a world that exists already, in one place."""
        address = self.address
        return None if address.world is not None else (self.env_id, address.settings, self.agent)

    def as_lanes(self, count: int) -> WorldRequest:
        """Return the request for a world of so many lanes."""
        settings = (*self.address.settings, ("num_envs", str(count)))
        address = dataclasses.replace(self.address, settings=settings)
        return dataclasses.replace(self, address=address, lanes_if_alike=None)

    def too_large(self, size: int) -> SettingError:
        """Return the error of a request of this many bytes."""
        return SettingError(f"a request of {size} bytes is larger than max_message_bytes={self.max_message_bytes}")

    def settings(self) -> dict[str, pb.Tensor]:
        """Return the CreateWorld settings."""
        found = {name: pack_tensor(_parameter(name, text)) for name, text in self.address.settings}
        if self.env_factory is not None:
            found["env_factory"] = pack_tensor(np.frombuffer(self.env_factory, np.uint8))
        if self.env_id is not None:
            found["env_id"] = pack_tensor(self.env_id)
        if self.render_mode is not None:
            found["render_mode"] = pack_tensor(self.render_mode)
        rest = {}
        for name, value in self.env_kwargs.items():
            # What a tensor holds is a setting of its own, which other servers can read. Only the rest needs our codec.
            if isinstance(value, (bool, int, float, str)):
                found[f"kwargs.{name}"] = pack_tensor(value)
            else:
                rest[name] = value
        if rest:
            try:
                found["kwargs"] = pack_tensor(np.frombuffer(values.encode(rest), np.uint8))
            except TensorError as error:
                raise SettingError(f"env_kwargs cannot be sent: {error}") from error
        return found


def pack_factory(env: Callable[..., Any]) -> bytes:
    """Pickle a function that makes an environment, for the server to call.

    Raises:
        SettingError: It is none, or holds what cannot be pickled.
    """
    if not callable(env):
        raise SettingError(f"expected env to be a function that returns an environment, got {env!r:.80}")
    try:
        data: bytes = cloudpickle.dumps(env)
    except Exception as error:  # whatever the pickling of a user's objects raises
        raise SettingError(f"env={env!r:.80} cannot be pickled, and so not be sent: {error!r}") from error
    return data


def _parameter(name: str, text: str) -> Any:
    """A query parameter's value: a number or truth value where it reads as one and is not expected to be text."""
    if name in ("env_id", "render_mode", "vectorization_mode"):
        return text
    try:
        # JSON's words for numbers and truth values, and nothing more of JSON: lists and objects stay text.
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


@dataclasses.dataclass(frozen=True)
class WorldInfo:
    """A client's knowledge of the world that it is in."""

    observation_space: Space[Any]
    """Of one environment."""
    action_space: Space[Any]
    """Of one environment."""
    lanes: int | None = None
    """The number of lanes; None for a single environment."""
    env_id: str | None = None
    """The environment's id."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The environment's metadata."""
    render_mode: str | None = None
    """How it renders."""
    spec: Mapping[str, Any] | None = None
    """The spec of its registration."""
    server_version: str | None = None
    """The version of a Gymnasium Bridge server; None for another one."""
    reward_space: Space[Any] | None = None
    """Of array rewards; None: rewards are numbers."""
    fps: float | None = None
    """Frames a second of a real-time world; None: it waits for each action."""

    @property
    def spaces(self) -> tuple[Space[Any], ...]:
        """The observation space, the action space and, where rewards are arrays, theirs."""
        given = (self.observation_space, self.action_space)
        return given if self.reward_space is None else (*given, self.reward_space)

    def difference(self, other: WorldInfo) -> str:
        """Say which spaces are not those of another world; "" where all are."""
        names = ("observation space", "action space", "reward space")
        pairs = itertools.zip_longest(names, self.spaces, other.spaces)
        return "; ".join(f"the {name} {mine} and not {theirs}" for name, mine, theirs in pairs if mine != theirs)
