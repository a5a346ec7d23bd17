"""What two ends of this package agree on inside the draft's free fields, so that a plain peer never notices.

- A client asks for the profile by the end of its TAG: `joe+b1`, and once it knows its token, `joe+b1.TOKEN`. The server
  lists it as `joe`. Returning the token proves that the address receives what is sent to it.
- The server answers such a registration with `message=bridge/1 {"token":"…"}`, and once the address is proven, with the
  frame rate and the spaces in it: `{"token":"…","fps":30.0,"decimals":6,"observation":{…},"action":{…}}`.
- `ACTION = TOKEN,SEQ,VALUE`: only newer actions are applied, and only with the token.
- `EXTRA = ack:SEQ,got:N,sent:N,ret:RETURN[,end:terminated|truncated][,token:TOKEN]`: the newest action applied,
  datagrams with the token received, S5 sent, the sum of all rewards so far. The token stands there until the first
  action with it has come, for the case that every offer was lost.
"""

from __future__ import annotations

import dataclasses
import json
import re
from decimal import Decimal
from typing import Any

from bridge.errors import PacketError, UnsupportedSpaceError
from bridge.perlert.codec import Space, decimal_text, parse_decimal, space_from_text, space_to_text

__all__ = [
    "Extra",
    "Offer",
    "action_text",
    "extra_text",
    "offer_text",
    "parse_extra",
    "parse_offer",
    "profile_tag",
    "split_action",
    "split_tag",
]

OFFER = "bridge/1 "
MARK = "+b1"

_TAG = re.compile(r"(?P<tag>.*)\+b1(?:\.(?P<token>[0-9a-f]{1,32}))?\Z", re.DOTALL)
_TOKEN = re.compile(r"[0-9a-f]{8,32}\Z")
_COUNT = re.compile(r"[0-9]{1,15}\Z", re.ASCII)


def profile_tag(tag: str, token: str | None = None) -> str:
    """Return the TAG of a client that offers the profile."""
    return f"{tag}{MARK}.{token}" if token else f"{tag}{MARK}"


def split_tag(tag: str) -> tuple[str, bool, str | None]:
    """Return (the name to list, whether the profile is asked for, the token that was returned or None)."""
    match = _TAG.match(tag)
    return (match["tag"], True, match["token"]) if match else (tag, False, None)


@dataclasses.dataclass(frozen=True)
class Offer:
    """What the server tells a client of ours."""

    token: str
    """Goes in front of every action."""
    fps: float | None = None
    """Frames a second."""
    decimals: int | None = None
    """Decimal places of floats."""
    observation_space: Space | None = None
    action_space: Space | None = None
    complete: bool = False
    """Whether this is all that the server has to say; False: return the token first."""


def offer_text(
    token: str, *, fps: float | None = None, decimals: int | None = None, spaces: tuple[Space, Space] | None = None
) -> str:
    """Return an S3 text: with nothing but the token, or the complete one, with spaces where they are given."""
    parts: dict[str, Any] = {"token": token}
    if fps is not None:
        parts |= {"fps": fps, "decimals": decimals}
    if spaces is not None:
        parts["observation"], parts["action"] = (json.loads(space_to_text(space)) for space in spaces)
    return OFFER + json.dumps(parts, separators=(",", ":"), ensure_ascii=False)


def parse_offer(text: str) -> Offer | None:
    """Read an S3 text; None: it is a message for people."""
    if not text.startswith(OFFER + "{"):
        return None
    try:
        parts = json.loads(text[len(OFFER) :])
    except (ValueError, RecursionError):
        return None
    token = parts.get("token")
    if not isinstance(token, str) or not _TOKEN.match(token):
        return None
    fps, decimals = parts.get("fps"), parts.get("decimals")
    found: list[Space | None] = []
    for side in ("observation", "action"):
        try:
            found.append(space_from_text(json.dumps(parts[side])) if side in parts else None)
        except (PacketError, UnsupportedSpaceError):
            return None
    return Offer(
        token,
        float(fps) if type(fps) in (int, float) and 0 < fps < 1e6 else None,
        decimals if type(decimals) is int and 0 <= decimals <= 20 else None,
        found[0],
        found[1],
        complete="fps" in parts,
    )


def action_text(token: str, seq: int, value: str) -> str:
    """Return ACTION."""
    return f"{token},{seq},{value}"


def split_action(action: str) -> tuple[str, int, str] | None:
    """Return (token, seq, value) of an ACTION of the profile; None: it has another form."""
    parts = action.split(",", 2)
    if len(parts) == 3 and _TOKEN.match(parts[0]) and _COUNT.match(parts[1]):
        return parts[0], int(parts[1]), parts[2]
    return None


@dataclasses.dataclass(frozen=True)
class Extra:
    """What the profile adds to an S5."""

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
    token: str | None = None
    """The client's token, until it uses it."""


def extra_text(extra: Extra) -> str:
    """Return EXTRA."""
    text = f"ack:{extra.ack},got:{extra.got},sent:{extra.sent},ret:{decimal_text(extra.ret)}"
    if extra.end:
        text += f",end:{extra.end}"
    return f"{text},token:{extra.token}" if extra.token else text


def parse_extra(text: str | None) -> Extra | None:
    """Read EXTRA; None: it is not of the profile. Names that are not known are ignored."""
    pairs = dict(part.partition(":")[::2] for part in (text or "").split(","))
    counts = [pairs.get(name, "") for name in ("ack", "got", "sent")]
    if not all(map(_COUNT.match, counts)) or "ret" not in pairs:
        return None
    try:
        ret = parse_decimal(pairs["ret"])
    except PacketError:
        return None
    end, token = pairs.get("end"), pairs.get("token", "")
    ack, got, sent = map(int, counts)
    return Extra(
        *(ack, got, sent, ret),
        end=end if end in ("terminated", "truncated") else None,
        token=token if _TOKEN.match(token) else None,
    )
