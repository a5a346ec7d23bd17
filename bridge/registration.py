"""The id under which `gymnasium.make` and `gymnasium.make_vec` find remote environments."""

from __future__ import annotations

import gymnasium

__all__ = ["REMOTE_ID", "register_remote"]

REMOTE_ID = "bridge/Remote-v0"
"""With `url=…` for `gymnasium.make`, with `urls=…` for `gymnasium.make_vec`."""


def register_remote() -> None:
    """Register `bridge/Remote-v0`, unless it is."""
    if REMOTE_ID not in gymnasium.registry:
        gymnasium.register(
            REMOTE_ID,
            entry_point="bridge.client.env:RemoteEnv",
            vector_entry_point="bridge.wrappers.blocking_reset:make_blocking",
        )
