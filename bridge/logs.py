"""A log that costs nobody anything where it cannot be written: handlers that raise, disks that are full."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

__all__ = ["SafeLog"]


class SafeLog(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A module's logger whose handlers and filters may raise: the line is lost, and what it tells about goes on.

    Args:
        name: The module's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line, as from where `info` or `warning` was called."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
