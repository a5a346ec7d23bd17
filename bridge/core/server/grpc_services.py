"""gRPC's standard services beside dm_env_rpc: health, and reflection, if their packages are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from bridge.core.transport.service import METHOD, ROOM, SERVICE
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["MAX_REQUEST", "Services", "SideCall"]

_HEALTH = "grpc.health.v1.Health"
_NAMES = ("", SERVICE, ROOM)
MAX_REQUEST = 4096
"""The most bytes of a request, because these services need no token."""


class SideCall:
    """A call of one of these services, with requests and answers as bytes.

    Args:
        serve: Called with each request; returns the answer. Raises RequestError.
        unary: True if the call has one request and one answer.
        last_words: For a call with one request and a stream of answers: the answer to send when the server stops. None:
            other calls, which end with their client.
    """

    def __init__(self, serve: Callable[[bytes], bytes], *, unary: bool, last_words: bytes | None = None) -> None:
        self._serve = serve
        self._unary = unary
        self._last_words = last_words
        self._asked = False
        self.over = False
        """True if nothing more is sent."""
        self.error: RequestError | None = None
        """The error that ended the call; None: it ended without one."""

    def message(self, data: bytes) -> list[bytes]:
        """Read a request; return the answers."""
        if self.over:
            return []
        try:
            if self._last_words is not None and self._asked:
                text = "expected one request of this call, got another; open a new call"
                raise RequestError(Code.INVALID_ARGUMENT, text)
            self._asked = True
            answer = self._serve(data)
        except DecodeError as error:
            self.error = RequestError(Code.INVALID_ARGUMENT, f"the request cannot be read: {error}")
        except RequestError as error:
            self.error = error
        else:
            self.over = self._unary
            return [answer]
        self.over = True
        return []

    def end(self) -> list[bytes]:
        """Note that no more requests come."""
        self.over = self.over or self._last_words is None
        return []

    def drain(self) -> list[bytes]:
        """Note that the server is stopping; return the answers to send."""
        if self._last_words is None or self.over:
            return []
        self.over = True
        return [self._last_words]


def _descriptors(*others: Any) -> DescriptorPool:
    """Return the descriptors for reflection: dm_env_rpc under its public name, and other files."""
    pool = DescriptorPool()
    # The messages have a package of their own here, so that they do not collide with those of `dm-env-rpc`.
    file = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    package = SERVICE.rpartition(".")[0]
    _rename(file, f".{file.package}.", f".{package}.")
    file.name, file.package = f"{package.replace('.', '/')}/dm_env_rpc.proto", package
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    kinds = f".{package}.EnvironmentRequest", f".{package}.EnvironmentResponse"
    service.method.add(
        name=METHOD, input_type=kinds[0], output_type=kinds[1], client_streaming=True, server_streaming=True
    )
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    for other in others:
        pool.AddSerializedFile(other.serialized_pb)
    return pool


def _rename(message: Any, old: str, new: str) -> None:
    """Replace the package in the names of all types that a file's messages refer to."""
    for kind in message.message_type if isinstance(message, FileDescriptorProto) else message.nested_type:
        for field in kind.field:
            if field.type_name.startswith(old):
                field.type_name = new + field.type_name[len(old) :]
        _rename(kind, old, new)


class Services:
    """The services of one server.

    Args:
        has_room: Returns True if another connection, with a world of its own, would be accepted.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._serving = True
        self._has_room = has_room
        self._methods: dict[str, Callable[[], SideCall]] = {}
        # Imported on the first request, because the package of reflection imports much.
        self._loaders = {"/grpc.health.": self._load_health, "/grpc.reflection.": self._load_reflection}

    def _load_health(self) -> dict[str, Callable[[], SideCall]]:
        """Make the methods of health."""
        try:
            from grpc_health.v1 import health_pb2
        except ImportError:  # it needs the extra `ops`
            return {}
        self._pb = health_pb2
        methods = {
            f"/{_HEALTH}/Check": lambda: SideCall(self._check, unary=True),
            f"/{_HEALTH}/Watch": lambda: SideCall(self._watch, unary=False, last_words=self._state(serving=False)),
        }
        if hasattr(health_pb2, "HealthListResponse"):  # older versions do not have it
            methods[f"/{_HEALTH}/List"] = lambda: SideCall(self._list, unary=True)
        return methods

    def _load_reflection(self) -> dict[str, Callable[[], SideCall]]:
        """Make the methods of reflection."""
        try:
            from grpc_health.v1 import health_pb2
            from grpc_reflection.v1alpha import reflection, reflection_pb2
        except ImportError:  # it needs the extra `ops`
            return {}
        reflects = "grpc.reflection.v1.ServerReflection"
        # The messages of both versions of reflection are the same; clients ask for v1 first.
        services = (SERVICE, _HEALTH, reflects, reflection.SERVICE_NAME)
        pool = _descriptors(health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        reflector = reflection.ReflectionServicer(services, pool)

        def reflect(data: bytes) -> bytes:
            requests = iter([reflection_pb2.ServerReflectionRequest.FromString(data)])
            call: Any = reflector.ServerReflectionInfo  # a generator, which does not use its context
            return bytes(next(call(requests, None)).SerializeToString())

        return {
            f"/{name}/ServerReflectionInfo": lambda: SideCall(reflect, unary=False)
            for name in (reflects, reflection.SERVICE_NAME)
        }

    def stop(self) -> None:
        """Answer NOT_SERVING from now on."""
        self._serving = False

    def open(self, path: str) -> SideCall | None:
        """Begin a call of a method; None: there is no method at this path."""
        for prefix in [prefix for prefix in self._loaders if path.startswith(prefix)]:
            self._methods.update(self._loaders.pop(prefix)())
        make = self._methods.get(path)
        return None if make is None else make()

    def _state(self, *, serving: bool) -> bytes:
        status = self._pb.HealthCheckResponse
        return bytes(status(status=status.SERVING if serving else status.NOT_SERVING).SerializeToString())

    def _state_of(self, name: str) -> bytes:
        return self._state(serving=self._serving and (name != ROOM or self._has_room()))

    def _check(self, data: bytes) -> bytes:
        name = self._pb.HealthCheckRequest.FromString(data).service
        if name not in _NAMES:
            text = f"expected the service {SERVICE!r}, {ROOM!r}, or '' for the server as a whole, got {name!r:.80}"
            raise RequestError(Code.NOT_FOUND, text)
        return self._state_of(name)

    def _watch(self, data: bytes) -> bytes:
        name = self._pb.HealthCheckRequest.FromString(data).service
        # Watch does not report changes of capacity; clients must poll Check.
        if name in _NAMES and name != ROOM:
            return self._state_of(name)
        status = self._pb.HealthCheckResponse
        return bytes(status(status=status.SERVICE_UNKNOWN).SerializeToString())

    def _list(self, data: bytes) -> bytes:
        del data  # the request is empty
        answer = self._pb.HealthListResponse()
        for service in ("", SERVICE):  # without capacity, because a full server is healthy
            answer.statuses[service].ParseFromString(self._state_of(service))
        return bytes(answer.SerializeToString())
