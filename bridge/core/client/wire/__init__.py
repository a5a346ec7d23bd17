"""Connections: sockets, gRPC and WebSocket over them, and the poller that waits for them all.

May be imported by `core.client`, `core.client.realtime`, `core.client.world`, `core.client.slots`, and what is above
the core.
"""
