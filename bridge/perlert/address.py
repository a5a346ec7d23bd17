"""Parses `perlert://` URLs: `perlert://HOST:PORT/NAME:NUMBER`, optionally with `?agent=KEY&tag=TAG`.

An IPv6 address is written in brackets. Without `:NUMBER` the instance is 0.
"""

from __future__ import annotations

import dataclasses
from urllib.parse import parse_qsl, unquote, urlsplit

from bridge.errors import AddressError
from bridge.perlert.protocol.packet import Header, check_label, parse_header

__all__ = ["PerlertAddress", "PerlertAddressError", "parse_perlert_address"]


class PerlertAddressError(AddressError):
    """A `perlert://` URL cannot be read."""

    expected = (
        "perlert://HOST:PORT/NAME:NUMBER, e.g. perlert://localhost:32322/cartpole:0, optionally with ?agent=KEY&tag=TAG"
    )


@dataclasses.dataclass(frozen=True)
class PerlertAddress:
    """The parts of a `perlert://` URL."""

    url: str
    """The URL as it was given."""
    host: str
    """A host name or an IP address; IPv6 without its brackets."""
    port: int
    """The lobby's UDP port, 1 to 65535."""
    header: Header
    """The environment's name and instance number."""
    agent: str | None = None
    """The slot to take; None: the first free one."""
    tag: str | None = None
    """The client's name; None: a generated one."""


def parse_perlert_address(url: str) -> PerlertAddress:
    """Read a `perlert://` URL.

    Raises:
        AddressError: The scheme is different, or the host, port or environment is missing, or a part is unknown.
    """
    if not isinstance(url, str):
        raise PerlertAddressError(str(url), f"it is of type {type(url).__name__}, not a string")
    try:
        parts = urlsplit(url.strip())
        port, path = parts.port, unquote(parts.path.lstrip("/"))
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        query = dict(pairs)
        for reason, is_wrong in (
            (f"the scheme {parts.scheme!r} is not perlert", parts.scheme != "perlert"),
            ("it names no host", not parts.hostname),
            ("it names no port that a client can send to", not port),
            ("a user name or a fragment has no meaning", parts.username is not None or parts.fragment),
            ("it names no environment", not path),
            ("its query has more than agent and tag once", len(query) < len(pairs) or query.keys() - {"agent", "tag"}),
        ):
            if is_wrong:
                raise ValueError(reason)
        str(parts.hostname).encode("idna")  # as for the lookup; raises UnicodeError, a ValueError, for an invalid name
        header = parse_header(path if ":" in path else f"{path}:0")
        agent = check_label(query["agent"], "key") if "agent" in query else None
        tag = check_label(query["tag"], "tag", empty=True) if "tag" in query else None
    except ValueError as error:  # includes PacketError
        raise PerlertAddressError(url, str(error)) from error
    return PerlertAddress(url, str(parts.hostname), int(port or 0), header, agent, tag)
