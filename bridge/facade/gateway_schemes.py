"""The URL schemes of features that a gateway supports in addition to servers of dm_env_rpc."""

from __future__ import annotations

from typing import Any

from bridge.core.extras import feature, has_feature
from bridge.web.gateway.schemes import GatewayScheme

__all__ = ["GATEWAY_SCHEMES"]


_OF_LOBBIES = {"perlert_key": "the pre-shared key of PERLERT lobbies"}


def _open_lobby(url: str, **keywords: Any) -> Any:
    with feature("perlert", "a URL of perlert://"):
        from bridge.perlert.gateway_lobby import open_lobby
    return open_lobby(url, **keywords)


def _open_fleet(url: str) -> Any:
    with feature("fleet", "a URL of ray://"):
        from bridge.fleet.top import find_directory
    return find_directory([url])


GATEWAY_SCHEMES = (
    GatewayScheme("perlert", _open_lobby, _OF_LOBBIES if has_feature("perlert") else {}),
    GatewayScheme("ray", _open_fleet),
)
"""The first URL of a scheme imports its feature."""
