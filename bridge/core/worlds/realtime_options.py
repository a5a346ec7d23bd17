"""How a real-time world runs: what a user says of it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from bridge.core.clock import Clock
from bridge.errors import SettingError

if TYPE_CHECKING:
    from bridge.core.worlds.stand_ins import StandIns

__all__ = ["RealTime", "RealtimeOptions", "check_timing"]


def check_timing(fps: object, max_action_age: object, catch_up: object) -> None:
    """Raise SettingError where a number of a clock is out of its range."""
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps <= 10000:
        raise SettingError(f"expected fps to be frames a second, above 0 and at most 10000, got {fps!r}")
    for name, value in (("max_action_age", max_action_age), ("catch_up", catch_up)):
        if value is not None and (not isinstance(value, (int, float)) or not 0 <= value < math.inf):
            raise SettingError(f"expected {name} in finite seconds, 0 or more, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealTime:
    """How a real-time world runs: `realtime=` of `serve_gym` and `serve_parallel`, beside `fps=`.

    Examples:
        >>> from bridge import RealTime, serve_gym
        >>> with serve_gym("CartPole-v1", fps=30, default_action=0, realtime=RealTime(max_action_age=0.5)) as server:
        ...     pass

    Args:
        max_action_age: Seconds after which the default action replaces the agent's last action; None: the last action
            stays in force.
        catch_up: Seconds by which the server may be late and still run each frame that was missed; where it is later,
            they are dropped.
        reset_timeout: Seconds that the first Step of an agent waits for an episode to begin.
        rest_when_empty: Stand still while nobody is in the world, neither a player nor a spectator; None: where the
            server has a page (`web=True`) and the world is no match. The last frame before it stands applies the
            default action.
        clock: What the frames follow, such as `bridge.testing.VirtualClock()` in tests; None: the machine's clock.
    """

    max_action_age: float | None = None
    catch_up: float = 0.25
    reset_timeout: float = 60.0
    rest_when_empty: bool | None = None
    clock: Clock | None = None


@dataclasses.dataclass(frozen=True)
class RealtimeOptions(RealTime):
    """All that says how a real-time world runs."""

    fps: float
    """Frames a second."""
    default_action: object = None
    """Applied where there is no action of the player; None: the neutral one, zeros where the space has them. In a world
    of several agents a function of an agent's id, last observation and action space; None: the first allowed action, or
    the neutral one."""
    stand_ins: StandIns | None = None
    """In a world of several agents: who plays those that no client does, before `default_action` is asked; None:
    nobody."""
    autoreset: bool = True
    """True if each episode begins by itself; False: the first and every later one waits for a reset."""

    @classmethod
    def of(
        cls,
        fps: float,
        default_action: object,
        realtime: RealTime | None,
        stand_ins: StandIns | None = None,
        *,
        rests: bool = False,
    ) -> RealtimeOptions:
        """Read the keywords of `serve_gym` and `serve_parallel`; `rests` is the default of `rest_when_empty`.

        Raises:
            SettingError: A number is out of its range, or `realtime` is something else.
        """
        if realtime is not None and not isinstance(realtime, RealTime):
            raise SettingError(f"expected realtime to be bridge.RealTime(…), got a {type(realtime).__name__}")
        options = cls(fps=fps, default_action=default_action, stand_ins=stand_ins, **vars(realtime or RealTime()))
        if options.rest_when_empty is None:
            options = dataclasses.replace(options, rest_when_empty=rests)
        return options

    def __post_init__(self) -> None:
        check_timing(self.fps, self.max_action_age, self.catch_up)
        if not isinstance(self.reset_timeout, (int, float)) or not self.reset_timeout > 0:
            raise SettingError(f"expected reset_timeout to be a positive number of seconds, got {self.reset_timeout!r}")

    def timing(self) -> dict[str, Any]:
        """Return the keywords of a `LaneLoop`."""
        return {name: getattr(self, name) for name in ("max_action_age", "catch_up", "autoreset", "rest_when_empty")}
