"""Wrappers around remote environments."""

if __name__ != "bridge.wrappers":
    # `import wrappers` from the project's folder would make second copies of every class.
    raise ImportError("this package is imported as bridge.wrappers, not as wrappers")

from .blocking_reset import BlockingReset

__all__ = ["BlockingReset"]
