"""A gateway: one page, and one port, for the worlds of other servers (`gymnasium-bridge web`).

It is an ordinary server, with its tokens, limits, page and transports, whose sessions relay: a request is handed on to
the server that has its world, by a call of its own to there, and the answer comes back as it is. Only the names of
worlds are translated, which begin with the server's here. So whatever a server can do, it can do through the gateway:
play, watch, take over, pictures, properties. The other way, environments that are remote ones, would need a second
world beside each remote one, see no world that others play in, and carry raw pictures over the network.

May be imported by the composition root, and `policies`, whose evaluations a page shows.
"""

from __future__ import annotations

from bridge.web.gateway.schemes import GatewayScheme
from bridge.web.gateway.serve import serve_gateway

__all__ = ["GatewayScheme", "serve_gateway"]
