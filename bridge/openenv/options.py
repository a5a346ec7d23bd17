"""How a server speaks OpenEnv."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bridge.errors import SettingError

__all__ = ["OpenEnvOptions"]


@dataclasses.dataclass(frozen=True)
class OpenEnvOptions:
    """How a server speaks OpenEnv."""

    name: str
    """The environment's name in `/metadata`."""
    pictures: bool
    """Whether pictures travel as PNGs."""

    @classmethod
    def of(cls, openenv: bool | Literal["png"], name: str, *, web: bool, single: bool) -> OpenEnvOptions | None:
        """Read the keyword `openenv` of `serve_gym`; None: the server does not speak it.

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
