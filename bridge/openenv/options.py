"""The keyword `openenv` of `serve_gym`."""

from __future__ import annotations

import dataclasses

from bridge.errors import SettingError

__all__ = ["OpenEnvOptions"]


@dataclasses.dataclass(frozen=True)
class OpenEnvOptions:
    """The OpenEnv settings of a server."""

    name: str
    """The environment's name in `/metadata`."""
    pictures: bool
    """True if pictures are sent as PNGs."""

    @classmethod
    def of(cls, openenv: object, name: str, *, web: bool, single: bool) -> OpenEnvOptions | None:
        """Read the keyword `openenv` of `serve_gym`; return None if the server does not speak OpenEnv.

        Args:
            openenv: The keyword's value: True, False or `png`.
            name: The environment's name.
            web: True if the server speaks HTTP.
            single: True if its worlds are single environments in lock-step.

        Raises:
            SettingError: The value is invalid, or another keyword excludes OpenEnv.
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
