"""`bridge lobby`: join a PERLERT lobby and play in the terminal. All of it is in `bridge.perlert`."""

from bridge.perlert.terminal import add_lobby_parser as register

__all__ = ["register"]
