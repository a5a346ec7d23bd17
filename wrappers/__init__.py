"""Wrappers around remote environments; and `SB3VecEnv`, imported when asked for, which needs the extra `sb3`.

May be imported by the composition root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "bridge.wrappers":
    # `import wrappers` from the project's folder would make second copies of every class.
    raise ImportError("this package is imported as bridge.wrappers, not as wrappers")

from bridge.core.extras import install_command
from bridge.core.lazy import lazy_names

if TYPE_CHECKING:
    from .action_history import ActionHistory
    from .blocking_reset import BlockingReset
    from .sb3 import SB3VecEnv as SB3VecEnv
    from .skip_resetting import Ready, SkipResetting
    from .throttle import Throttle
    from .transparent import Transparent

# SB3VecEnv is left out: a star import must not need the extra.
__all__ = ["ActionHistory", "BlockingReset", "Ready", "SkipResetting", "Throttle", "Transparent"]

_PLACES = {
    "ActionHistory": "bridge.wrappers.action_history",
    "BlockingReset": "bridge.wrappers.blocking_reset",
    "Ready": "bridge.wrappers.skip_resetting",
    "SkipResetting": "bridge.wrappers.skip_resetting",
    "Throttle": "bridge.wrappers.throttle",
    "Transparent": "bridge.wrappers.transparent",
}
_get, __dir__ = lazy_names(__name__, _PLACES)


def __getattr__(name: str) -> Any:
    if name == "SB3VecEnv":
        try:
            from .sb3 import SB3VecEnv as SB3VecEnv
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "stable_baselines3":
                raise
            raise ImportError(
                f"SB3VecEnv needs Stable-Baselines3, which is not installed: {install_command('sb3')}"
            ) from error
        return SB3VecEnv
    return _get(name)
