"""Requests that travel in `EnvironmentRequest.extension`, and the contents of their answers; refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bridge.core.encoding import values
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.properties import read_encoded
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, EnvironmentFailedError, PeerError, RefusedError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "attribute_write",
    "call_request",
    "call_results",
    "extension",
    "is_method",
    "looked_up",
    "property_request",
    "property_value",
    "property_write",
    "reads_columns",
    "refusal",
]


def extension(url: str, body: Any) -> pb.EnvironmentRequest:
    """Return a request with a message of an extension."""
    request = pb.EnvironmentRequest()
    request.extension.type_url = url
    request.extension.value = body.SerializeToString()
    return request


def property_request(key: str) -> pb.EnvironmentRequest:
    """Return the request for a property's value."""
    body = properties_pb2.PropertyRequest(read_property=properties_pb2.ReadPropertyRequest(key=key))
    return extension(PROPERTY_REQUEST_URL, body)


def property_write(key: str, value: pb.Tensor) -> pb.EnvironmentRequest:
    """Return the request that sets a property."""
    body = properties_pb2.PropertyRequest(write_property=properties_pb2.WritePropertyRequest(key=key, value=value))
    return extension(PROPERTY_REQUEST_URL, body)


def attribute_write(name: str, values_of_lanes: Sequence[Any], *, columns: bool = False) -> pb.EnvironmentRequest:
    """Return the request that sets an attribute of the environment, with one value per lane.

    Args:
        name: The name of the attribute.
        values_of_lanes: The values.
        columns: True if the server can read columns.
    """
    packed = pack_tensor(np.frombuffer(values.encode(list(values_of_lanes), columns=columns), np.uint8))
    return property_write(f"world.attributes.{name}", packed)


def call_request(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lanes: Sequence[int] = (),
    *,
    look: bool = False,
    columns: bool = False,
) -> pb.EnvironmentRequest:
    """Return the request that calls a method.

    Args:
        name: The name of the method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        lanes: The lanes to call it on; empty: all lanes.
        look: True: call nothing, but return the values of an attribute, or whether it is a method.
        columns: True if the server can read columns.
    """
    named = [values.to_value(item, columns=columns) for item in kwargs.values()]
    body = bridge_pb2.CallRequest(
        name=name,
        args=bridge_pb2.Value.List(items=[values.to_value(item, columns=columns) for item in args]),
        kwargs=bridge_pb2.Value.Dict(keys=list(kwargs), values=named),
        lanes=lanes,
        look=look,
    )
    return extension(CALL_REQUEST_URL, body)


def reads_columns(message: pb.EnvironmentResponse, url: str) -> bool:
    """True if a server can read columns, given its answer to a `property_request` of the values codec.

    Raises:
        PeerError: The answer cannot be read.
    """
    try:
        tensor = properties_pb2.PropertyResponse.FromString(message.extension.value).read_property.value
        return bool(bridge_pb2.Value.FromString(tensor.uint8s.array).reads_columns)
    except DecodeError as error:
        raise PeerError(url, f"its property cannot be read: {error}") from error


def property_value(message: pb.EnvironmentResponse, url: str, encoded: bool) -> Any:
    """Return the value in the answer to a `property_request`.

    Args:
        message: The answer.
        url: The server's URL, for the error.
        encoded: True if the value is encoded by the values codec.

    Raises:
        PeerError: The answer cannot be read.
    """
    try:
        tensor = properties_pb2.PropertyResponse.FromString(message.extension.value).read_property.value
        return read_encoded(tensor) if encoded else unpack_tensor(tensor)[()]
    except (DecodeError, TensorError) as error:
        raise PeerError(url, f"its property cannot be read: {error}") from error


def looked_up(message: pb.EnvironmentResponse, url: str) -> tuple[Any, bool]:
    """Return the value of an attribute from a look-up, and whether it is a method, which has no value.

    Raises:
        PeerError: The answer cannot be read.
    """
    if is_method(message, url):
        return None, True
    results = call_results(message, url)
    if not results:
        raise PeerError(url, "it answers with neither the value of an attribute nor that it is a method")
    return results[0], False


def is_method(message: pb.EnvironmentResponse, url: str) -> bool:
    """True if the name in a look-up is a method's.

    Raises:
        PeerError: The answer cannot be read.
    """
    try:
        return bool(bridge_pb2.CallResponse.FromString(message.extension.value).is_method)
    except DecodeError as error:
        raise PeerError(url, f"the result of a call cannot be read: {error}") from error


def call_results(message: pb.EnvironmentResponse, url: str, count: int | None = None) -> list[Any]:
    """Return the results of a method call, one per lane.

    Args:
        message: The answer.
        url: The server's URL, for the error.
        count: The number of lanes; None: any number of results is valid.

    Raises:
        PeerError: The results cannot be read, or their number is wrong.
    """
    try:
        response = bridge_pb2.CallResponse.FromString(message.extension.value)
        results = [values.from_value(result) for result in response.results]
    except (TensorError, DecodeError, ValueError) as error:
        raise PeerError(url, f"the result of a call cannot be read: {error}") from error
    if count is not None and len(results) != count:
        raise PeerError(url, f"expected a call to have a result for each of {count} lanes, got {len(results)}")
    return results


def refusal(url: str, status: pb.Status) -> RefusedError:
    """Return the error for an answer with a status. INTERNAL means that the environment raised."""
    # D-2: a server answers INTERNAL, with the traceback, if the environment raised.
    kind = EnvironmentFailedError if status.code == Code.INTERNAL else RefusedError
    return kind(url, status.message or "no message", status.code)
