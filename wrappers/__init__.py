"""Wrappers around remote environments."""

if __name__ != "bridge.wrappers":
    # `import wrappers` from the project's folder would make second copies of every class.
    raise ImportError("this package is imported as bridge.wrappers, not as wrappers")

from .action_history import ActionHistory
from .blocking_reset import BlockingReset
from .skip_resetting import Ready, SkipResetting
from .throttle import Throttle
from .transparent import Transparent

__all__ = ["ActionHistory", "BlockingReset", "Ready", "SkipResetting", "Throttle", "Transparent"]
