"""The error for something that cannot be saved, and the name of its place."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CannotCopyError", "place_name"]


class CannotCopyError(Exception):
    """A value in an environment cannot be copied or put back. The message names the value and its place."""


def place_name(path: Sequence[str]) -> str:
    """Return the attribute names that lead to a value, for a message."""
    return ".".join(path[1:]) if path and path[0].isdigit() else ".".join(path)
