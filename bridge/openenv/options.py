"""The keyword `openenv` of `serve_gym`."""

from __future__ import annotations

import dataclasses

from bridge.errors import SettingError

__all__ = ["OpenEnvOptions"]


@dataclasses.dataclass(frozen=True)
class OpenEnvOptions:
    """How a server speaks OpenEnv."""

    name: str
    """The environment's name in `/metadata`."""
    pictures: bool
    """True if pictures travel as PNGs."""

    @classmethod
    def of(cls, openenv: object, name: str, *, web: bool, single: bool) -> OpenEnvOptions | None:
        """Read the keyword `openenv` of `serve_gym`; None: the server does not speak it.

        Args:
            openenv: What was given: True, False or `png`.
            name: The environment's.
            web: Whether the server speaks HTTP.
            single: Whether its worlds are single environments that wait for each action.

        Raises:
            SettingError: It is something else, or OpenEnv cannot be spoken with the other keywords.
        """
        if openenv not in (False, True, "png"):
            raise SettingError(f"expected openenv to be True, False or 'png', got {openenv!r}")
        if not openenv:
            return None
        if not web:
            raise SettingError("openenv is spoken over WebSocket: give web=True too")
        if not single:
            raise SettingError(
                "an OpenEnv session is one environment that waits for each action: leave num_envs and fps out, or "
                "openenv"
            )
        return cls(name, openenv == "png")
