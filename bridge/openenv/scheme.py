"""The URL schemes `openenv://` and `openenvs://`: servers of OpenEnv."""

from __future__ import annotations

from bridge.core.client.endpoints import Scheme
from bridge.openenv.env import OpenEnvEnv

__all__ = ["SCHEME"]

SCHEME = Scheme(
    names=("openenv", "openenvs"),
    description="a server of OpenEnv",
    make_env=OpenEnvEnv,
    keywords={
        "action_space": "the actions' space; None: as the server's schema says",
        "observation_space": "the observations' space; None: as the server's schema says",
    },
)
"""`openenv://HOST:PORT`, with TLS `openenvs://HOST:PORT`."""
