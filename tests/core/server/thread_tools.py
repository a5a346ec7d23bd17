"""Threads of servers, and environments that say in which they are."""

from __future__ import annotations

import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from tests.peers import Stream

FPS = 50


THREADS = ["bridge-deputy", "bridge-serving"]
"""All threads of a server in the default mode."""


def server_threads() -> list[str]:
    """The names of this process's server threads; those of clients have other names."""
    kinds = ("bridge-serving", "bridge-deputy", "bridge-world", "bridge-helper", "bridge-server")
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(kinds))


def health(channel: grpc.Channel) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def ask(stream: Stream, key: str) -> properties_pb2.PropertyResponse:
    """Read a property."""
    request = properties_pb2.PropertyRequest(read_property={"key": key})
    extension = pb.EnvironmentRequest().extension
    extension.type_url, extension.value = PROPERTY_REQUEST_URL, request.SerializeToString()
    answer = stream.ask(extension=extension)
    assert answer.WhichOneof("payload") == "extension", answer
    return properties_pb2.PropertyResponse.FromString(answer.extension.value)
