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
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, TypeAlias

from bridge.errors import PacketError

__all__ = ["Action", "ClientMessage", "Header", "LobbyInfo", "LobbyRequest", "Message", "Ready", "Register"]
__all__ += ["Registered", "ServerMessage", "Slot", "Start", "Step", "check_label", "format_message", "parse_client"]
__all__ += ["format_lobby", "parse_header", "parse_server"]

MAX_DATAGRAM = 1200
"""Bytes; nothing longer is sent, so that no path has to fragment it."""
MAX_MESSAGE = MAX_DATAGRAM - 25
"""Bytes of a message, which leaves room for the pre-shared key's counter and tag (P-26)."""
MAX_FIELD = 64
"""Bytes of a NAME, KEY, KIND or TAG."""
RESERVED_KEYS = frozenset({"register", "registered", "ready", "message", "start", "action", "lobby"})
"""No agent key may be one of these: `H;message=…` would be both a slot and a message."""

_BANNED_IN_LABEL = re.compile(r"[:;,=\x00-\x1f\x7f-\x9f\u2028\u2029]")


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
_Type: TypeAlias = tuple[Callable[[str], Any], Callable[[Any], str]]
"""How a field is read, which raises PacketError, and written."""

_NUMBER = "(0|[1-9][0-9]{0,18})"
_STEP = re.compile(f"(.*?:.*?):{_NUMBER}:{_NUMBER};obs=([^;=]+);reward=([^;=]+);done=(true|false)(?:;(.*))?", re.DOTALL)


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


def _action(text: str) -> str:
    if not text or set(":;=") & set(text):  # P-2
        raise _refusal("an action without `:`, `;` and `=`", text)
    return text


def _port(text: str) -> int:
    if not re.fullmatch(_NUMBER, text) or not 1 <= int(text) <= 65535:
        raise _refusal("a port from 1 to 65535", text)
    return int(text)


def _slots(text: str) -> tuple[Slot, ...]:
    slots = tuple(_read_slot(part) for part in text.removesuffix(";").split(";"))  # P-24
    if len({slot.key for slot in slots}) < len(slots):
        raise _refusal("each key once", text)
    return slots


def _either(yes: str, no: str) -> _Type:
    def read(text: str) -> bool:
        if text not in (yes, no):
            raise _refusal(f"{yes} or {no}", text)
        return text == yes

    return read, lambda value: yes if value else no


_TYPES: dict[str, _Type] = {
    "action": (_action, str),
    "key": (partial(check_label, what="key"), str),
    "kind": (partial(check_label, what="kind", empty=True), str),
    "open": _either("open", "close"),
    "port": (_port, str),
    "ready": _either("true", "false"),
    "slots": (_slots, lambda slots: ";".join(map(_SLOT.write, slots))),
    "tag": (partial(check_label, what="tag", empty=True), str),
    "text": (str, str),
}


class _Form:
    """What follows `H;` in one kind of message: a template with the fields of its class, in order."""

    def __init__(self, kind: Callable[..., Any], template: str, **types: _Type) -> None:
        self.kind, self.template = kind, template
        self.types = {name: types.get(name, _TYPES[name]) for name in re.findall(r"{(\w+)}", template)}
        self.pattern = re.compile(re.sub(r"{\w+}", "(.*?)", template), re.DOTALL)

    def read(self, text: str, *before: Any) -> Any:
        """Return the message, or raise PacketError; `before` are the arguments before its fields."""
        if (match := self.pattern.fullmatch(text)) is None:
            raise _refusal(self.template.upper(), text)
        return self.kind(
            *before, *(read(part) for (read, _), part in zip(self.types.values(), match.groups(), strict=True))
        )

    def write(self, message: Any) -> str:
        return self.template.format(**{name: write(getattr(message, name)) for name, (_, write) in self.types.items()})


_SLOT: _Form = _Form(Slot, "{key}={open},{kind},{tag},{ready}", ready=_either("ready", "not_ready"))
_read_slot = lru_cache(4096)(_SLOT.read)  # a lobby is told often, and its slots change seldom
_LOBBY_INFO = _Form(LobbyInfo, "{slots}")
_CLIENT_FORMS = {
    "action": _Form(Action, "action={action}"),
    "lobby": _Form(LobbyRequest, "lobby"),
    "ready": _Form(Ready, "ready={key},{ready}"),
    "register": _Form(Register, "register={key},{tag}"),
}
_SERVER_FORMS = {
    "message": _Form(Message, "message={text}"),
    "registered": _Form(Registered, "registered={key}"),
    "start": _Form(Start, "start=port:{port}"),
}
_FORM_OF = {form.kind: form for form in (*_CLIENT_FORMS.values(), *_SERVER_FORMS.values(), _LOBBY_INFO)}


# Reading


def _split(datagram: bytes) -> tuple[str, str]:
    """Return what stands before and after the first semicolon."""
    try:
        head, semicolon, body = datagram.decode().partition(";")
    except UnicodeDecodeError as error:
        raise PacketError(f"expected UTF-8, got a datagram with {error.reason} at byte {error.start}") from error
    if not semicolon:
        raise _refusal("`NAME:NUMBER;` and a message", head)
    return head, body


@lru_cache(1024)
def parse_header(text: str) -> Header:
    """Read `NAME:NUMBER`.

    Raises:
        PacketError: It has another form.
    """
    name, _, number = text.partition(":")
    if not re.fullmatch(_NUMBER, number):
        raise _refusal("NAME:NUMBER, with a number from 0", text)
    return Header(check_label(name, "name"), int(number))


def parse_client(datagram: bytes) -> ClientMessage:
    """Read a datagram that a client sent: C1 to C4.

    Raises:
        PacketError: It is none of them.
    """
    head, body = _split(datagram)
    form = _CLIENT_FORMS.get(body.partition("=")[0])
    if form is None:
        raise _refusal("lobby, register=, ready= or action=", body)
    message: ClientMessage = form.read(body, parse_header(head))
    return message


def parse_server(datagram: bytes) -> ServerMessage:
    """Read a datagram that a server sent: S1 to S5.

    Raises:
        PacketError: It is none of them.
    """
    head, body = _split(datagram)
    if head.count(":") > 1:
        return _step(f"{head};{body}")
    message: ServerMessage = _SERVER_FORMS.get(body.partition("=")[0], _LOBBY_INFO).read(body, parse_header(head))
    return message


def _step(text: str) -> Step:
    if (match := _STEP.fullmatch(text)) is None:
        raise _refusal("NAME:NUMBER:TIMESTAMP:STEP;obs=O;reward=R;done=true|false and, if any, ;extra=E", text)
    head, timestamp, step, observation, reward, done, rest = match.groups()
    particles = (rest or "").split(";")  # what is not known is ignored
    extras = [particle.removeprefix("extra=") for particle in particles if particle.startswith("extra=")]
    if len(extras) > 1 or any("=" in extra for extra in extras):  # P-6
        raise _refusal("one extra=, without `;` and `=`", text)
    extra = extras[0] if extras else None
    return Step(parse_header(head), int(timestamp), int(step), observation, reward, done == "true", extra)


# Writing


def format_message(message: ClientMessage | ServerMessage) -> bytes:
    """Write a message as the one datagram that it is (P-1).

    Raises:
        PacketError: A field holds what the grammar bans there, so that another message would be read; or the datagram
            would be longer than `MAX_MESSAGE` bytes.
    """
    if isinstance(message, Step):
        end = "true" if message.done else "false"
        body = f"obs={message.observation};reward={message.reward};done={end}"
        body += "" if message.extra is None else f";extra={message.extra}"
        text = f"{message.header}:{message.timestamp}:{message.step};{body}"
    else:
        text = f"{message.header};{_FORM_OF[type(message)].write(message)}"
    datagram = _encode(text)
    if len(datagram) > MAX_MESSAGE:
        raise PacketError(f"expected a message of at most {MAX_MESSAGE} bytes, got {len(datagram)}: {text[:80]!r}…")
    read = parse_client if isinstance(message, ClientMessage) else parse_server
    if read(datagram) != message:
        raise _refusal("fields without what separates fields", text)
    return datagram


def format_lobby(header: Header, slots: Iterable[Slot], most: int) -> list[bytes]:
    """Write slots as S1, in as many datagrams of at most `most` bytes as it takes; raises PacketError as above."""
    size, groups = math.inf, list[list[Slot]]()
    for slot in slots:
        length = len(_SLOT.write(slot).encode()) + 1
        if size + length > most:
            size = len(str(header).encode())
            groups.append([])
        size += length
        groups[-1].append(slot)
    return [format_message(LobbyInfo(header, tuple(group))) for group in groups]
