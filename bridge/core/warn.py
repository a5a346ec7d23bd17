"""Warnings that name the user's own line."""

from __future__ import annotations

import inspect
import warnings

__all__ = ["warn"]

_PASSED_THROUGH = ("bridge", "gymnasium")


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning whose place is the nearest caller outside of this package and of Gymnasium.

    A place of ours would show a line that its reader did not write and cannot change.
    """
    frame, level = inspect.currentframe(), 1
    # Counted anew each time: how deep the user's line is depends on the wrappers around the environment.
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PASSED_THROUGH:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
