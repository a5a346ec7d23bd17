"""The grammar of PERLERT: nine kinds of datagram, with a strict parser and formatter.

`H` is `NAME:NUMBER`. One datagram is one message, in UTF-8 (P-1, P-14, P-20).

    C1  H;lobby                         S1  H;KEY=open|close,KIND,TAG,ready|not_ready;…   (last `;` optional, P-24)
    C2  H;register=KEY,TAG              S2  H;registered=KEY
    C3  H;ready=KEY,true|false          S3  H;message=TEXT
    C4  H;action=ACTION                 S4  H;start=port:PORT
                                        S5  H:TIMESTAMP:STEP;obs=O;reward=R;done=true|false[;extra=E]

`parse_client` and `parse_server` parse what the other end sends. `format_message` only writes what parses as the same
message, so no client can forge a slot with its tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from bridge.errors import PacketError

__all__ = ["Action", "ClientMessage", "Header", "LobbyInfo", "LobbyRequest", "Message", "ReadyMessage", "Register"]
__all__ += ["Registered", "ServerMessage", "Slot", "Start", "Step", "check_label", "format_message", "parse_client"]
__all__ += ["format_lobby", "parse_header", "parse_server"]

MAX_DATAGRAM = 1200
"""The most bytes of a datagram, so that no path has to fragment it."""
MAX_MESSAGE = MAX_DATAGRAM - 25
"""The most bytes of a server's message, leaving room for encryption (P-26)."""
MAX_CLIENT_MESSAGE = MAX_DATAGRAM - 49
"""The most bytes of a client's message, for which encryption adds more."""
MAX_FIELD = 64
"""The most bytes of a NAME, KEY, KIND or TAG."""
RESERVED_KEYS = frozenset({"register", "registered", "ready", "message", "start", "action", "lobby"})
"""Keys that no agent may have: `H;message=…` would be both a slot and a message."""

_BANNED_IN_LABEL = re.compile(r"[:;,=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NUMBER = "(0|[1-9][0-9]{0,17})"  # fits into int64
# There is only one way to match: otherwise a datagram of colons would take time quadratic in its length.
_STEP = re.compile(
    f"([^:]*:[^:]*):{_NUMBER}:{_NUMBER};obs=([^;=]+);reward=([^;=]+);done=(true|false)(?:;(.*))?", re.DOTALL
)


class Header(NamedTuple):
    """An environment's name, and its instance number, from 0."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}:{self.number}"


class LobbyRequest(NamedTuple):
    """C1: request the lobby."""

    header: Header


class Register(NamedTuple):
    """C2: request a slot; the tag, which may be empty, is the client's name."""

    header: Header
    key: str
    tag: str


class ReadyMessage(NamedTuple):
    """C3: change whether the client is ready; the key is that of its own slot."""

    header: Header
    key: str
    ready: bool


class Action(NamedTuple):
    """C4: set the action, a free text without `:`, `;` and `=` (P-2)."""

    header: Header
    action: str


class Slot(NamedTuple):
    """One slot of a lobby: its key, whether it is open to clients, its kind (P-3), its client, whether it is ready."""

    key: str
    open: bool
    kind: str
    tag: str
    ready: bool

    def __str__(self) -> str:
        status, ready = "open" if self.open else "close", "ready" if self.ready else "not_ready"
        return f"{self.key}={status},{self.kind},{self.tag},{ready}"


class LobbyInfo(NamedTuple):
    """S1: one or more slots."""

    header: Header
    slots: tuple[Slot, ...]


class Registered(NamedTuple):
    """S2: confirm a registration."""

    header: Header
    key: str


class Message(NamedTuple):
    """S3: a text message, the rest of the datagram, with any characters."""

    header: Header
    text: str


class Start(NamedTuple):
    """S4: the run starts on this UDP port, 1 to 65535."""

    header: Header
    port: int


class Step(NamedTuple):
    """S5: one agent's view of a step; texts without `;` and `=` (P-4, P-5, P-6).

    The timestamp is in milliseconds since 1970 on the server's clock; steps are counted from 0. Our reward is a
    decimal, the sum since the last sent S5. `extra` is optional (P-25).
    """

    header: Header
    timestamp: int
    step: int
    observation: str
    reward: str
    done: bool
    extra: str | None = None


ClientMessage: TypeAlias = LobbyRequest | Register | ReadyMessage | Action
ServerMessage: TypeAlias = LobbyInfo | Registered | Message | Start | Step


def _refusal(expected: str, came: str) -> PacketError:
    return PacketError(f"expected {expected}, got {came[:80]!r}")


def check_label(text: str, what: str, *, empty: bool = False) -> str:
    """Return a NAME, KEY, KIND or TAG if it is valid.

    Raises:
        PacketError: It is empty (unless allowed), longer than `MAX_FIELD` bytes, contains one of `: ; , =` (P-3) or a
            control character, or is a key that the grammar reserves.
    """
    if not text and not empty:
        raise PacketError(f"expected a {what}, got an empty text")
    if _BANNED_IN_LABEL.search(text):
        raise _refusal(f"a {what} without `:`, `;`, `,`, `=` and control characters", text)
    if (size := len(text.encode())) > MAX_FIELD:
        raise PacketError(f"expected a {what} of at most {MAX_FIELD} bytes, got {size}")
    if what == "key" and text in RESERVED_KEYS:
        raise PacketError(f"expected a key that is none of {', '.join(sorted(RESERVED_KEYS))}, got {text!r}")
    return text


# The same few headers arrive thousands of times. Errors are not cached.
@lru_cache(1024)
def parse_header(text: str) -> Header:
    """Parse `NAME:NUMBER`.

    Raises:
        PacketError: The text is malformed.
    """
    name, _, number = text.partition(":")
    if not re.fullmatch(_NUMBER, number):
        raise _refusal("NAME:NUMBER, with a number from 0", text)
    return Header(check_label(name, "name"), int(number))


def _fields(text: str, form: str) -> list[Any]:
    """Parse comma-separated fields: labels, and bools as one of two words."""
    parts, names = text.split(","), form.split(",")
    if len(parts) != len(names):
        raise _refusal(form.upper(), text)
    fields: list[Any] = []
    for part, name in zip(parts, names, strict=True):
        words = name.split("|")
        if words[1:] and part not in words:
            raise _refusal(" or ".join(words), part)
        fields.append(part == words[0] if words[1:] else check_label(part, name, empty=name != "key"))
    return fields


@lru_cache(4096)  # a lobby is sent often, but its slots change seldom
def _read_slot(text: str) -> Slot:
    key, _, rest = text.partition("=")
    return Slot(check_label(key, "key"), *_fields(rest, "open|close,kind,tag,ready|not_ready"))


def _split(datagram: bytes) -> tuple[str, str, str]:
    """Return the text, the part before its first semicolon, and the part after it."""
    try:
        text = datagram.decode()
    except UnicodeDecodeError as error:
        raise PacketError(f"expected UTF-8, got a datagram with {error.reason} at byte {error.start}") from error
    head, semicolon, body = text.partition(";")
    if not semicolon:
        raise _refusal("`NAME:NUMBER;` and a message", head)
    return text, head, body


def parse_client(datagram: bytes) -> ClientMessage:
    """Parse a client's datagram: C1 to C4.

    Raises:
        PacketError: The datagram is malformed.
    """
    _, head, body = _split(datagram)
    header = parse_header(head)
    match body.partition("="):
        case "lobby", "", _:
            return LobbyRequest(header)
        case "register", "=", fields:
            return Register(header, *_fields(fields, "key,tag"))
        case "ready", "=", fields:
            return ReadyMessage(header, *_fields(fields, "key,true|false"))
        case "action", "=", action if action and not set(":;=") & set(action):  # P-2
            return Action(header, action)
    raise _refusal("lobby, register=, ready= or action= and a text without `:`, `;` and `=`", body)


def parse_server(datagram: bytes) -> ServerMessage:
    """Parse a server's datagram: S1 to S5.

    Raises:
        PacketError: The datagram is malformed.
    """
    text, head, body = _split(datagram)
    # Only in S5 more than NAME:NUMBER precedes the first semicolon.
    if head.count(":") > 1:
        return _read_step(text)
    header = parse_header(head)
    match body.partition("="):
        case "message", "=", said:
            return Message(header, said)
        case "registered", "=", key:
            return Registered(header, check_label(key, "key"))
        case "start", "=", port:
            if not re.fullmatch(f"port:{_NUMBER}", port) or not 1 <= int(port[5:]) <= 65535:
                raise _refusal("start=port: and a port from 1 to 65535", body)
            return Start(header, int(port[5:]))
    slots = tuple(map(_read_slot, body.removesuffix(";").split(";")))  # P-24
    # Duplicate keys are refused: peers that keep the first or the last one would see different lobbies.
    if len({slot.key for slot in slots}) < len(slots):
        raise _refusal("each key once", text)
    return LobbyInfo(header, slots)


def _read_step(text: str) -> Step:
    if (match := _STEP.fullmatch(text)) is None:
        raise _refusal("NAME:NUMBER:TIMESTAMP:STEP;obs=O;reward=R;done=true|false and, if any, ;extra=E", text)
    head, timestamp, step, observation, reward, done, rest = match.groups()
    particles = (rest or "").split(";")  # unknown parts are ignored
    extras = [particle.removeprefix("extra=") for particle in particles if particle.startswith("extra=")]
    if len(extras) > 1 or any("=" in extra for extra in extras):  # P-6
        raise _refusal("one extra=, without `;` and `=`", text)
    extra = extras[0] if extras else None
    return Step(parse_header(head), int(timestamp), int(step), observation, reward, done == "true", extra)


def _write(message: ClientMessage | ServerMessage) -> str:
    match message:
        case Step(header, timestamp, step, observation, reward, done, extra):
            text = f"obs={observation};reward={reward};done={'true' if done else 'false'}"
            return f"{header}:{timestamp}:{step};{text}" + (f";extra={extra}" if extra is not None else "")
        case LobbyInfo(_, slots):
            body = ";".join(map(str, slots))
        case LobbyRequest():
            body = "lobby"
        case Register(_, key, tag):
            body = f"register={key},{tag}"
        case ReadyMessage(_, key, ready):
            body = f"ready={key},{'true' if ready else 'false'}"
        case Action(_, action):
            body = f"action={action}"
        case Registered(_, key):
            body = f"registered={key}"
        case Message(_, text):
            body = f"message={text}"
        case Start(_, port):
            body = f"start=port:{port}"
    return f"{message.header};{body}"


def format_message(message: ClientMessage | ServerMessage) -> bytes:
    """Format a message as a single datagram (P-1).

    Raises:
        PacketError: A field contains forbidden characters, so that it would parse as another message; or the datagram
            would be longer than `MAX_MESSAGE`, or for a client `MAX_CLIENT_MESSAGE`, bytes.
    """
    datagram = (text := _write(message)).encode(errors="surrogatepass")  # invalid UTF-8, which is refused below
    most, parse = (
        (MAX_CLIENT_MESSAGE, parse_client) if isinstance(message, ClientMessage) else (MAX_MESSAGE, parse_server)
    )
    if len(datagram) > most:
        raise PacketError(f"expected a message of at most {most} bytes, got {len(datagram)}: {text[:80]!r}…")
    # Parse the result: a text with a separator, such as a tag, must not become another message.
    read = parse(datagram)
    if type(read) is not type(message) or read != message:
        raise _refusal("fields without what separates fields", text)
    return datagram


def format_lobby(header: Header, slots: Iterable[Slot], most: int) -> list[bytes]:
    """Format slots as S1, in datagrams of at most `most` bytes; raise PacketError like `format_message`."""
    info = LobbyInfo(header, tuple(slots))
    half = len(info.slots) // 2
    if half and len(_write(info).encode()) > most:
        return format_lobby(header, info.slots[:half], most) + format_lobby(header, info.slots[half:], most)
    return [format_message(info)]
