"""Every exception of this package, and the status codes of the wire.

    BridgeError
    ├── UsageError                      the caller misused something
    │   ├── AddressError                a URL that cannot be read (ValueError)
    │   ├── SettingError                a keyword, option or setting that cannot be served (ValueError)
    │   │   └── SeedError               a seed that Gymnasium does not take (gymnasium.error.Error)
    │   ├── InvalidActionError          an action outside of its space (ValueError)
    │   ├── TensorError                 a value that a tensor cannot hold without loss (ValueError)
    │   ├── UnsupportedSpaceError       a space that has no form on the wire (TypeError)
    │   ├── ResetNeededError            `step` before `reset` (gymnasium.error.ResetNeeded)
    │   ├── ClosedError                 use after `close` (ClosedEnvironmentError)
    │   ├── AlreadyPendingError         a call while an asynchronous one is pending (AlreadyPendingCallError)
    │   ├── NothingPendingError         `*_wait` without `*_async` (NoAsyncCallError)
    │   └── ConcurrentUseError          two threads in one environment (RuntimeError)
    ├── RemoteError                     the remote end failed; has `url`
    │   ├── ConnectError                nobody there, or not willing (ConnectionError)
    │   ├── ConnectionLostError         it was there, and went (ConnectionError)
    │   ├── RemoteTimeoutError          no answer within the deadline (TimeoutError)
    │   ├── RefusedError                the server answered with an error; has `code`
    │   │   ├── EnvironmentFailedError  the environment itself raised; has its traceback text
    │   │   └── MissingAttributeError   the environment has no such method or attribute (AttributeError)
    │   └── PeerError                   the peer broke the protocol
    ├── StartError                      a server's environment failed while it was made at the start
    ├── PacketError                     a PERLERT datagram outside of its grammar (ValueError)
    ├── RecordingError                  a recording that cannot be read (ValueError)
    └── RequestError                    raised on the server: becomes the error answer of one request

Exceptions carry their fields, say themselves in `__str__`, and can be pickled.
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
        """Return the name of a code, also of one that is none of these."""
        return cls(number).name if number in cls._value2member_map_ else f"code {number}"


UNREADABLE = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""What Python raises where data of a peer is read that has another form than expected; TensorError is a ValueError."""


class BridgeError(Exception):
    """The root of this package's exceptions."""


class UsageError(BridgeError):
    """The caller misused something; the message says what was expected, what came and the remedy."""


_PARAMETER = re.compile(r"(?<=[?&#])([^?&#=]+)=[^&#]+")
_BARE = re.compile(r"(?<=[?&#])[^&#=]{16,}(?=[&#]|$)")
"""A parameter without a name, as long as a token."""
_SECRETS = ("token", "secret", "password", "bearer", "authorization")


def _masked(parameter: re.Match[str]) -> str:
    """Return a parameter of a URL, without its value where that is a secret, such as a token with a misspelled name."""
    name = unquote(parameter[1]).lower()
    if parameter[1].lower() == "token":  # left out with its name
        return parameter[0]
    held = any(secret in name for secret in _SECRETS) or difflib.get_close_matches(name, _SECRETS, 1, 0.75)
    return f"{parameter[1]}=…" if held else parameter[0]


def shown_url(url: str) -> str:
    """Return a URL as messages show it: without its token, also that of a page's link, behind `#`.

    Also left out is the value of a parameter whose name is nearly that of the token, and text that has no name and is
    as long as a token: the URL may be shown because of just that mistake.
    """
    if "?" not in url and "#" not in url:
        return url
    url = _BARE.sub("…", _PARAMETER.sub(_masked, url))
    if "token=" not in url.lower():
        return url
    return re.sub(r"(?i)[?]token=[^&#]*(?:&|(?=#)|$)", "?", re.sub(r"(?i)[&#]token=[^&#]*", "", url)).rstrip("?")


class AddressError(UsageError, ValueError):
    """A URL that cannot be read."""

    expected = (
        "grpc://HOST:PORT, optionally with the environment id as its path and settings as its query, e.g. "
        "grpc://localhost:50051/CartPole-v1?num_envs=8"
    )
    """The form that the URL should have."""

    def __init__(self, url: str, reason: str, expected: str | None = None) -> None:
        super().__init__(shown_url(url), reason)
        self.url, self.reason = shown_url(url), reason
        self.expected = expected or self.expected

    def __str__(self) -> str:
        return f"cannot read the URL {self.url!r}: {self.reason}. Expected {self.expected}"


class SettingError(UsageError, ValueError):
    """A keyword, option or setting that cannot be served."""


class SeedError(SettingError, gymnasium.error.Error):
    """A seed that Gymnasium does not take: no integer, or a negative one."""


class InvalidActionError(UsageError, ValueError):
    """An action outside of its space; nothing was sent, every episode goes on."""


class TensorError(UsageError, ValueError):
    """A value that a tensor cannot hold without loss, or a tensor that cannot be read."""


class UnsupportedSpaceError(UsageError, TypeError):
    """A space that has no form on the wire."""


class ResetNeededError(UsageError, gymnasium.error.ResetNeeded):
    """`step` was called before the first `reset`, or after an episode's end."""


class ClosedError(UsageError, gymnasium.error.ClosedEnvironmentError):
    """An environment or server was used after it was closed."""


class AlreadyPendingError(UsageError, gymnasium.error.AlreadyPendingCallError):
    """An asynchronous call was begun, or answered, out of turn; `name` says which one is pending."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.args = (message, name)  # Gymnasium's class keeps the message alone, and so cannot be unpickled

    def __str__(self) -> str:
        return str(self.args[0])


class NothingPendingError(UsageError, gymnasium.error.NoAsyncCallError):
    """The answer to an asynchronous call was asked for that was not begun."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.args = (message, name)  # as above

    def __str__(self) -> str:
        return str(self.args[0])


class ConcurrentUseError(UsageError, RuntimeError):
    """A second thread entered an environment that is in use."""


def _harmless(text: str, most: int = 8192) -> str:
    """Return a text, of many lines perhaps, that is neither long nor changes the terminal that it is printed on."""
    if len(text) > most:
        text = f"{text[:most]} … ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each in "\n\t" or each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


class RemoteError(BridgeError):
    """The remote end failed. `url` says which, `reason` why.

    A reason may be the words of a stranger: of more than 8,192 characters the rest is left out, and what a terminal
    would obey is replaced.
    """

    def __init__(self, url: str, reason: str) -> None:
        reason = _harmless(reason)
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    unavailable = False
    """True if the server may only not be up yet: it refused the connection, nobody knows its name, or UNAVAILABLE."""

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"

    def at(self, url: str) -> RemoteError:
        """Return the same failure of a URL, which may be another one."""
        # Of many calls that end with one connection nearly all have its URL.
        if url == self.url:
            return self
        error = copy.copy(self)
        error.url, error.args = url, (url, *self.args[1:])
        return error

    def with_reason(self, reason: str) -> RemoteError:
        """Return the same failure with another text."""
        error = copy.copy(self)
        error.reason, error.args = reason, (self.url, reason, *self.args[2:])
        return error


class ConnectError(RemoteError, ConnectionError):
    """No connection could be made."""

    def __init__(self, url: str, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(url, reason)
        self.unavailable = unavailable


class ConnectionLostError(RemoteError, ConnectionError):
    """The connection ended while an answer was outstanding. The episode is lost; `reset()` connects again."""


class RemoteTimeoutError(RemoteError, TimeoutError):
    """No answer came within the deadline."""


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
    """The remote environment raised an exception; the reason holds its traceback text."""


class MissingAttributeError(RefusedError, AttributeError):
    """The remote environment has no method or attribute of that name, or none that can be asked for, or set."""

    @classmethod
    def of(cls, error: RefusedError) -> MissingAttributeError:
        """Return a refusal as one of this class."""
        return cls(error.url, error.reason, error.code)


class PeerError(RemoteError):
    """The peer broke the protocol: an answer of the wrong kind, without a needed part, or unreadable."""


class StartError(BridgeError):
    """The environment that a server makes at its start raised an exception, did not return, or ended its process."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason = reason
        self.traceback = traceback
        """The traceback of what was raised, as Python prints it; empty: nothing was raised."""

    def __str__(self) -> str:
        return self.reason


class PacketError(BridgeError, ValueError):
    """A PERLERT datagram, or a field of one, outside of its grammar; the receiver drops it and counts it."""


class RecordingError(BridgeError, ValueError):
    """A file is no recording, an episode is not in it, or cannot be replayed or exported."""


class RequestError(BridgeError):
    """Raised while a request is served: becomes its error answer, and the connection goes on (D-2)."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)
        # An environment's error may name a file whose name is not UTF-8: protobuf refuses such texts. It may also quote
        # a client's options, and is logged; the longest tracebacks have some 20,000 characters.
        self.code, self.message = code, _harmless(message.encode("utf-8", "backslashreplace").decode(), 1 << 16)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"
