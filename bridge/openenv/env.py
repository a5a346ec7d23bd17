"""Environments of OpenEnv servers: one as a `gymnasium.Env`, and many as slots of a vector environment."""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import gymnasium
from gymnasium import Space, spaces

from bridge.client.options import TIMEOUT, checked_timeout
from bridge.client.vector_env import OwningVectorEnv
from bridge.client.world.world_request import MAX_MESSAGE_BYTES
from bridge.encoding.spaces import Layout
from bridge.errors import (
    AddressError,
    Code,
    ConnectError,
    ConnectionLostError,
    EnvironmentFailedError,
    PeerError,
    ResetNeededError,
    SettingError,
    shown_url,
)
from bridge.extras import install_command
from bridge.facade.serve import serve_gym
from bridge.openenv.json_values import SPACE, from_json, space_of, to_bytes, to_json
from bridge.server.limits import Limits
from bridge.transport.address import parse_address, shown_token
from bridge.transport.credentials import ClientCredentials, TokenLike

try:
    from bridge.transport.message_socket import MessageSocket
except ImportError as error:
    raise SettingError(f"openenv:// needs the package websockets: {install_command('web')}") from error

__all__ = ["OpenEnvEnv", "OpenEnvVectorEnv"]

_NO_VALUES = ("done", "reward", "metadata")
_MAX_SLOTS = 4096


class _Values(NamedTuple):
    """The actions or the observations of a server, and the space that they are in."""

    space: Space[Any]
    field: str | None
    """The one field that holds the value; None: each part of a Dict has a field."""


class OpenEnvEnv(gymnasium.Env[Any, Any]):
    """One environment of an OpenEnv server.

    The spaces come from the server's `/schema`; a value of one field is the sample itself, several fields are a Dict.
    Fields that no space describes come in the info. OpenEnv says only that an episode is over (`terminated`), unless
    the server is of this package. Where the connection is lost, the episode is truncated, with the last observation
    and `info["error"]`, and `reset` connects again, for at most `timeout` seconds.

    Args:
        url: `openenv://HOST:PORT`, or `openenvs://` with TLS.
        action_space: The actions' space; None: as the schema says.
        observation_space: The observations' space; None: as the schema says.
        token: What the server expects as Bearer; None: that of the URL's `?token=…`, or of the environment variable
            `BRIDGE_TOKEN`, which is not sent unencrypted to another machine.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest answer, in bytes.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: Nobody listens there.
        SettingError: The schema describes no space, and none is given.
    """

    def __init__(
        self,
        url: str,
        *,
        action_space: Space[Any] | None = None,
        observation_space: Space[Any] | None = None,
        token: TokenLike | None = None,
        timeout: float = TIMEOUT,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        try:
            address = parse_address(f"ws{url.strip().removeprefix('openenv')}")
        except AddressError as error:
            raise AddressError(url, f"{error.reason}: expected openenv://HOST:PORT, or openenvs:// with TLS") from None
        if address.env_id or address.world is not None or address.settings:
            raise AddressError(url, "expected openenv://HOST:PORT alone: OpenEnv has no path and no settings")
        self.url = shown_url(url)
        held = ClientCredentials.of(token=token).with_token_of(address.credentials, self.url)
        self._address = dataclasses.replace(address, credentials=held)
        self._timeout, self._most = checked_timeout(timeout), max_message_bytes
        schema = self._get("/schema")
        self._action_values = self._values("action", schema, action_space)
        self._observation_values = self._values("observation", schema, observation_space)
        self.action_space, self.observation_space = self._action_values.space, self._observation_values.space
        self._socket = MessageSocket(
            self._address, "/ws", url=self.url, timeout=timeout, max_message_bytes=max_message_bytes, proxied=True
        )
        self._last: Any = None

    def _get(self, path: str) -> Any:
        """Return a document of the server."""
        token = shown_token(self._address)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        scheme = "https" if self._address.tls else "http"
        request = urllib.request.Request(f"{scheme}://{self._address.target}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.loads(response.read(self._most))
        except (urllib.error.URLError, OSError) as error:
            raise ConnectError(self.url, f"no answer to GET {path}: {error}") from error
        except ValueError as error:
            raise PeerError(self.url, f"expected JSON at {path}: {error}") from error

    def _values(self, side: str, schema: Any, given: Space[Any] | None) -> _Values:
        try:
            definitions, fields = schema[side].get("$defs", {}), dict(schema[side]["properties"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise PeerError(self.url, f"expected a schema of the {side}, got {schema!r:.200}") from error
        if isinstance(fields.get(side), dict) and SPACE in fields[side]:  # a server of this package
            fields = {side: fields[side]}
        fields = {name: field for name, field in fields.items() if name not in _NO_VALUES}
        alone = next(iter(fields)) if len(fields) == 1 else None
        if given is not None:
            return _Values(given, None if isinstance(given, spaces.Dict) and alone not in fields else alone)
        found = space_of(fields[alone] if alone else {"type": "object", "properties": fields}, definitions)
        if found is None:
            text = f"the schema of {self.url} describes no space of its {side}s, only the fields {list(fields)}"
            raise SettingError(f"{text}: give {side}_space=")
        return _Values(found, alone)

    # Messages

    def _ask(self, kind: str, data: Any) -> str | bytes:
        if not self._socket.connected:
            self._socket.connect()
        return self._socket.ask(to_bytes({"type": kind, "data": data}).decode(), f"answer to {kind}")

    def _result(self, data: str | bytes) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return what an answer says, as `step` does."""
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise PeerError(self.url, f"expected JSON, got what cannot be read: {error}") from error
        try:
            if answer["type"] == "error":
                raise EnvironmentFailedError(self.url, str(answer["data"].get("message", answer)), Code.INTERNAL)
            found = dict(answer["data"]["observation"])
            reward, done = float(answer["data"].get("reward") or 0.0), bool(answer["data"].get("done"))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise PeerError(self.url, f"expected an observation, got {answer!r:.200}") from error
        return self._read(found, reward, done)

    def _read(self, fields: dict[str, Any], reward: float, done: bool) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        space, field = self._observation_values
        is_ours = field == "observation" and "terminated" in fields
        try:
            sample = from_json(space, fields.pop(field, None) if field else fields, "the observation")
        except SettingError as error:
            raise PeerError(self.url, str(error)) from error
        if field is None:
            fields = {name: value for name, value in fields.items() if name not in space.spaces}  # type: ignore[attr-defined]
        self._last = sample
        if is_ours:  # a server of this package
            return sample, reward, bool(fields["terminated"]), bool(fields["truncated"]), fields["info"]
        return sample, reward, done, False, fields

    # The environment

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, after connecting where there is no connection.

        Args:
            seed: Sent as `seed`.
            options: Sent beside it.

        Raises:
            ConnectError: There is no connection within `timeout` seconds.
            EnvironmentFailedError: The server answered with an error.
        """
        data = {**(options or {}), **({} if seed is None else {"seed": int(seed)})}
        # The connection may have gone since the last episode, and so may have the server, to come back.
        answer = self._socket.persist(lambda: self._ask("reset", data), self._timeout)
        observation, _, _, _, info = self._result(answer)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply an action.

        Raises:
            InvalidActionError: It is not in the action space; nothing was sent.
            ResetNeededError: There is no connection, as before the first `reset`.
            EnvironmentFailedError: The server answered with an error.
        """
        if not self._socket.connected:
            raise ResetNeededError("expected reset() before step()")
        space, field = self._action_values
        Layout(space, "action").pack_action(action)  # raises where it is not in the space
        data = to_json(space, action)
        try:
            answer = self._socket.persist(lambda: self._ask("step", {field: data} if field else data), 0.0)
        except ConnectionLostError as error:
            return self._last, 0.0, False, True, {"error": f"the connection to {self.url} was lost: {error.reason}"}
        return self._result(answer)

    def close(self) -> None:
        """End the session. May be called twice."""
        self._socket.close()


class OpenEnvVectorEnv(OwningVectorEnv):
    """Environments of OpenEnv servers as slots, as `RemoteVectorEnv` gives them.

    A server in this process speaks OpenEnv on one side and dm_env_rpc on the other; each slot has a session of its own.

    Args:
        urls: A URL for each slot, or one for all.
        num_envs: The number of slots; None: one for each URL.
        action_space: As of `OpenEnvEnv`.
        observation_space: As of `OpenEnvEnv`.
        token: What the OpenEnv servers expect.
        timeout: Seconds to wait for any answer.
        keywords: Those of `make_vec_remote`.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        num_envs: int | None = None,
        action_space: Space[Any] | None = None,
        observation_space: Space[Any] | None = None,
        token: TokenLike | None = None,
        timeout: float = TIMEOUT,
        **keywords: Any,
    ) -> None:
        make = functools.partial(
            OpenEnvEnv, action_space=action_space, observation_space=observation_space, token=token, timeout=timeout
        )
        limits = Limits(max_worlds=_MAX_SLOTS, max_connections=_MAX_SLOTS)
        secret = secrets.token_urlsafe()
        translator = serve_gym(make, thread_safe=True, limits=limits, token=secret)
        found = [urls] if isinstance(urls, str) else list(urls)
        places = [f"{translator.url}?kwargs.url={quote(url, safe='')}" for url in found]
        end = functools.partial(translator.stop, 0.0)
        super().__init__(end, places, num_envs=num_envs, token=secret, timeout=2 * timeout, **keywords)
