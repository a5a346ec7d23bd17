"""The core: environments as worlds, the protocol's sessions, the transport, and the clients.

`encoding` turns Gymnasium's data into messages, `transport` has HTTP/2, TLS and sockets, `worlds` what is served,
`server` and `client` the two ends; the modules here are small helpers. Everything else of this package may import the
core. It imports nothing but itself, `bridge.errors`, `bridge.version` and `bridge.pb`.
"""
