"""The world that a client requests, and the facts that it then knows about it."""

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
"""The largest request or answer in bytes, by default."""


@dataclasses.dataclass(frozen=True)
class WorldRequest:
    """The world that a client wants."""

    address: Address
    """The server."""
    env_id: str | None = None
    """The environment's id, if the server has several."""
    render_mode: str | None = None
    """The render mode to make it with."""
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the environment's constructor."""
    agent: str | None = None
    """The agent to join as, in a world of several; None: the first that is free."""
    join_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """JoinWorld settings: `role` and `wait` of a real-time world."""
    diagnostics: bool = True
    """True: request the times of a real-time world (U-11)."""
    env_factory: bytes | None = dataclasses.field(default=None, repr=False)
    """A pickled function that makes the environment on the server."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """The largest request or answer, in bytes."""
    transport: str = "http2"
    """The transport, see `connect`."""
    lanes_if_alike: int | None = None
    """Make a world of this many lanes, if the server says that it is as good as a world each; None: do not ask."""
    names: bool = False
    """True if the names of the environment's attributes and methods are wanted."""
    plain_spaces: bool = False
    """True: read a space of a custom class as the plain one that replaces it, without a warning."""

    @classmethod
    def of(cls, url: str, credentials: ClientCredentials | None = None, **fields: Any) -> WorldRequest:
        """Return the request that a URL describes.

        Args:
            url: The URL.
            credentials: The credentials for the server, besides the token of the URL.
            fields: Further fields of the request.

        Raises:
            AddressError: The URL cannot be read.
        """
        address = parse_address(url)
        if credentials is not None:
            address = address.with_credentials(credentials)
        return cls(address, address.env_id, **fields)

    @property
    def kind(self) -> Any:
        """The environment, settings and agent, on any server; None: an existing world, on one server."""
        address = self.address
        return None if address.world is not None else (self.env_id, address.settings, self.agent)

    def as_lanes(self, count: int) -> WorldRequest:
        """Return the request for a world of this many lanes."""
        settings = (*self.address.settings, ("num_envs", str(count)))
        address = dataclasses.replace(self.address, settings=settings)
        return dataclasses.replace(self, address=address, lanes_if_alike=None)

    def too_large(self, size: int) -> SettingError:
        """Return the error for a request of this many bytes."""
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
            # A value that a tensor can hold is a setting of its own, readable by other servers. Others need our codec.
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
        SettingError: The value is no function, or cannot be pickled.
    """
    if not callable(env):
        raise SettingError(f"expected env to be a function that returns an environment, got {env!r:.80}")
    try:
        data: bytes = cloudpickle.dumps(env)
    except Exception as error:  # whatever the pickling of a user's objects raises
        raise SettingError(f"env={env!r:.80} cannot be pickled, and so not be sent: {error!r}") from error
    return data


def _parameter(name: str, text: str) -> Any:
    """Return a query parameter's value: a number or bool if it can be read as one, and text is not expected."""
    if name in ("env_id", "render_mode", "vectorization_mode"):
        return text
    try:
        # Only JSON's numbers and bools; lists and objects stay text.
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


@dataclasses.dataclass(frozen=True)
class WorldInfo:
    """The facts that a client knows about its world."""

    observation_space: Space[Any]
    """The space of one environment."""
    action_space: Space[Any]
    """The space of one environment."""
    lanes: int | None = None
    """The number of lanes; None for a single environment."""
    env_id: str | None = None
    """The environment's id."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The environment's metadata."""
    render_mode: str | None = None
    """The render mode of the environment."""
    spec: Mapping[str, Any] | None = None
    """The spec with which it was registered."""
    server_version: str | None = None
    """The version of a Gymnasium Bridge server; None for another one."""
    reward_space: Space[Any] | None = None
    """The space of array rewards; None: rewards are numbers."""
    fps: float | None = None
    """Frames a second of a real-time world; None: the world waits for each action."""

    @property
    def spaces(self) -> tuple[Space[Any], ...]:
        """The observation space, the action space and, if rewards are arrays, the reward space."""
        given = (self.observation_space, self.action_space)
        return given if self.reward_space is None else (*given, self.reward_space)

    def difference(self, other: WorldInfo) -> str:
        """Return the spaces that differ from those of another world, as text; "" if none does."""
        names = ("observation space", "action space", "reward space")
        pairs = itertools.zip_longest(names, self.spaces, other.spaces)
        return "; ".join(f"the {name} {mine} and not {theirs}" for name, mine, theirs in pairs if mine != theirs)
