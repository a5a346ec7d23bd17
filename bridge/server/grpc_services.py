"""gRPC's standard services beside dm_env_rpc: health, and reflection, where their packages are installed."""

from __future__ import annotations

from typing import Any

from bridge.wire import SERVICE

__all__ = ["Health", "add_services"]


class Health:
    """What the health service says of this server."""

    def __init__(self, servicer: Any, status: Any) -> None:
        self._servicer, self._status = servicer, status
        self.set(True)

    def set(self, serving: bool) -> None:
        """Say that it takes new clients, or that it does not any more."""
        for service in ("", SERVICE):
            self._servicer.set(service, self._status.SERVING if serving else self._status.NOT_SERVING)

    def stop(self) -> None:
        """Say NOT_SERVING, and end the streams that watch."""
        self._servicer.enter_graceful_shutdown()


def add_services(server: Any) -> Health | None:
    """Add the services to a gRPC server; None: the packages (the extra `ops`) are not installed."""
    try:
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        return None
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return Health(servicer, health_pb2.HealthCheckResponse)
