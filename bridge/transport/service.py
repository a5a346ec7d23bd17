"""The gRPC service and the metadata that both ends must agree on."""

__all__ = ["HELLO", "METHOD", "ROOM", "SERVICE"]

SERVICE = "dm_env_rpc.v1.Environment"
"""The public service, whose one method is a bidirectional stream."""

ROOM = "gymnasium_bridge.Room"
"""Named in a health check, it asks whether a server takes a further client: gRPC has no word for a full server."""

METHOD = "Process"
"""The one method."""

HELLO = "gymnasium-bridge"
"""The key of the response metadata by which a client knows a server of this package, and its version."""
