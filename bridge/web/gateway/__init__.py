"""A gateway: one page at one port for the worlds of other servers (`gymnasium-bridge web`).

It is an ordinary server, with its tokens, limits, page and transports, but its sessions relay: a request is forwarded
to the server that has the world, in a separate call, and the response is returned unchanged. Only names of worlds are
translated; here they begin with the server's name. So every function of a server works through the gateway: playing,
watching, takeover, pictures, properties. The alternative, worlds whose environments are remote, would need a second
world for each remote one, would not see worlds that others play in, and would send raw pictures over the network.

May be imported by the composition root, and by `policies`, whose evaluations a page shows.
"""

from __future__ import annotations

from bridge.web.gateway.schemes import GatewayScheme
from bridge.web.gateway.serve import serve_gateway

__all__ = ["GatewayScheme", "serve_gateway"]
