"""What two ends of this package agree on inside the draft's free fields, so that a plain peer never notices.

    TAG      NAME+b1                             I have the profile: what is my token?
             NAME+b1.TOKEN.SEQ.WORD[.FORMER]     I received it; WORD is `r` (ready), `w` (not ready) or `l` (I leave)
    MESSAGE  bridge/1 {"token":"…"}                                                   the answer to the first
             bridge/1 {"token":"…","seq":N,"slot":KEY,"fps":30.0,"decimals":6,"observation":SPACE,"action":SPACE}
    ACTION   TOKEN,PORT,SEQ,VALUE
    EXTRA    token:TOKEN,ack:SEQ,got:N,sent:N,ret:RETURN[,end:terminated|truncated]

The token belongs to the client's address, and whoever returns it receives what is sent there. The registration of such
a client is changed by registrations with its token alone, the newest SEQ first. FORMER is the token of an address that
the client had before, whose slot it takes along. PORT is the run's, so that no action counts in another one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from decimal import Decimal
from typing import Any

from bridge.encoding.space_json import space_from_json, space_to_json
from bridge.errors import PacketError, TensorError, UnsupportedSpaceError
from bridge.perlert.protocol.codec import Space, TextCodec, decimal_text, parse_decimal

__all__ = [
    "MAX_NAME",
    "Claim",
    "Extra",
    "Offer",
    "action_text",
    "extra_text",
    "format_tag",
    "offer_text",
    "parse_extra",
    "parse_offer",
    "parse_tag",
    "split_action",
]

OFFER = "bridge/1 "
MARK = "+b1"
MAX_NAME = 23
"""Bytes of a client's name, which leave room in a TAG for the rest."""
_MAX_ELEMENTS = 1200
"""Of an offered space: no observation of a datagram has more, and memory is taken for what came."""
_WIDTHS = (8, 16, 32, 64)
_DTYPES = {"bool", "float16", "float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in _WIDTHS)}

_TAG = re.compile(
    r"(?P<name>.*)\+b1(?:\.(?P<token>[0-9a-f]{12})\.(?P<seq>[0-9]{1,9})\.(?P<word>[rwl])(?:\.(?P<former>[0-9a-f]{12}))?)?\Z",
    re.DOTALL | re.ASCII,
)
_TOKEN, _COUNT = "[0-9a-f]{12}", "[0-9]{1,15}"
_ACTION = re.compile(f"({_TOKEN}),({_COUNT}),({_COUNT}),(.*)", re.DOTALL)
_EXTRA = re.compile(
    f"token:({_TOKEN}),ack:({_COUNT}),got:({_COUNT}),sent:({_COUNT}),ret:([^,]*)"
    "(?:,end:(terminated|truncated))?(?:,.*)?",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a TAG says."""

    name: str
    """What the lobby lists."""
    profiled: bool = False
    """Whether the client has the profile."""
    token: str = ""
    """The token that the client returns; empty: it has none yet."""
    seq: int = 0
    word: str = "w"
    former: str = ""


def format_tag(claim: Claim) -> str:
    """Return the TAG."""
    if not claim.token:
        return claim.name + MARK if claim.profiled else claim.name
    former = f".{claim.former}" if claim.former else ""
    return f"{claim.name}{MARK}.{claim.token}.{claim.seq}.{claim.word}{former}"


def parse_tag(tag: str) -> Claim:
    """Read a TAG; any text is a plain client's name."""
    match = _TAG.match(tag)
    if match is None:
        return Claim(tag)
    return Claim(
        match["name"], True, match["token"] or "", int(match["seq"] or 0), match["word"] or "w", match["former"] or ""
    )


@dataclasses.dataclass(frozen=True)
class Offer:
    """What the server tells a client of ours."""

    token: str
    """Goes into every registration and action."""
    seq: int = 0
    """The newest registration of this address that the server knows."""
    slot: str = ""
    """The slot that the client holds."""
    fps: float | None = None
    """Frames a second; None: this is not yet all that the server has to say."""
    observation_space: Space | None = None
    action_space: Space | None = None


def offer_text(
    token: str, *, seq: int = 0, slot: str = "", fps: float = 0.0, decimals: int = 0, spaces: str = ""
) -> str:
    """Return an S3 text: the token alone, or with a frame rate everything. `spaces` is of `spaces_text`."""
    parts: dict[str, Any] = {"token": token}
    if seq:
        parts["seq"] = seq
    if fps:
        parts |= {"slot": slot, "fps": fps, "decimals": decimals}
    return f"{OFFER}{json.dumps(parts, separators=(',', ':'), ensure_ascii=False)[:-1]}{spaces}}}"


def spaces_text(observation_space: Space, action_space: Space) -> str:
    """Return the part of an offer that tells the spaces."""
    return f',"observation":{space_to_json(observation_space)},"action":{space_to_json(action_space)}'


def _checked(data: Any) -> None:
    """Refuse the JSON of a space that would take more memory than an observation of a datagram needs."""
    shape = data.get("n") if data["type"] == "MultiBinary" else data.get("shape", [])
    sizes = shape if isinstance(shape, list) else [shape]
    if data["type"] not in ("Box", "Discrete", "MultiBinary", "MultiDiscrete", "Dict"):
        raise ValueError(f"expected a space with a text form, got {data['type']!r:.40}")
    if data.get("dtype", "bool") not in _DTYPES or len(sizes) > 8 or math.prod(sizes) > _MAX_ELEMENTS:
        raise ValueError(f"expected at most {_MAX_ELEMENTS} numbers, got {data!r:.80}")
    for _, part in data.get("spaces", []):
        _checked(part)


def _space(data: Any) -> Space | None:
    if data is None:
        return None
    _checked(data)
    space = space_from_json(json.dumps(data))
    TextCodec(space)
    return space


def parse_offer(text: str) -> Offer | None:
    """Read an S3 text; None: it is a message for people."""
    if not text.startswith(OFFER + "{"):
        return None
    try:
        parts = json.loads(text[len(OFFER) :])
        observation, action = (_space(parts.get(side)) for side in ("observation", "action"))
    # Whatever the peer wrote, in JSON, NumPy or Gymnasium: it is the peer's text that is wrong.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TensorError, UnsupportedSpaceError):
        return None
    token, seq, slot, fps = (parts.get(name) for name in ("token", "seq", "slot", "fps"))
    if not isinstance(token, str) or not re.fullmatch(_TOKEN, token):
        return None
    return Offer(
        token,
        seq if type(seq) is int and 0 <= seq < 10**9 else 0,
        slot if isinstance(slot, str) else "",
        float(fps) if type(fps) in (int, float) and 0 < fps < 1e6 else None,
        observation,
        action,
    )


def action_text(token: str, port: int, seq: int, value: str) -> str:
    """Return ACTION."""
    return f"{token},{port},{seq},{value}"


def split_action(action: str) -> tuple[str, int, int, str] | None:
    """Return (token, port, seq, value) of an ACTION of the profile; None: it has another form."""
    match = _ACTION.fullmatch(action)
    return (match[1], int(match[2]), int(match[3]), match[4]) if match else None


@dataclasses.dataclass(frozen=True)
class Extra:
    """What the profile adds to an S5."""

    token: str
    """The client's, so that nobody else can end its episode."""
    ack: int
    """The newest action that was applied; 0: none yet."""
    got: int
    """Action datagrams with the token that arrived so far."""
    sent: int
    """S5 sent to this client so far, this one among them; a resent one keeps its number."""
    ret: Decimal
    """The sum of all rewards so far."""
    end: str | None = None
    """`terminated` or `truncated`, when done."""


def extra_text(extra: Extra) -> str:
    """Return EXTRA."""
    text = f"token:{extra.token},ack:{extra.ack},got:{extra.got},sent:{extra.sent},ret:{decimal_text(extra.ret)}"
    return f"{text},end:{extra.end}" if extra.end else text


def parse_extra(text: str | None) -> Extra | None:
    """Read EXTRA; None: it is not of the profile. What follows is ignored."""
    if (match := _EXTRA.fullmatch(text or "")) is None:
        return None
    try:
        return Extra(match[1], int(match[2]), int(match[3]), int(match[4]), parse_decimal(match[5]), match[6])
    except PacketError:
        return None
