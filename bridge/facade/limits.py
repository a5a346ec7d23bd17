"""`Limits`, as users give them: those of the core, and those of what the package adds to worlds."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from bridge.core.keywords import with_texts
from bridge.core.server import limits as core
from bridge.core.server.limits import CoreLimits

__all__ = ["Limits", "checked_limits"]


@dataclasses.dataclass(frozen=True)
class Limits(CoreLimits):
    """The limits of a server: `limits=` of `serve_gym` and `serve_parallel`.

    A request beyond a limit is refused with an error that names the limit; nothing else is changed by it.

    Examples:
        >>> from bridge import Limits, serve_gym
        >>> with serve_gym("CartPole-v1", limits=Limits(max_worlds=8, idle_timeout=600.0)) as server:
        ...     print(server.worlds)
        []

    Args:
        keywords: Those of `bridge.core.server.limits.CoreLimits`, which the docstring lists.
        takeover_timeout: Seconds that a person who has taken over from an agent, and slows it down, may do nothing.
        seat_timeout: Seconds that a seat with a `seat_key` waits for a client that lost its connection.

    Raises:
        SettingError: A value is out of its range.
    """

    takeover_timeout: float = 60.0
    seat_timeout: float = 30.0


Limits.__doc__ = with_texts(inspect.getdoc(Limits) or "", CoreLimits)


def checked_limits(limits: Any) -> Limits:
    """Return the keyword `limits`, or raise SettingError where it is something else."""
    found = core.checked_limits(limits)
    if isinstance(found, Limits):
        return found
    # Those of a part of this package that knows the core alone.
    return Limits(**{field.name: getattr(found, field.name) for field in dataclasses.fields(CoreLimits)})
