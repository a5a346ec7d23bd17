"""This package's profile of the protocol, inside free fields of the draft, which other peers ignore.

    TAG      NAME+b1                             I have the profile: what is my token?
             NAME+b1.TOKEN.SEQ.WORD[.FORMER]     I received it; WORD is `r` (ready), `p` (ready, a person),
                                                                      `w` (not ready) or `l` (I leave)
    MESSAGE  bridge/1 {"token":"…"}                                                   the answer to the first
             bridge/1 {"token":"…","seq":N,"slot":KEY,"fps":30.0,"decimals":6,"observation":SPACE,"action":SPACE}
    ACTION   TOKEN,PORT,SEQ,VALUE
    EXTRA    token:TOKEN,ack:SEQ,got:N,sent:N,ret:RETURN[,end:terminated|truncated]

The token belongs to the client's address, and whoever returns it receives datagrams sent there. The registration of
such a client is changed only by registrations with its token, and the highest SEQ wins. FORMER is the token of the
client's previous address, whose slot it keeps. PORT is the run's, so that an action is not valid in another run.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any, NamedTuple

from bridge.core.encoding.space_json import space_from_json, space_to_json
from bridge.core.worlds.group import neutral_action
from bridge.errors import PacketError, TensorError, UnsupportedSpaceError
from bridge.perlert.protocol.codec import Space, TextCodec, decimal_text, parse_decimal

__all__ = ["MAX_NAME", "Claim", "Extra", "Offer", "action_text", "extra_text", "format_tag", "offer_text"]
__all__ += ["parse_extra", "parse_offer", "parse_tag", "spaces_text", "split_action"]

OFFER = "bridge/1 "
MARK = "+b1"
MAX_NAME = 23
"""The most bytes of a client's name, which leaves room in a TAG for the other fields."""
_MAX_ELEMENTS = 1200
"""The most elements of an offered space: no datagram holds a larger observation, and this limits the memory."""

_TOKEN, _COUNT = "[0-9a-f]{12}", "[0-9]{1,15}"
_TAG = re.compile(rf"(.*)\+b1(?:\.({_TOKEN})\.([0-9]{{1,9}})\.([rpwl])(?:\.({_TOKEN}))?)?", re.DOTALL)
_ACTION = re.compile(f"({_TOKEN}),({_COUNT}),({_COUNT}),(.*)", re.DOTALL)
_EXTRA = re.compile(
    f"token:({_TOKEN}),ack:({_COUNT}),got:({_COUNT}),sent:({_COUNT}),ret:([^,]*)"
    "(?:,end:(terminated|truncated))?(?:,.*)?",
    re.DOTALL,
)
_DTYPE = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")


class Claim(NamedTuple):
    """The fields of a TAG: the client's name, whether it has the profile, and the token that it returns."""

    name: str
    profiled: bool = False
    token: str = ""
    seq: int = 0
    word: str = "w"
    former: str = ""


def format_tag(claim: Claim) -> str:
    """Format a TAG."""
    name, profiled, *parts = claim
    if not claim.token:
        return name + MARK if profiled else name
    # Without FORMER, nothing follows the last dot.
    return ".".join([name + MARK, *map(str, parts)]).removesuffix(".")


def parse_tag(tag: str) -> Claim:
    """Parse a TAG; a text of any other form is the name of a client without the profile."""
    # Such a name may be any text, also one that is almost a TAG of the profile.
    if (match := _TAG.fullmatch(tag)) is None:
        return Claim(tag)
    name, token, seq, word, former = match.groups("")
    return Claim(name, True, token, int(seq or 0), word or "w", former)


class Offer(NamedTuple):
    """The server's offer to a client of this package; it is incomplete without `fps`."""

    token: str
    """The token for every registration and action."""
    seq: int
    """The number of the newest registration from this address."""
    slot: str
    """The client's slot."""
    fps: float | None
    """Frames per second."""
    observation_space: Space | None
    action_space: Space | None


def offer_text(
    token: str, *, seq: int = 0, slot: str = "", fps: float = 0.0, decimals: int = 0, spaces: str = ""
) -> str:
    """Return an S3 text: only the token or, with a frame rate, the whole offer. `spaces` comes from `spaces_text`."""
    parts = {"token": token, **({"seq": seq} if seq else {})}
    if fps:
        parts |= {"slot": slot, "fps": fps, "decimals": decimals}
    return f"{OFFER}{json.dumps(parts, separators=(',', ':'), ensure_ascii=False)[:-1]}{spaces}}}"


def spaces_text(observation_space: Space, action_space: Space) -> str:
    """Return the part of an offer that contains the spaces."""
    return f',"observation":{space_to_json(observation_space)},"action":{space_to_json(action_space)}'


def _check(data: Any) -> None:
    """Raise for the JSON of a space that would need more memory than any observation in a datagram."""
    shape = data.get("n") if data["type"] == "MultiBinary" else data.get("shape", [])
    sizes = shape if isinstance(shape, list) else [shape]
    if data["type"] not in ("Box", "Discrete", "MultiBinary", "MultiDiscrete", "Dict"):
        raise ValueError(f"expected a space with a text form, got {data['type']!r:.40}")
    # Checked before NumPy: a shape of a few bytes may request terabytes.
    if not _DTYPE.fullmatch(data.get("dtype", "bool")) or len(sizes) > 8 or math.prod(sizes) > _MAX_ELEMENTS:
        raise ValueError(f"expected at most {_MAX_ELEMENTS} numbers, got {data!r:.80}")
    for _, part in data.get("spaces", []):
        _check(part)


def parse_offer(text: str) -> Offer | None:
    """Parse an S3 text; return None if it is a text message."""
    if not text.startswith(OFFER + "{"):
        return None
    try:
        parts = json.loads(text[len(OFFER) :])
        spaces: list[Space | None] = [None, None]
        for index, side in enumerate(("observation", "action")):
            if parts.get(side) is not None:
                _check(parts[side])
                spaces[index] = space = space_from_json(json.dumps(parts[side]))
                # Refused here rather than during a run: a space without text form, or without an initial action.
                TextCodec(space, decimals=None).encode(neutral_action(space))
    # Any exception of JSON, NumPy or Gymnasium is caused by the peer's text.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TensorError, UnsupportedSpaceError):
        return None
    token, seq, slot, fps = (parts.get(name) for name in ("token", "seq", "slot", "fps"))
    if not isinstance(token, str) or not re.fullmatch(_TOKEN, token):
        return None
    return Offer(
        token,
        # Untrusted JSON: a field of the wrong type counts as missing.
        seq if type(seq) is int and 0 <= seq < 10**8 else 0,
        slot if isinstance(slot, str) else "",
        float(fps) if type(fps) in (int, float) and 0 < fps < 1e6 else None,
        *spaces,
    )


def action_text(token: str, port: int, seq: int, value: str) -> str:
    """Format an ACTION."""
    return f"{token},{port},{seq},{value}"


def split_action(action: str) -> tuple[str, int, int, str] | None:
    """Return (token, port, seq, value) of an ACTION of the profile; None if it has another form."""
    match = _ACTION.fullmatch(action)
    return (match[1], int(match[2]), int(match[3]), match[4]) if match else None


class Extra(NamedTuple):
    """The profile's fields in an S5.

    The token is the client's, so that nobody else can end its episode. `ack` is the newest applied action, 0 if none;
    `got` counts received action datagrams with the token; `sent` counts the S5 messages to this client including this
    one, and a repeated message keeps its number. `ret` is the sum of all rewards, `end` the reason of the end if done.
    """

    token: str
    ack: int
    got: int
    sent: int
    ret: Decimal
    end: str | None = None


def extra_text(extra: Extra) -> str:
    """Format EXTRA."""
    text = f"token:{extra.token},ack:{extra.ack},got:{extra.got},sent:{extra.sent},ret:{decimal_text(extra.ret)}"
    return f"{text},end:{extra.end}" if extra.end else text


def parse_extra(text: str | None) -> Extra | None:
    """Parse EXTRA; return None if it is not of the profile. Ignore further fields."""
    if (match := _EXTRA.fullmatch(text or "")) is None:
        return None
    token, ack, got, sent, ret, end = match.groups()
    try:
        return Extra(token, int(ack), int(got), int(sent), parse_decimal(ret), end)
    except PacketError:
        return None
