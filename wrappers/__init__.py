"""Wrappers around remote environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "bridge.wrappers":
    # `import wrappers` from the project's folder would make second copies of every class.
    raise ImportError("this package is imported as bridge.wrappers, not as wrappers")

from .blocking_reset import BlockingReset

if TYPE_CHECKING:
    from .sb3 import SB3VecEnv

__all__ = ["BlockingReset", "SB3VecEnv"]


def __getattr__(name: str) -> Any:
    if name == "SB3VecEnv":  # needs an extra
        from .sb3 import SB3VecEnv

        return SB3VecEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
