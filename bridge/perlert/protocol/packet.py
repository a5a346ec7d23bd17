"""The grammar of PERLERT: nine kinds of datagram, read and written strictly.

`H` is `NAME:NUMBER`. One datagram is one message, in UTF-8 (P-1, P-14, P-20).

    C1  H;lobby                         S1  H;KEY=open|close,KIND,TAG,ready|not_ready;…   (last `;` optional, P-24)
    C2  H;register=KEY,TAG              S2  H;registered=KEY
    C3  H;ready=KEY,true|false          S3  H;message=TEXT
    C4  H;action=ACTION                 S4  H;start=port:PORT
                                        S5  H:TIMESTAMP:STEP;obs=O;reward=R;done=true|false[;extra=E]

`parse_client` and `parse_server` read what the one or the other end sends. `format_message` writes only what reads back
as the same message, so that nobody's tag can forge a slot.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

from bridge.errors import PacketError

__all__ = [
    "MAX_DATAGRAM",
    "MAX_FIELD",
    "MAX_MESSAGE",
    "RESERVED_KEYS",
    "Action",
    "ClientMessage",
    "Header",
    "LobbyInfo",
    "LobbyRequest",
    "Message",
    "Ready",
    "Register",
    "Registered",
    "ServerMessage",
    "Slot",
    "Start",
    "Step",
    "check_label",
    "format_message",
    "parse_client",
    "parse_header",
    "parse_server",
    "slot_text",
]

MAX_DATAGRAM = 1200
"""Bytes; nothing longer is sent, so that no path has to fragment it."""
MAX_MESSAGE = MAX_DATAGRAM - 25
"""Bytes of a message, which leaves room for the pre-shared key's counter and tag (P-26)."""
MAX_FIELD = 64
"""Bytes of a NAME, KEY, KIND or TAG."""
RESERVED_KEYS = frozenset({"register", "registered", "ready", "message", "start", "action", "lobby"})
"""No agent key may be one of these: `H;message=…` would be both a slot and a message."""

_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,18})\Z", re.ASCII)
_BANNED_IN_LABEL = re.compile(r"[:;,=\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BOOLEANS = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Which environment, and which instance of it, from 0."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}:{self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class LobbyRequest:
    """C1: who is in which slot?"""

    header: Header


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """C2: put me into this slot; the tag, which may be empty, is what the client calls itself."""

    header: Header
    key: str
    tag: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """C3: I am ready, or no longer; the key is the client's own slot."""

    header: Header
    key: str
    ready: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """C4: what to do from now on, free text without `:`, `;` and `=` (P-2)."""

    header: Header
    action: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a lobby: its name, whether a client may take it, its sort (P-3), who is in it, whether ready."""

    key: str
    open: bool
    kind: str
    tag: str
    ready: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LobbyInfo:
    """S1: the slots, one or more."""

    header: Header
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """S2: you are in this slot."""

    header: Header
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """S3: a text for people, the rest of the datagram, any character."""

    header: Header
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """S4: the simulation is about to start on this UDP port, 1 to 65535."""

    header: Header
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """S5: what one agent sees of one step; texts without `;` and `=` (P-4, P-5, P-6)."""

    header: Header
    timestamp: int
    """Milliseconds since 1970 by the server's clock."""
    step: int
    """The step's number, from 0."""
    observation: str
    reward: str
    """Ours is a decimal, the sum since the last S5 that was sent."""
    done: bool
    extra: str | None = None
    """Optional (P-25)."""


ClientMessage: TypeAlias = LobbyRequest | Register | Ready | Action
ServerMessage: TypeAlias = LobbyInfo | Registered | Message | Start | Step


def _refusal(expected: str, came: str) -> PacketError:
    return PacketError(f"expected {expected}, got {came[:80]!r}")


# Fields


def check_label(text: str, what: str, *, empty: bool = False) -> str:
    """Return a NAME, KEY, KIND or TAG that may be sent.

    Raises:
        PacketError: It is empty (where it must not be), longer than `MAX_FIELD` bytes, holds one of `: ; , =` (P-3) or
            a control character, or is a key that the grammar reserves.
    """
    if not text and not empty:
        raise PacketError(f"expected a {what}, got an empty text")
    if _BANNED_IN_LABEL.search(text):
        raise _refusal(f"a {what} without `:`, `;`, `,`, `=` and control characters", text)
    if (size := len(_encode(text))) > MAX_FIELD:
        raise PacketError(f"expected a {what} of at most {MAX_FIELD} bytes, got {size}")
    if what == "key" and text in RESERVED_KEYS:
        raise PacketError(f"expected a key that is none of {', '.join(sorted(RESERVED_KEYS))}, got {text!r}")
    return text


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _refusal("text that UTF-8 can hold", text) from error


def _free(text: str, what: str, banned: str, *, empty: bool = False) -> str:
    if not empty and not text:
        raise PacketError(f"expected {what}, got an empty text")
    if any(character in text for character in banned):
        raise _refusal(f"{what} without {' '.join(banned)}", text)
    return text


def _integer(text: str, what: str) -> int:
    if not _NUMBER.match(text):
        raise _refusal(f"{what} as a non-negative integer", text)
    return int(text)


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise _refusal("true or false", text)
    return _BOOLEANS[text]


# Reading


def _split(datagram: bytes) -> tuple[str, str]:
    try:
        head, semicolon, rest = datagram.decode("utf-8", "strict").partition(";")
    except UnicodeDecodeError as error:
        raise PacketError(f"expected UTF-8, got a datagram with {error.reason} at byte {error.start}") from error
    if not semicolon:
        raise _refusal("`NAME:NUMBER;` and a message", head)
    return head, rest


def parse_header(text: str) -> Header:
    """Read `NAME:NUMBER`.

    Raises:
        PacketError: It has another form.
    """
    name, colon, number = text.partition(":")
    if not colon:
        raise _refusal("NAME:NUMBER", text)
    return Header(check_label(name, "name"), _integer(number, "the instance's number"))


def parse_client(datagram: bytes) -> ClientMessage:
    """Read a datagram that a client sent: C1 to C4.

    Raises:
        PacketError: It is none of them.
    """
    head, rest = _split(datagram)
    header = parse_header(head)
    if rest == "lobby":
        return LobbyRequest(header)
    word, equals, value = rest.partition("=")
    if equals and word == "action":
        return Action(header, _free(value, "an action", ":;="))  # P-2
    if equals and word in ("register", "ready"):
        key, comma, last = value.partition(",")
        if not comma:
            raise _refusal(f"{word}=KEY,{'TAG' if word == 'register' else 'true|false'}", rest)
        check_label(key, "key")
        if word == "ready":
            return Ready(header, key, _boolean(last))
        return Register(header, key, check_label(last, "tag", empty=True))
    raise _refusal("lobby, register=, ready= or action=", rest)


def _slot(text: str) -> Slot:
    key, equals, value = text.partition("=")
    parts = value.split(",")
    if not equals or len(parts) != 4 or parts[0] not in ("open", "close") or parts[3] not in ("ready", "not_ready"):
        raise _refusal("KEY=open|close,KIND,TAG,ready|not_ready", text)
    status, kind, tag, ready = parts
    check_label(kind, "kind", empty=True)
    check_label(tag, "tag", empty=True)
    return Slot(check_label(key, "key"), status == "open", kind, tag, ready == "ready")


def _step(head: str, rest: str) -> Step:
    name, number, timestamp, step = head.split(":")
    fields = rest.split(";")
    values = []
    for word, what in (("obs", "an observation"), ("reward", "a reward"), ("done", "true or false")):
        field = fields.pop(0) if fields else ""
        if not field.startswith(word + "="):
            raise _refusal(f"{word}=", field)
        values.append(_free(field[len(word) + 1 :], what, "="))  # P-4, P-5; `;` is the separator
    extras = [field for field in fields if field.startswith("extra=")]  # what is not known is ignored
    if len(extras) > 1:
        raise _refusal("one extra=", rest)
    extra = _free(extras[0][len("extra=") :], "extra", "=", empty=True) if extras else None  # P-6
    observation, reward, done = values
    times = _integer(timestamp, "a timestamp"), _integer(step, "a step")
    return Step(parse_header(f"{name}:{number}"), *times, observation, reward, _boolean(done), extra)


def parse_server(datagram: bytes) -> ServerMessage:
    """Read a datagram that a server sent: S1 to S5.

    Raises:
        PacketError: It is none of them.
    """
    head, rest = _split(datagram)
    if head.count(":") == 3:
        return _step(head, rest)
    header = parse_header(head)
    word, equals, value = rest.partition("=")
    if equals and word == "message":
        return Message(header, value)
    if equals and word == "registered":
        return Registered(header, check_label(value, "key"))
    if equals and word == "start":
        port = _integer(value.removeprefix("port:"), "a port")
        if not value.startswith("port:") or not 1 <= port <= 65535:
            raise _refusal("start=port: and a port from 1 to 65535", rest)
        return Start(header, port)
    slots = tuple(map(_slot, rest.removesuffix(";").split(";")))  # P-24
    if len({slot.key for slot in slots}) < len(slots):
        raise _refusal("each key once", rest)
    return LobbyInfo(header, slots)


# Writing


def slot_text(slot: Slot) -> str:
    """Return a slot as S1 lists it."""
    status, ready = "open" if slot.open else "close", "ready" if slot.ready else "not_ready"
    return f"{slot.key}={status},{slot.kind},{slot.tag},{ready}"


def _body(message: ClientMessage | ServerMessage) -> str:
    match message:
        case LobbyRequest():
            return ";lobby"
        case Register(_, key, tag):
            return f";register={key},{tag}"
        case Ready(_, key, ready):
            return f";ready={key},{str(ready).lower()}"
        case Action(_, action):
            return f";action={action}"
        case LobbyInfo(_, slots):
            return ";" + ";".join(map(slot_text, slots))
        case Registered(_, key):
            return f";registered={key}"
        case Message(_, text):
            return f";message={text}"
        case Start(_, port):
            return f";start=port:{port}"
        case Step(_, timestamp, step, observation, reward, done, extra):
            # Checked here and not by reading it back, because there are thousands a second.
            times = f":{_integer(str(timestamp), 'a timestamp')}:{_integer(str(step), 'a step')}"
            end = "" if extra is None else f";extra={_free(extra, 'extra', ';=', empty=True)}"
            seen, gained = _free(observation, "an observation", ";="), _free(reward, "a reward", ";=")
            return f"{times};obs={seen};reward={gained};done={str(done).lower()}{end}"


def format_message(message: ClientMessage | ServerMessage) -> bytes:
    """Write a message as the one datagram that it is (P-1).

    Raises:
        PacketError: A field holds what the grammar bans there, so that another message would be read; or the datagram
            would be longer than `MAX_MESSAGE` bytes.
    """
    check_label(message.header.name, "name")
    text = f"{message.header}{_body(message)}"
    datagram = _encode(text)
    if len(datagram) > MAX_MESSAGE:
        raise PacketError(f"expected a message of at most {MAX_MESSAGE} bytes, got {len(datagram)}: {text[:80]!r}…")
    if not isinstance(message, Step):
        read = parse_client if isinstance(message, ClientMessage) else parse_server
        if read(datagram) != message:
            raise _refusal("fields without what separates fields", text)
    return datagram
