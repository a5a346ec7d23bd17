"""The core: environments as worlds, the protocol's sessions, the transport, and the clients.

`encoding` converts Gymnasium's data to messages, `transport` has HTTP/2, TLS and sockets, `worlds` the served
environments, `adapters` wrappers of them, `server` and `client` the two ends; the modules in this folder are small
helpers. The core imports only itself, `bridge.errors`, `bridge.version` and `bridge.pb`.

May be imported by everything.
"""
