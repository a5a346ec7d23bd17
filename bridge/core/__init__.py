"""The core: environments as worlds, the protocol's sessions, the transport, and the clients.

`encoding` turns Gymnasium's data into messages, `transport` has HTTP/2, TLS and sockets, `worlds` what is served,
`adapters` wrappers of it, `server` and `client` the two ends; the modules here are small helpers. The core imports
nothing but itself, `bridge.errors`, `bridge.version` and `bridge.pb`.

May be imported by everything.
"""
