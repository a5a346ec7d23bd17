"""Which token a client shows to a server: none that it was not given for, and none for everybody to read."""

from __future__ import annotations

import warnings

from bridge.transport.address import Address, is_loopback

__all__ = ["shown_token"]


def shown_token(address: Address) -> str | None:
    """Return the token that is shown to a server; None: there is none, or it is not for everybody to read."""
    held = address.credentials
    token = held.token
    # A Unix socket is this machine's own, where nobody reads along.
    if token is None or address.tls or address.scheme == "unix" or is_loopback(address.host):
        return None if token is None else token.reveal()
    if held.from_environment:  # it was given for any server there is
        return None
    warnings.warn(
        f"the token travels unencrypted to {address.host}; use a server with TLS, and grpcs://",
        RuntimeWarning,
        stacklevel=2,
    )
    return token.reveal()
