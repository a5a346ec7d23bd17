"""Properties of a server, read by name."""

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2


def ask(stream, **payload):
    """Send a property request; return its response, or the error's code."""
    body = properties_pb2.PropertyRequest(**payload)
    extension = pb.EnvironmentRequest().extension
    extension.type_url, extension.value = PROPERTY_REQUEST_URL, body.SerializeToString()
    answer = stream.ask(extension=extension)
    if answer.WhichOneof("payload") == "error":
        assert answer.error.message
        return Code(answer.error.code)
    return properties_pb2.PropertyResponse.FromString(answer.extension.value)


def read(stream, key):
    return ask(stream, read_property={"key": key})
