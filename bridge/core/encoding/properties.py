"""The tree of properties that a server lists, reads and writes (D-18).

Keys are dotted paths: `server.version`, `world.observation_space`. The root is the empty key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bridge.core.encoding import values
from bridge.core.encoding.tensors import Spec, fill_tensor, pack_tensor, unpack_tensor
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2

__all__ = ["ENCODED", "NUMBER", "TEXT", "Family", "Property", "PropertyTree", "encoded", "read_encoded"]

TEXT = "text"
"""A string."""
NUMBER = "number"
"""An int64 scalar."""
ENCODED = "encoded"
"""Any value, as uint8 bytes of the values codec."""


@dataclasses.dataclass(frozen=True)
class Property:
    """A named value that clients can read or write.

    Examples:
        >>> from bridge import Property
        >>> Property("server.messages.note.count", "number", "how many notes have come", lambda: 0).read()
        0
    """

    key: str
    """The dotted path."""
    kind: str
    """`"text"`: a string; `"number"`: an integer of 64 bits; `"encoded"`: any value that an info may have."""
    description: str
    """The description, in one sentence."""
    read: Callable[[], Any] | None = None
    """Returns the value; None: the property cannot be read."""
    write: Callable[[Any], None] | None = None
    """Sets the value; None: the property cannot be written."""
    in_environment: bool = False
    """True if code of the environment computes it, which must run in the environment's own thread."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Leaves of any name below one key, such as the attributes of an environment."""

    key: str
    """The dotted path above them."""
    description: str
    """The description of the leaves, in one sentence."""
    read: Callable[[str], Any]
    """Returns the value of the leaf with a name."""
    write: Callable[[str, Any], None]
    """Sets the value of the leaf with a name."""
    names: Callable[[], Iterable[str]]
    """Returns the names to list; there may be other leaves."""
    find: Callable[[str], None]
    """Raises RequestError if there is no leaf with a name."""
    in_environment: bool = False
    """See `Property.in_environment`."""


class PropertyTree:
    """Properties by key. Inner nodes follow from the keys."""

    def __init__(self, leaves: Iterable[Property] = (), families: Iterable[Family] = ()) -> None:
        self._leaves = {leaf.key: leaf for leaf in leaves}
        self._families = {family.key: family for family in families}

    @property
    def leaves(self) -> tuple[Property, ...]:
        """Every leaf."""
        return tuple(self._leaves.values())

    @property
    def families(self) -> tuple[Family, ...]:
        """All families of leaves."""
        return tuple(self._families.values())

    def get(self, key: str) -> Any:
        """Return the value of a leaf that can be read without the environment; None: there is no such leaf."""
        leaf = self._leaves.get(key)
        return None if leaf is None or leaf.read is None else leaf.read()

    def merged(self, other: PropertyTree) -> PropertyTree:
        """Return a tree with the properties of both trees."""
        return PropertyTree((*self.leaves, *other.leaves), (*self.families, *other.families))

    def runs_environment(self, request: properties_pb2.PropertyRequest) -> bool:
        """True if a request runs code of the environment; `answer` must then be called in the environment's thread."""
        kind = request.WhichOneof("payload")
        key: str = "" if kind is None else getattr(request, kind).key
        member = self._member(key)
        if member is not None:
            return member[0].in_environment
        if kind == "list_property":
            return key in self._families and self._families[key].in_environment
        return key in self._leaves and self._leaves[key].in_environment

    def answer(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer one request.

        Raises:
            RequestError: NOT_FOUND for an unknown key, PERMISSION_DENIED for an operation that the key does not allow,
                INVALID_ARGUMENT for a bad value or an empty request.
        """
        response = properties_pb2.PropertyResponse()
        kind = request.WhichOneof("payload")
        if kind == "read_property":
            response.read_property.value.CopyFrom(self.read(request.read_property.key))
        elif kind == "write_property":
            self.write(request.write_property.key, request.write_property.value)
            # An empty answer must still set its member, because the member tells the kind of answer.
            response.write_property.SetInParent()
        elif kind == "list_property":
            response.list_property.SetInParent()
            response.list_property.values.extend(self.list(request.list_property.key))
        else:
            raise RequestError(
                Code.INVALID_ARGUMENT, "expected a property request to read, write or list; got an empty one"
            )
        return response

    def list(self, key: str) -> list[properties_pb2.PropertySpec]:
        """Describe the children of a node."""
        if (member := self._member(key)) is not None:
            family, name = member
            family.find(name)
        if member is not None or key in self._leaves:
            raise RequestError(Code.PERMISSION_DENIED, f"the property {key!r} has no children to list; read it")
        prefix = f"{key}." if key else ""
        # A dict keeps the order, and lists each child once, even with many leaves below it.
        names: dict[str, None] = {}
        for path in (*self._leaves, *self._families):
            if path.startswith(prefix):
                names.setdefault(prefix + path[len(prefix) :].split(".")[0])
        if key in self._families:
            names.update(dict.fromkeys(f"{prefix}{name}" for name in self._families[key].names()))
        elif not names:
            raise self._unknown(key)
        return [self._describe(name) for name in names]

    def read(self, key: str) -> pb.Tensor:
        """Return the value of a leaf."""
        leaf = self._find(key)
        if leaf.read is None:
            raise RequestError(Code.PERMISSION_DENIED, f"the property {key!r} cannot be read, only listed")
        value = leaf.read()
        try:
            if leaf.kind == ENCODED:
                return encoded(value)
            return pack_tensor(value, np.int64 if leaf.kind == NUMBER else None)
        except TensorError as error:
            raise RequestError(
                Code.INTERNAL, f"the property {key!r} has a value that cannot be sent: {error}"
            ) from error

    def write(self, key: str, tensor: pb.Tensor) -> None:
        """Set the value of a leaf."""
        leaf = self._find(key)
        if leaf.write is None:
            raise RequestError(Code.PERMISSION_DENIED, f"the property {key!r} cannot be written")
        try:
            value = read_encoded(tensor) if leaf.kind == ENCODED else unpack_tensor(tensor, key)[()]
            expected = {TEXT: str, NUMBER: np.integer}.get(leaf.kind)
            if expected is not None and not isinstance(value, expected):
                raise TensorError(f"expected a scalar {leaf.kind}, got {value!r:.80}")
        except TensorError as error:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"the property {key!r} cannot take this value: {error}"
            ) from error
        leaf.write(value)

    def _member(self, key: str) -> tuple[Family, str] | None:
        above, _, name = key.rpartition(".")
        family = self._families.get(above)
        return (family, name) if family is not None and name else None

    def _leaf(self, key: str) -> Property | None:
        if key in self._leaves:
            return self._leaves[key]
        if (member := self._member(key)) is None:
            return None
        family, name = member
        return Property(
            key, ENCODED, family.description, lambda: family.read(name), lambda value: family.write(name, value)
        )

    def _find(self, key: str) -> Property:
        if (leaf := self._leaf(key)) is not None:
            return leaf
        # Inner nodes exist but can be neither read nor written: the answer is PERMISSION_DENIED, not NOT_FOUND (D-18).
        if any(path == key or path.startswith(f"{key}.") for path in (*self._leaves, *self._families)) or not key:
            return Property(key, TEXT, "")
        raise self._unknown(key)

    def _unknown(self, key: str) -> RequestError:
        known = ", ".join([*self._leaves, *(f"{family}.NAME" for family in self._families)])
        return RequestError(Code.NOT_FOUND, f"there is no property {key!r}; there are {known}")

    def _describe(self, key: str) -> properties_pb2.PropertySpec:
        if (leaf := self._leaf(key)) is None:
            family = self._families.get(key)
            text = family.description if family else ""
            spec = Spec.text(key, ()).to_proto()
            return properties_pb2.PropertySpec(spec=spec, is_listable=True, description=text)
        if leaf.kind == TEXT:
            spec = Spec.text(key, ()).to_proto()
        elif leaf.kind == NUMBER:
            spec = Spec.number(key, (), np.int64).to_proto()
        else:
            spec = Spec.number(key, (-1,), np.uint8).to_proto()
        return properties_pb2.PropertySpec(
            spec=spec,
            is_readable=leaf.read is not None,
            is_writable=leaf.write is not None,
            description=leaf.description,
        )


def encoded(value: Any) -> pb.Tensor:
    """Encode the value of a property as uint8 bytes of the values codec.

    The encoding also tells the reader that this version of the package can read columns.

    Raises:
        TensorError: The codec cannot carry the value.
    """
    message = values.to_value(value)
    message.reads_columns = True
    tensor = pb.Tensor()
    fill_tensor(tensor, np.frombuffer(message.SerializeToString(), np.uint8))
    return tensor


def read_encoded(tensor: pb.Tensor) -> Any:
    """Decode a value that travels as uint8 bytes of the values codec.

    Raises:
        TensorError: The tensor holds something else.
    """
    array = unpack_tensor(tensor)
    if array.dtype != np.uint8:
        raise TensorError(f"expected uint8 bytes of the values codec, got {array.dtype} of shape {list(array.shape)}")
    return values.decode(array.tobytes())
