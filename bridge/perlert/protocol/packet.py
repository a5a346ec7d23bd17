"""The grammar of PERLERT: nine kinds of datagram, read and written strictly.

`H` is `NAME:NUMBER`. One datagram is one message, in UTF-8 (P-1, P-14, P-20).

    C1  H;lobby                         S1  H;KEY=open|close,KIND,TAG,ready|not_ready;…   (last `;` optional, P-24)
    C2  H;register=KEY,TAG              S2  H;registered=KEY
    C3  H;ready=KEY,true|false          S3  H;message=TEXT
    C4  H;action=ACTION                 S4  H;start=port:PORT
                                        S5  H:TIMESTAMP:STEP;obs=O;reward=R;done=true|false[;extra=E]

`parse_client` and `parse_server` read what the one or the other end sends, `format_message` writes. A field that holds
a character which the grammar bans there is refused both ways, so that nobody's tag can forge a slot.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NoReturn, TypeAlias

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
    """Which environment, and which instance of it."""

    name: str
    """The environment's name on the server, e.g. `cartpole`."""
    number: int
    """The instance, from 0."""

    def __str__(self) -> str:
        return f"{self.name}:{self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class LobbyRequest:
    """C1: who is in which slot?"""

    header: Header


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """C2: put me into this slot."""

    header: Header
    key: str
    """The slot."""
    tag: str
    """What the client calls itself; may be empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """C3: I am ready, or no longer."""

    header: Header
    key: str
    """The client's own slot."""
    ready: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """C4: what to do from now on."""

    header: Header
    action: str
    """Free text without `:`, `;` and `=` (P-2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a lobby."""

    key: str
    """Its name, e.g. `agent0`."""
    open: bool
    """Whether a client may take it."""
    kind: str
    """Free text that tells slots apart, e.g. `citizen` (P-3)."""
    tag: str
    """Who is in it; empty when nobody is."""
    ready: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LobbyInfo:
    """S1: the slots."""

    header: Header
    slots: tuple[Slot, ...]
    """One or more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """S2: you are in this slot."""

    header: Header
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """S3: a text for people."""

    header: Header
    text: str
    """The rest of the datagram, any character."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """S4: the simulation is about to start on this port."""

    header: Header
    port: int
    """A UDP port, 1 to 65535."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """S5: what one agent sees of one step."""

    header: Header
    timestamp: int
    """Milliseconds since 1970 by the server's clock."""
    step: int
    """The step's number, from 0."""
    observation: str
    """Free text without `;` and `=` (P-4)."""
    reward: str
    """Free text without `;` and `=` (P-5); ours is a decimal, the sum since the last S5 that was sent."""
    done: bool
    extra: str | None = None
    """Free text without `;` and `=` (P-6), optional (P-25)."""


ClientMessage: TypeAlias = LobbyRequest | Register | Ready | Action
ServerMessage: TypeAlias = LobbyInfo | Registered | Message | Start | Step


def _refuse(expected: str, came: str) -> NoReturn:
    raise PacketError(f"expected {expected}, got {came[:80]!r}")


def check_label(text: str, what: str, *, empty: bool = False) -> str:
    """Return a NAME, KEY, KIND or TAG that may be sent.

    Raises:
        PacketError: It is empty (where it must not be), longer than `MAX_FIELD` bytes, holds one of `: ; , =` (P-3) or
            a control character, or is a key that the grammar reserves.
    """
    if not text and not empty:
        raise PacketError(f"expected a {what}, got an empty text")
    if _BANNED_IN_LABEL.search(text):
        raise PacketError(f"expected a {what} without `:`, `;`, `,`, `=` and control characters, got {text[:80]!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise PacketError(f"expected a {what} that UTF-8 can hold, got {text[:80]!r}") from error
    if size > MAX_FIELD:
        raise PacketError(f"expected a {what} of at most {MAX_FIELD} bytes, got {size}")
    if what == "key" and text in RESERVED_KEYS:
        raise PacketError(f"expected a key that is none of {', '.join(sorted(RESERVED_KEYS))}, got {text!r}")
    return text


def _free(text: str, what: str, banned: str) -> str:
    for character in banned:
        if character in text:
            raise PacketError(f"expected {what} without {' '.join(banned)}, got {text[:80]!r}")
    if not text:
        raise PacketError(f"expected {what}, got an empty text")
    return text


def _integer(text: str, what: str) -> int:
    if not _NUMBER.match(text):
        _refuse(f"{what} as a non-negative integer", text)
    return int(text)


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        _refuse("true or false", text)
    return _BOOLEANS[text]


def _decode(datagram: bytes) -> str:
    try:
        return datagram.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise PacketError(f"expected UTF-8, got a datagram with {error.reason} at byte {error.start}") from error


def parse_header(text: str) -> Header:
    """Read `NAME:NUMBER`.

    Raises:
        PacketError: It has another form.
    """
    name, colon, number = text.partition(":")
    if not colon:
        _refuse("NAME:NUMBER", text)
    return Header(check_label(name, "name"), _integer(number, "the instance's number"))


def parse_client(datagram: bytes) -> ClientMessage:
    """Read a datagram that a client sent: C1 to C4.

    Raises:
        PacketError: It is none of them.
    """
    head, semicolon, rest = _decode(datagram).partition(";")
    if not semicolon:
        _refuse("`NAME:NUMBER;` and a message", head)
    header = parse_header(head)
    if rest == "lobby":
        return LobbyRequest(header)
    word, equals, value = rest.partition("=")
    if equals and word == "action":
        return Action(header, _free(value, "an action", ":;="))  # P-2
    if equals and word in ("register", "ready"):
        key, comma, last = value.partition(",")
        if not comma:
            _refuse(f"{word}=KEY,{'TAG' if word == 'register' else 'true|false'}", rest)
        check_label(key, "key")
        if word == "ready":
            return Ready(header, key, _boolean(last))
        return Register(header, key, check_label(last, "tag", empty=True))
    _refuse("lobby, register=, ready= or action=", rest)


def _slot(text: str) -> Slot:
    key, equals, value = text.partition("=")
    parts = value.split(",")
    if not equals or len(parts) != 4:
        _refuse("KEY=open|close,KIND,TAG,ready|not_ready", text)
    status, kind, tag, ready = parts
    if status not in ("open", "close"):
        _refuse("open or close", status)
    if ready not in ("ready", "not_ready"):
        _refuse("ready or not_ready", ready)
    return Slot(
        check_label(key, "key"),
        status == "open",
        check_label(kind, "kind", empty=True),
        check_label(tag, "tag", empty=True),
        ready == "ready",
    )


def _step(head: str, rest: str) -> Step:
    name, number, timestamp, step = head.split(":")
    header = Header(check_label(name, "name"), _integer(number, "the instance's number"))
    fields = rest.split(";")
    values = []
    for word, what in (("obs", "an observation"), ("reward", "a reward"), ("done", "true or false")):
        field = fields.pop(0) if fields else ""
        if not field.startswith(word + "="):
            _refuse(f"{word}=", field)
        values.append(_free(field[len(word) + 1 :], what, "="))  # P-4, P-5; `;` is the separator
    extra = None
    for field in fields:  # what stands after `done` and is not known is ignored
        if field.startswith("extra="):
            if extra is not None:
                _refuse("one extra=", field)
            extra = field[len("extra=") :]
            if "=" in extra:
                _refuse("extra without =", extra)  # P-6
    observation, reward, done = values
    return Step(
        header, _integer(timestamp, "a timestamp"), _integer(step, "a step"), observation, reward, _boolean(done), extra
    )


def parse_server(datagram: bytes) -> ServerMessage:
    """Read a datagram that a server sent: S1 to S5.

    Raises:
        PacketError: It is none of them.
    """
    head, semicolon, rest = _decode(datagram).partition(";")
    if not semicolon:
        _refuse("`NAME:NUMBER;` and a message", head)
    if head.count(":") == 3:
        return _step(head, rest)
    header = parse_header(head)
    word, equals, value = rest.partition("=")
    if equals and word == "message":
        return Message(header, value)
    if equals and word == "registered":
        return Registered(header, check_label(value, "key"))
    if equals and word == "start":
        prefix, colon, number = value.partition(":")
        if prefix != "port" or not colon:
            _refuse("start=port:PORT", rest)
        port = _integer(number, "a port")
        if not 1 <= port <= 65535:
            _refuse("a port from 1 to 65535", number)
        return Start(header, port)
    slots = tuple(_slot(text) for text in rest.removesuffix(";").split(";"))  # P-24: with or without the last `;`
    if len({slot.key for slot in slots}) < len(slots):
        _refuse("each key once", rest)
    return LobbyInfo(header, slots)


def slot_text(slot: Slot) -> str:
    """Return a slot as S1 lists it."""
    check_label(slot.key, "key")
    check_label(slot.kind, "kind", empty=True)
    check_label(slot.tag, "tag", empty=True)
    return (
        f"{slot.key}={'open' if slot.open else 'close'},{slot.kind},{slot.tag},{'ready' if slot.ready else 'not_ready'}"
    )


def _number(value: int, what: str) -> int:
    if not 0 <= value < 10**19:
        raise PacketError(f"expected {what} as a non-negative integer of at most 19 digits, got {value}")
    return value


def _body(message: ClientMessage | ServerMessage) -> str:
    if isinstance(message, LobbyRequest):
        return ";lobby"
    if isinstance(message, Register):
        return f";register={check_label(message.key, 'key')},{check_label(message.tag, 'tag', empty=True)}"
    if isinstance(message, Ready):
        return f";ready={check_label(message.key, 'key')},{'true' if message.ready else 'false'}"
    if isinstance(message, Action):
        return f";action={_free(message.action, 'an action', ':;=')}"
    if isinstance(message, LobbyInfo):
        if not message.slots:
            raise PacketError("expected one slot or more, got none")
        if len({slot.key for slot in message.slots}) < len(message.slots):
            raise PacketError("expected each key once, got a lobby that lists one twice")
        return ";" + ";".join(map(slot_text, message.slots))
    if isinstance(message, Registered):
        return f";registered={check_label(message.key, 'key')}"
    if isinstance(message, Message):
        return f";message={message.text}"
    if isinstance(message, Start):
        if not 1 <= message.port <= 65535:
            raise PacketError(f"expected a port from 1 to 65535, got {message.port}")
        return f";start=port:{message.port}"
    text = (
        f":{_number(message.timestamp, 'a timestamp')}:{_number(message.step, 'a step')}"
        f";obs={_free(message.observation, 'an observation', ';=')}"
        f";reward={_free(message.reward, 'a reward', ';=')};done={'true' if message.done else 'false'}"
    )
    if message.extra is not None:
        if ";" in message.extra or "=" in message.extra:
            raise PacketError(f"expected extra without ; =, got {message.extra[:80]!r}")
        text += f";extra={message.extra}"
    return text


def format_message(message: ClientMessage | ServerMessage) -> bytes:
    """Write a message as the one datagram that it is (P-1).

    Raises:
        PacketError: A field holds what the grammar bans there, or the datagram would be longer than `MAX_MESSAGE`
            bytes.
    """
    header = message.header
    text = f"{check_label(header.name, 'name')}:{_number(header.number, 'a number')}{_body(message)}"
    try:
        datagram = text.encode()
    except UnicodeEncodeError as error:
        raise PacketError(f"expected text that UTF-8 can hold, got {text[:80]!r}") from error
    if len(datagram) > MAX_MESSAGE:
        raise PacketError(f"expected a message of at most {MAX_MESSAGE} bytes, got {len(datagram)}: {text[:80]!r}…")
    return datagram
