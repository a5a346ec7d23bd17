"""The last measurements of a value, and their percentiles: a mean would hide the delays that matter in real time."""

from __future__ import annotations

from collections import deque

import numpy as np

from bridge.errors import SettingError

__all__ = ["Samples"]


class Samples:
    """Stores the last `capacity` numbers.

    Args:
        capacity: The most stored numbers, at least 1.
    """

    def __init__(self, capacity: int = 1024) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise SettingError(f"expected a capacity of 1 or more, got {capacity!r}")
        self.recent: deque[float] = deque(maxlen=capacity)
        """The stored numbers, the oldest first."""
        self.count = 0
        """The number of all numbers ever added. Code that runs in each step appends to `recent` and counts itself."""

    def add(self, value: float) -> None:
        """Add a number; it replaces the oldest one if there is no room."""
        self.recent.append(value)
        self.count += 1

    @property
    def last(self) -> float:
        """The newest number; NaN if there is none."""
        return float(self.recent[-1]) if self.recent else float("nan")

    def summary(self) -> dict[str, float]:
        """Return `count` (of all numbers ever added) and, of the stored ones, `p50`, `p90`, `p99` and `max`.

        If none was added these are NaN.
        """
        kept = np.array(self.recent)
        if not len(kept):
            return {"count": 0, **dict.fromkeys(("p50", "p90", "p99", "max"), float("nan"))}
        p50, p90, p99 = np.percentile(kept, (50, 90, 99)).tolist()
        return {"count": self.count, "p50": p50, "p90": p90, "p99": p99, "max": float(kept.max())}
