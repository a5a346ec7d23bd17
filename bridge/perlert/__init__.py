"""PERLERT: environments in real time over UDP, for many agents, people among them. See docs/perlert.md."""

from bridge.perlert.address import PerlertAddress, parse_perlert_address
from bridge.perlert.client import PerlertEnv, make_perlert_env
from bridge.perlert.guard import GuardConfig
from bridge.perlert.lobby import LobbyConfig
from bridge.perlert.player import PlayerConfig
from bridge.perlert.rollout import RolloutConfig
from bridge.perlert.server import PerlertServer, serve_perlert
from bridge.perlert.vector import PerlertVectorEnv

__all__ = [
    "GuardConfig",
    "LobbyConfig",
    "PerlertAddress",
    "PerlertEnv",
    "PerlertServer",
    "PerlertVectorEnv",
    "PlayerConfig",
    "RolloutConfig",
    "make_perlert_env",
    "parse_perlert_address",
    "serve_perlert",
]
