"""Who may change an environment by its methods and attributes: whoever has its world alone. All others only read.

A request to call is served for them as a look, which calls nothing: it gives an attribute's value, or says that the
name is a method's. So they read by whatever request their client sends.
"""

from __future__ import annotations

from bridge.core.encoding.names import CALL_REQUEST_URL, NAMES, PROPERTY_REQUEST_URL
from bridge.core.encoding.properties import PropertyTree
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["as_look", "attribute_in", "no_message", "no_right", "refuse_acting", "refuse_method", "refuse_requests"]

_ATTRIBUTES = "world.attributes"
# Requests of the protocol, in an order that the server keeps. As methods they would go past it, and past recordings.
_REQUESTS = ("reset", "step", "close")


def no_right(name: str) -> RequestError:
    """Return the refusal of a call of a method, or of a write to an attribute."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"{name!r} may not be called or set by who watches, or shares a world with others: they read attributes; use a "
        "world of your own, or have the server started with auth=Auth(shared_control=True)",
    )


def no_message(name: str) -> RequestError:
    """Return the refusal of a message of a feature, or of another package."""
    return RequestError(
        Code.PERMISSION_DENIED,
        f"a message {name!r} is for who plays, and has a world alone: not for who watches, or shares one with others; "
        "use a world of your own",
    )


def refuse_requests(name: str) -> None:
    """Raise PERMISSION_DENIED where a name is that of a request of the protocol, which nobody calls or sets."""
    if name in _REQUESTS:
        text = f"{name!r} is no attribute to call or set; call {name}() of the remote environment"
        raise RequestError(Code.PERMISSION_DENIED, text)


def attribute_in(asked: properties_pb2.PropertyRequest, tree: PropertyTree) -> str | None:
    """Return the name of the environment's attribute that a request reads or writes; None: it does something else."""
    above, _, name = (asked.read_property.key or asked.write_property.key).rpartition(".")
    known = any(family.key == above for family in tree.families)
    return name if above == _ATTRIBUTES and known and name else None


def as_look(request: bridge_pb2.CallRequest) -> bridge_pb2.CallRequest:
    """Return the request that only looks at what another one would call."""
    return bridge_pb2.CallRequest(name=request.name, lanes=request.lanes, look=True)


def refuse_method(request: bridge_pb2.CallRequest, response: bridge_pb2.CallResponse) -> None:
    """Raise PERMISSION_DENIED where a request that was served as a look was to call a method."""
    if response.is_method and not request.look:
        raise no_right(request.name)


def refuse_acting(kind: str, request: pb.EnvironmentRequest, costs: bool, *, shared_control: bool = False) -> None:
    """Raise PERMISSION_DENIED where a request does more than watch; the Steps of a spectator change nothing.

    A call is let through: whoever serves it does so as a look.

    Args:
        kind: Of the request.
        request: The request.
        costs: Whether it is a request for a property that runs code of an environment.
        shared_control: Whether it may set attributes.
    """
    # Steps and Resets are a spectator's: it could join in no other role.
    allowed = kind in ("step", "reset", "leave_world")
    if kind == "join_world":
        role = request.join_world.settings["role"] if "role" in request.join_world.settings else pb.Tensor()
        allowed = list(role.strings.array) == ["spectator"]
    elif kind == "extension" and request.extension.type_url == CALL_REQUEST_URL:
        allowed = True
    elif kind == "extension" and request.extension.type_url == PROPERTY_REQUEST_URL:
        asked = properties_pb2.PropertyRequest.FromString(request.extension.value)
        if asked.WhichOneof("payload") == "write_property":
            allowed = shared_control and asked.write_property.key.startswith(f"{_ATTRIBUTES}.")
        else:
            # Names are many bytes, and of no use to who calls nothing.
            allowed = not costs and asked.read_property.key != NAMES
    if not allowed:
        raise RequestError(
            Code.PERMISSION_DENIED,
            "this token is for watching; to play, or to make or change anything, ask for the other token",
        )
