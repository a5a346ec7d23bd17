"""PERLERT: real-time environments over UDP, for several agents, including people. See docs/perlert.md.

May be imported by the composition root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.core.extras import lazy_names

if TYPE_CHECKING:
    from bridge.perlert.address import PerlertAddress, parse_perlert_address
    from bridge.perlert.client import PerlertEnv, make_perlert_env
    from bridge.perlert.lobby import LobbyConfig
    from bridge.perlert.perlert_server import PerlertServer, serve_perlert
    from bridge.perlert.player import PlayerConfig
    from bridge.perlert.protocol.guard import GuardConfig
    from bridge.perlert.rollout import RolloutConfig
    from bridge.perlert.vector import PerlertVectorEnv

__all__ = ["GuardConfig", "LobbyConfig", "PerlertAddress", "PerlertEnv", "PerlertServer", "PerlertVectorEnv"]
__all__ += ["PlayerConfig", "RolloutConfig", "make_perlert_env", "parse_perlert_address", "serve_perlert"]

_PLACES = {
    "GuardConfig": "bridge.perlert.protocol.guard",
    "LobbyConfig": "bridge.perlert.lobby",
    "PerlertAddress": "bridge.perlert.address",
    "PerlertEnv": "bridge.perlert.client",
    "PerlertServer": "bridge.perlert.perlert_server",
    "PerlertVectorEnv": "bridge.perlert.vector",
    "PlayerConfig": "bridge.perlert.player",
    "RolloutConfig": "bridge.perlert.rollout",
    "make_perlert_env": "bridge.perlert.client",
    "parse_perlert_address": "bridge.perlert.address",
    "serve_perlert": "bridge.perlert.perlert_server",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
