"""The gRPC service and the metadata that both ends must agree on."""

__all__ = ["HELLO", "METHOD", "SERVICE"]

SERVICE = "dm_env_rpc.v1.Environment"
"""The public service, whose one method is a bidirectional stream."""

METHOD = "Process"
"""The one method."""

HELLO = "gymnasium-bridge"
"""The key of the response metadata by which a client knows a server of this package, and its version."""
