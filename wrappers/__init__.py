"""Wrappers for remote environments, and two classes for Stable-Baselines3 that are imported at their first use.

May be imported by the composition root.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "bridge.wrappers":
    # `import wrappers` from the project's folder would define every class a second time
    raise ImportError("this package is imported as bridge.wrappers, not as wrappers")

from bridge.core.extras import install_command, lazy_names

if TYPE_CHECKING:
    from .action_history import ActionHistory
    from .blocking_reset import BlockingReset
    from .sb3 import SB3VecEnv as SB3VecEnv
    from .sb3_callback import SB3ReportCallback as SB3ReportCallback
    from .skip_resetting import Ready, SkipResetting
    from .throttle import Throttle
    from .transparent import Transparent

# SB3VecEnv and SB3ReportCallback are not listed: a star import must not need the extra.
__all__ = ["ActionHistory", "BlockingReset", "Ready", "SkipResetting", "Throttle", "Transparent"]

_PLACES = {
    "ActionHistory": "bridge.wrappers.action_history",
    "BlockingReset": "bridge.wrappers.blocking_reset",
    "Ready": "bridge.wrappers.skip_resetting",
    "SkipResetting": "bridge.wrappers.skip_resetting",
    "Throttle": "bridge.wrappers.throttle",
    "Transparent": "bridge.wrappers.transparent",
}
_NEED_SB3 = {
    "SB3ReportCallback": "bridge.wrappers.sb3_callback",
    "SB3VecEnv": "bridge.wrappers.sb3",
}
_get, __dir__ = lazy_names(__name__, _PLACES)


def __getattr__(name: str) -> Any:
    if name in _NEED_SB3:
        try:
            return getattr(importlib.import_module(_NEED_SB3[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "stable_baselines3":
                raise
            raise ImportError(
                f"{name} needs Stable-Baselines3, which is not installed: {install_command('sb3')}"
            ) from None
    return _get(name)
