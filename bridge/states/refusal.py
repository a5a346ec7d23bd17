"""What cannot be saved is refused by this error, with the place where it was found."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CannotCopyError", "place_name"]


class CannotCopyError(Exception):
    """What an environment holds cannot be copied, or not put back: the message says what, and where it is."""


def place_name(path: Sequence[str]) -> str:
    """Return the names of the attributes that lead to a value, for a message."""
    return ".".join(path[1:]) if path and path[0].isdigit() else ".".join(path)
