"""All exceptions of this package, and the status codes of the protocol.

    BridgeError
    ├── UsageError                      the caller misused something
    │   ├── AddressError                an unreadable URL (ValueError)
    │   ├── SettingError                an invalid or unsupported keyword, option or setting (ValueError)
    │   │   ├── ListenError             an address that cannot be listened at now, such as a port in use
    │   │   └── SeedError               a seed that Gymnasium does not accept (gymnasium.error.Error)
    │   ├── InvalidActionError          an action outside its space (ValueError)
    │   ├── TensorError                 a value that a tensor cannot hold without loss (ValueError)
    │   ├── UnsupportedSpaceError       a space that cannot be sent in messages (TypeError)
    │   ├── ResetNeededError            `step` before `reset` (gymnasium.error.ResetNeeded)
    │   ├── ClosedError                 use after `close` (ClosedEnvironmentError)
    │   ├── AlreadyPendingError         a call while an asynchronous one is pending (AlreadyPendingCallError)
    │   ├── NothingPendingError         `*_wait` without `*_async` (NoAsyncCallError)
    │   └── ConcurrentUseError          two threads in one environment (RuntimeError)
    ├── RemoteError                     the remote end failed; has `url`
    │   ├── ConnectError                no server answers, or it refuses the connection (ConnectionError)
    │   ├── ConnectionLostError         the connection ended during a request (ConnectionError)
    │   ├── RemoteTimeoutError          no answer within the deadline (TimeoutError)
    │   ├── RefusedError                the server answered with an error; has `code`
    │   │   ├── EnvironmentFailedError  the environment itself raised; has its traceback text
    │   │   └── MissingAttributeError   the environment has no such method or attribute (AttributeError)
    │   └── PeerError                   the peer broke the protocol
    ├── StartError                      making a server's environment failed at its start
    ├── PacketError                     a malformed PERLERT datagram (ValueError)
    ├── RecordingError                  a recording that cannot be read (ValueError)
    └── RequestError                    raised on the server: becomes the error response to one request

Exceptions have fields, format themselves in `__str__`, and can be pickled.
"""

from __future__ import annotations

import copy
import difflib
import enum
import re
from urllib.parse import unquote

import gymnasium.error

__all__ = [
    "AddressError",
    "AlreadyPendingError",
    "BridgeError",
    "ClosedError",
    "Code",
    "ConcurrentUseError",
    "ConnectError",
    "ConnectionLostError",
    "EnvironmentFailedError",
    "InvalidActionError",
    "ListenError",
    "MissingAttributeError",
    "NothingPendingError",
    "PacketError",
    "PeerError",
    "RecordingError",
    "RefusedError",
    "RemoteError",
    "RemoteTimeoutError",
    "RequestError",
    "ResetNeededError",
    "SeedError",
    "SettingError",
    "StartError",
    "TensorError",
    "UnsupportedSpaceError",
    "UsageError",
    "shown_url",
]


class Code(enum.IntEnum):
    """The canonical status codes of google.rpc.Status, numbered as on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @classmethod
    def named(cls, number: int) -> str:
        """Return the name of a code; also accepts numbers that are not a code."""
        return cls(number).name if number in cls._value2member_map_ else f"code {number}"


UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""The exceptions that reading malformed data of a peer may raise. TensorError is a ValueError."""


class BridgeError(Exception):
    """The base class of this package's exceptions."""


class UsageError(BridgeError):
    """An error of the caller; the message says what was expected, what came, and what to do."""


_PARAMETER = re.compile(r"(?<=[?&#])([^?&#=]+)=[^&#]+")
_BARE = re.compile(r"(?<=[?&#])[^&#=]{16,}(?=[&#]|$)")
"""A parameter without a name that is as long as a token."""
_SECRETS = ("token", "secret", "password", "bearer", "authorization")


def _masked(parameter: re.Match[str]) -> str:
    """Return a parameter of a URL; omit the value if it may be a secret, such as a token with a misspelled name."""
    name = unquote(parameter[1]).lower()
    if parameter[1].lower() == "token":  # omitted together with its name
        return parameter[0]
    held = any(secret in name for secret in _SECRETS) or difflib.get_close_matches(name, _SECRETS, 1, 0.75)
    return f"{parameter[1]}=…" if held else parameter[0]


def shown_url(url: str) -> str:
    """Return a URL for messages, without its token, including a token after `#` as in the link of a page.

    The value of a parameter whose name is almost `token` is omitted too, and so is a text without a name that is as
    long as a token: such a mistake may be the reason for the message.
    """
    if "?" not in url and "#" not in url:
        return url
    url = _BARE.sub("…", _PARAMETER.sub(_masked, url))
    if "token=" not in url.lower():
        return url
    return re.sub(r"(?i)[?]token=[^&#]*(?:&|(?=#)|$)", "?", re.sub(r"(?i)[&#]token=[^&#]*", "", url)).rstrip("?")


class AddressError(UsageError, ValueError):
    """A URL cannot be read."""

    expected = (
        "grpc://HOST:PORT, optionally with the environment id as its path and settings as its query, e.g. "
        "grpc://localhost:50051/CartPole-v1?num_envs=8"
    )
    """The form that the URL must have."""

    def __init__(self, url: str, reason: str, expected: str | None = None) -> None:
        super().__init__(shown_url(url), reason)
        self.url, self.reason = shown_url(url), reason
        self.expected = expected or self.expected

    def __str__(self) -> str:
        return f"cannot read the URL {self.url!r}: {self.reason}. Expected {self.expected}"


class SettingError(UsageError, ValueError):
    """A keyword, option or setting is invalid, or is not supported."""


class ListenError(SettingError):
    """An address cannot be listened at now: its port is in use, or this machine does not have it (yet)."""


class SeedError(SettingError, gymnasium.error.Error):
    """A seed that Gymnasium does not accept: not an integer, or negative."""


class InvalidActionError(UsageError, ValueError):
    """An action is outside its space. Nothing was sent, and every episode continues."""


class TensorError(UsageError, ValueError):
    """A value that a tensor cannot hold without loss, or an unreadable tensor."""


class UnsupportedSpaceError(UsageError, TypeError):
    """A space that cannot be sent in messages."""


class ResetNeededError(UsageError, gymnasium.error.ResetNeeded):
    """`step` was called before the first `reset`, or after an episode's end."""


class ClosedError(UsageError, gymnasium.error.ClosedEnvironmentError):
    """An environment or server was used after it was closed."""


class AlreadyPendingError(UsageError, gymnasium.error.AlreadyPendingCallError):
    """An asynchronous call was started or awaited out of order; `name` is the pending call."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.args = (message, name)  # Gymnasium's class keeps only the message, so it cannot be unpickled

    def __str__(self) -> str:
        return str(self.args[0])


class NothingPendingError(UsageError, gymnasium.error.NoAsyncCallError):
    """The result of an asynchronous call was requested that was not started."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.args = (message, name)  # see AlreadyPendingError

    def __str__(self) -> str:
        return str(self.args[0])


class ConcurrentUseError(UsageError, RuntimeError):
    """A second thread called an environment that is in use."""


def _harmless(text: str, most: int = 8192) -> str:
    """Return a text, possibly of several lines, shortened and without control characters for the terminal."""
    if len(text) > most:
        text = f"{text[:most]} … ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each in "\n\t" or each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


class RemoteError(BridgeError):
    """The remote end failed. `url` says which one, `reason` says why.

    A reason may contain text from an untrusted peer: after 8,192 characters the rest is omitted, and control characters
    for the terminal are replaced.
    """

    def __init__(self, url: str, reason: str) -> None:
        reason = _harmless(reason)
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    unavailable = False
    """True if the server may be starting: the connection is refused, the name unknown, or the code UNAVAILABLE."""

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"

    def at(self, url: str) -> RemoteError:
        """Return the same failure with a URL, which may be another one."""
        # When a connection ends, nearly all of its failed calls have the same URL.
        if url == self.url:
            return self
        error = copy.copy(self)
        error.url, error.args = url, (url, *self.args[1:])
        return error

    def with_reason(self, reason: str) -> RemoteError:
        """Return the same failure with another reason."""
        error = copy.copy(self)
        error.reason, error.args = reason, (self.url, reason, *self.args[2:])
        return error


class ConnectError(RemoteError, ConnectionError):
    """No connection could be made."""

    def __init__(self, url: str, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(url, reason)
        self.unavailable = unavailable


class ConnectionLostError(RemoteError, ConnectionError):
    """The connection ended during a request. The episode is lost; `reset()` connects again."""


class RemoteTimeoutError(RemoteError, TimeoutError):
    """No response came within the deadline."""


class RefusedError(RemoteError):
    """The server answered a request with an error; `code` is one of `Code`. The connection stays usable."""

    def __init__(self, url: str, reason: str, code: int) -> None:
        super().__init__(url, reason)
        self.args = (url, self.reason, code)
        self.code = code
        self.unavailable = code == Code.UNAVAILABLE

    def __str__(self) -> str:
        return f"{self.url} answered {Code.named(self.code)}: {self.reason}"


class EnvironmentFailedError(RefusedError):
    """The remote environment raised an exception; the reason contains the traceback."""


class MissingAttributeError(RefusedError, AttributeError):
    """The remote environment has no such method or attribute, or it cannot be read, called or set."""

    @classmethod
    def of(cls, error: RefusedError) -> MissingAttributeError:
        """Return a refusal as an instance of this class."""
        return cls(error.url, error.reason, error.code)


class PeerError(RemoteError):
    """The peer broke the protocol: a response of the wrong kind, without a required part, or unreadable."""


class StartError(BridgeError):
    """The environment that a server makes at its start raised an exception, did not return, or ended its process."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason = reason
        self.traceback = traceback
        """The traceback as Python prints it; empty: no exception was raised."""

    def __str__(self) -> str:
        return self.reason


class PacketError(BridgeError, ValueError):
    """A PERLERT datagram, or one of its fields, is malformed; the receiver drops and counts it."""


class RecordingError(BridgeError, ValueError):
    """A file is not a recording, does not contain an episode, or cannot be replayed or exported."""


class RequestError(BridgeError):
    """Raised while a request is served: becomes its error response, and the connection stays open (D-2)."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)
        # The text may name a file whose name is not UTF-8, which protobuf refuses. It may also quote a client's
        # options, and it is logged; the longest tracebacks have some 20,000 characters.
        self.code, self.message = code, _harmless(message.encode("utf-8", "backslashreplace").decode(), 1 << 16)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"
