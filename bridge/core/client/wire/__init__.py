"""Connections: sockets, gRPC and WebSocket over them, and the poller that waits for them all."""
