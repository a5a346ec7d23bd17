"""An environment of an OpenEnv server as a `gymnasium.Env`."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium import Space

from bridge.core.back_off import checked_wait, until_up
from bridge.core.client.options import TIMEOUT, checked_timeout
from bridge.core.client.world.world_request import MAX_MESSAGE_BYTES
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array
from bridge.core.extras import needed
from bridge.core.keywords import grouped_class
from bridge.core.transport.address import Address, parse_address, shown_token
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess
from bridge.core.transport.http_proxies import ProxyHandler, find_proxy, is_unavailable
from bridge.core.transport.tls import client_context
from bridge.errors import (
    AddressError,
    Code,
    ConnectError,
    ConnectionLostError,
    EnvironmentFailedError,
    PeerError,
    RemoteTimeoutError,
    ResetNeededError,
    SettingError,
    shown_url,
)
from bridge.openenv.json_values import SPACE, expecting, from_json, space_of, to_bytes, to_json

with needed("openenv:// needs the package websockets", "web"):
    from bridge.core.transport.message_socket import MessageSocket

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["OpenEnvEnv"]

_URL = "openenv://HOST:PORT, or openenvs://HOST:PORT with TLS"
_NO_VALUES = ("done", "reward", "metadata")


class _HttpsConnection(http.client.HTTPSConnection):
    """An HTTPS connection that uses the certificates of an address, and verifies the server name of the address."""

    def __init__(self, host: str, *, address: Address, **keywords: Any) -> None:
        self._context = client_context(address.credentials)
        super().__init__(host, context=self._context, **keywords)
        self._name = address.credentials.tls_server_name

    def connect(self) -> None:
        """Connect, also through a proxy."""
        if self._name is None:
            super().connect()
            return
        # The default implementation would verify the host of the URL.
        http.client.HTTPConnection.connect(self)
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)


class _HttpsHandler(urllib.request.HTTPSHandler):
    """A handler for `urllib` that uses the credentials of an address."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._connect = functools.partial(_HttpsConnection, address=address)

    def https_open(self, req: urllib.request.Request) -> Any:
        """Send a request."""
        return self.do_open(self._connect, req)


@grouped_class(ClientAccess, tls=TLS)
class OpenEnvEnv(gymnasium.Env[Any, Any]):
    """One environment of an OpenEnv server.

    The spaces come from the server's `/schema`; a value of one field is the sample itself, several fields are a Dict.
    Fields that no space describes are put into the info. OpenEnv reports only that an episode is over (`terminated`),
    unless the server is of this package. If the connection is lost, the episode is truncated, with the last observation
    and `info["error"]`, and `reset` tries to connect again for at most `timeout` seconds.

    Connections go through the HTTP proxy of `https_proxy` (with TLS) or `http_proxy`, unless the server is listed in
    `no_proxy` or runs on this machine.

    Args:
        url: `openenv://HOST:PORT`, or `openenvs://` with TLS. Its query may contain the token, `?token=…`, which is
            sent as Bearer. A token from the environment variable is not sent unencrypted to another machine.
        action_space: The action space; None: from the schema.
        observation_space: The observation space; None: from the schema.
        timeout: Seconds to wait for any response.
        max_message_bytes: The largest accepted response.
        wait_for_server: Seconds to wait for a server that is not ready yet; also in `reset`, if longer than `timeout`.
        keywords: The keywords of `ClientAccess`, which the signature lists.

    Raises:
        AddressError: The URL cannot be read.
        ConnectError: No server listens at the address.
        SettingError: The schema describes no space, and none was given.
    """

    def __init__(
        self,
        url: str,
        *,
        action_space: Space[Any] | None = None,
        observation_space: Space[Any] | None = None,
        timeout: float = TIMEOUT,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        wait_for_server: float = 0.0,
        **keywords: Unpack[AccessKeywords],
    ) -> None:
        try:
            address = parse_address(f"ws{url.strip().removeprefix('openenv')}")
        except AddressError as error:
            raise AddressError(url, error.reason, _URL) from None
        if address.env_id or address.world is not None or address.settings:
            raise AddressError(url, "OpenEnv has no path and no settings", _URL)
        self.url = shown_url(url)
        address = address.with_credentials(ClientAccess(**keywords).credentials)
        address.check_tls(self.url)
        self._https_handlers = [_HttpsHandler(address)] if address.tls else []
        self._timeout = checked_timeout(timeout)
        self._fail = functools.partial(PeerError, self.url)
        self._patience = max(self._timeout, checked_wait(wait_for_server))
        schema = until_up(lambda: self._schema(address, max_message_bytes), checked_wait(wait_for_server))
        self.action_space, self._action_field = self._side("action", schema, action_space)
        self.observation_space, self._observation_field = self._side("observation", schema, observation_space)
        self._actions = Layout(self.action_space, "action")
        self._observations = Layout(self.observation_space, "observation")
        self._socket = MessageSocket(
            address, "/ws", url=self.url, timeout=timeout, max_message_bytes=max_message_bytes, proxied=True
        )
        self._last: list[Array] | None = None

    def _schema(self, address: Address, max_bytes: int) -> Any:
        """Return the server's description of its actions and observations."""
        kind = "https" if address.tls else "http"
        proxy = find_proxy(address.host, address.port, [kind])
        note = "" if proxy is None else proxy.note
        opener = urllib.request.build_opener(ProxyHandler(), *self._https_handlers)
        request = urllib.request.Request(f"{kind}://{address.target}/schema")
        if (token := shown_token(address)) is not None:
            # A redirect may lead to another server, which must not receive the token.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        found: queue.SimpleQueue[bytes | ConnectError] = queue.SimpleQueue()

        def fetch() -> None:
            try:
                with opener.open(request, timeout=self._timeout) as response:
                    found.put(response.read(max_bytes))
            # HTTPException: the port does not speak HTTP. ValueError: a redirect to an invalid URL.
            except (OSError, http.client.HTTPException, ValueError) as error:
                told, unavailable = f"{error!r:.200}", is_unavailable(error)
                if isinstance(error, urllib.error.HTTPError):
                    # The error holds the connection, and its body says what is wrong, such as an unsupported space.
                    with error, contextlib.suppress(OSError, http.client.HTTPException):
                        said: Any = error.read(1000)
                        with contextlib.suppress(ValueError, KeyError, TypeError):
                            said = json.loads(said)["detail"]
                        told = f"{error}: {said!r:.1000}"
                    unavailable = error.code in (502, 503, 504)
                elif isinstance(error, urllib.error.URLError):
                    told = f"{error.reason}. Is the server running there?"
                    # A proxy that refuses the connection is not the same as a server that does.
                    unavailable = proxy is None and isinstance(error.reason, OSError) and is_unavailable(error.reason)
                found.put(ConnectError(self.url, f"GET /schema failed: {told}{note}", unavailable=unavailable))

        # The timeout of `urllib` is for each read, not for the whole response.
        threading.Thread(target=fetch, daemon=True).start()
        try:
            data = found.get(timeout=self._timeout)
        except queue.Empty:
            text = f"no answer to GET /schema within {self._timeout:g} s{note}"
            raise RemoteTimeoutError(self.url, text) from None
        if isinstance(data, ConnectError):
            raise data
        with expecting("JSON", data, self._fail):
            return json.loads(data)

    def _side(self, side: str, schema: Any, given: Space[Any] | None) -> tuple[Space[Any], str | None]:
        """Return the space of the actions or the observations.

        The text is the name of the one field that holds the value; None: each part of a Dict has a field.
        """
        with expecting(f"a schema of the {side}", schema, self._fail):
            definitions, given_fields = schema[side].get("$defs", {}), schema[side]["properties"].items()
            ours = {name: field for name, field in given_fields if SPACE in field}  # from a server of this package
            fields = ours or {name: field for name, field in given_fields if name not in _NO_VALUES}
        alone = next(iter(fields)) if len(fields) == 1 else None
        described = fields[alone] if alone else {"type": "object", "properties": fields}
        with expecting("the JSON Schema of an environment", schema):
            space = space_of(described, definitions) if given is None else given
        if space is None:
            text = f"the schema of {self.url} describes no space of its {side}s, only the fields {list(fields)}"
            raise SettingError(f"{text}: give {side}_space=")
        return space, alone

    def _ask(self, kind: str, data: Any, seconds: float) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send a request and wait at most `seconds` for the response; return its values like `step`."""
        message = to_bytes({"type": kind, "data": data}).decode()
        found = self._socket.persist(lambda: self._socket.ask(message, f"answer to {kind}"), seconds)
        with expecting("JSON", found, self._fail):
            answer = json.loads(found)
        field = self._observation_field
        with expecting("an observation", answer, self._fail):
            if answer["type"] == "error":
                raise EnvironmentFailedError(self.url, str(answer["data"].get("message", answer)), Code.INTERNAL)
            fields, reward = dict(answer["data"]["observation"]), float(answer["data"].get("reward") or 0.0)
            value = from_json(self.observation_space, fields.pop(field, None) if field else fields)
            arrays = self._observations.pack(value, rounding=True)
            # Copied, because the caller may change the observation.
            self._last, seen = [array.copy() for array in arrays], self._observations.unpack(arrays)
            if field == "observation" and "terminated" in fields:  # from a server of this package
                return seen, reward, bool(fields["terminated"]), bool(fields["truncated"]), fields["info"]
            info = {name: value for name, value in fields.items() if field or name not in seen}
            return seen, reward, bool(answer["data"].get("done")), False, info

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; connect first if there is no connection.

        Args:
            seed: Sent as `seed`.
            options: Sent as further fields.

        Raises:
            ConnectError: No connection could be made within `timeout` seconds.
            EnvironmentFailedError: The server answered with an error.
        """
        data = {**(options or {}), **({} if seed is None else {"seed": int(seed)})}
        # Since the last episode the connection may have ended, or the server may be restarting.
        observation, _, _, _, info = self._ask("reset", data, self._patience)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply an action.

        Raises:
            InvalidActionError: The action is not in the action space; nothing was sent.
            ResetNeededError: There is no connection, for example before the first `reset`.
            EnvironmentFailedError: The server answered with an error.
        """
        if self._last is None or not self._socket.connected:
            raise ResetNeededError("expected reset() before step()")
        self._actions.pack_action(action)  # raises if it is not in the space
        data = to_json(self.action_space, action)
        try:
            return self._ask("step", {self._action_field: data} if self._action_field else data, 0.0)
        except ConnectionLostError as error:
            seen = self._observations.unpack(self._last)
            return seen, 0.0, False, True, {"error": f"the connection to {self.url} was lost: {error.reason}"}

    def close(self) -> None:
        """End the session. May be called twice."""
        self._socket.close()
