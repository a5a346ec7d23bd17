"""Convert NumPy arrays to dm_env_rpc tensors and back, and check them against specs.

Where the wire format allows it, numbers are copied from an array's buffer into the message without a Python list:
packed floats, doubles and bools are their little-endian bytes, int8 and uint8 are `bytes` fields, and integers from 0
to 127 are varints of one byte. No cast loses anything silently (D-19).

`TensorSpace` is for tensors of third-party servers that no Gymnasium space describes (D-24): numbers with a variable
dimension that is not the first, text in two dimensions or more, protobuf messages.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf import any_pb2
from google.protobuf.message import Message
from gymnasium import Space

from bridge.errors import TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "FEW",
    "WIRE_DTYPES",
    "Array",
    "Spec",
    "TensorSpace",
    "cast",
    "fill_tensor",
    "pack_tensor",
    "pack_varint",
    "to_array",
    "unpack_tensor",
    "wire_dtype",
]

Array: TypeAlias = npt.NDArray[Any]

# Payload member, data type and NumPy dtype of all numeric types. Strings and protos are object arrays.
_NUMBERS: tuple[tuple[str, int, str], ...] = (
    ("floats", pb.FLOAT, "<f4"),
    ("doubles", pb.DOUBLE, "<f8"),
    ("int8s", pb.INT8, "i1"),
    ("int32s", pb.INT32, "<i4"),
    ("int64s", pb.INT64, "<i8"),
    ("uint8s", pb.UINT8, "u1"),
    ("uint32s", pb.UINT32, "<u4"),
    ("uint64s", pb.UINT64, "<u8"),
    ("bools", pb.BOOL, "?"),
)
_OBJECT = np.dtype(object)
_MEMBER_OF_DTYPE: dict[np.dtype[Any], str] = {np.dtype(code): member for member, _, code in _NUMBERS}
_DTYPE_OF_MEMBER: dict[str, np.dtype[Any]] = {member: np.dtype(code) for member, _, code in _NUMBERS}
_MEMBER_OF_TYPE: dict[int, str] = {
    **{number: member for member, number, _ in _NUMBERS},
    pb.STRING: "strings",
    pb.PROTO: "protos",
}
_TYPE_OF_DTYPE: dict[np.dtype[Any], int] = {np.dtype(code): number for _, number, code in _NUMBERS}
_BYTES = frozenset({"int8s", "uint8s"})
# Packed fields of these are the bytes of the array. Copying 28,000 floats as bytes takes 0.01 ms, as a list 0.7 ms.
_BUFFERS = frozenset({"floats", "doubles", "bools"})
# Dtypes that travel in a wider dtype, and are restored exactly.
_WIDENED = {np.dtype("f2"): np.dtype("<f4"), np.dtype("i2"): np.dtype("<i4"), np.dtype("u2"): np.dtype("<u4")}
FEW = 256
"""For up to this many elements a Python list is faster than NumPy, whose functions take longer to start."""
# The limit of memory that a message of a few bytes may claim.
_MAX_BROADCAST = 512 * 1024 * 1024
_MAX_DIMENSIONS = 32  # the limit of the oldest supported NumPy
# TensorSpec.Value has no member for bools.
_RANGED = frozenset(member for member, _, _ in _NUMBERS) - {"bools"}

WIRE_DTYPES: tuple[np.dtype[Any], ...] = tuple(_MEMBER_OF_DTYPE)
"""The dtypes that travel unchanged."""


def wire_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype in which `dtype` travels: itself, or a wider one for float16, int16 and uint16.

    Raises:
        TensorError: No tensor can hold it (complex numbers, extended precision, dates, records).
    """
    plain: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    plain = _WIDENED.get(plain, plain)
    if plain in _MEMBER_OF_DTYPE:
        return plain
    known = ", ".join(str(known) for known in (*_MEMBER_OF_DTYPE, *_WIDENED))
    raise TensorError(f"the dtype {np.dtype(dtype)} cannot be sent; expected one of {known}")


def cast(value: Any, dtype: npt.DTypeLike | None, *, rounding: bool = False) -> Array:
    """Return `value` as an array of `dtype`; raise TensorError if the conversion would change a value.

    Args:
        value: Anything that NumPy can convert to an array.
        dtype: The dtype wanted.
        rounding: Whether a float may be rounded to a narrower float, though never to infinity.

    Raises:
        TensorError: A number does not fit (300 in uint8), would lose its fraction (1.7 in int64) or digits.
    """
    wanted = np.dtype(dtype)
    array = to_array(value)
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "biuf" or wanted.kind not in "biuf":
        got = f"an array of {array.dtype}" if isinstance(value, np.ndarray) else f"{type(value).__name__} {value!r:.80}"
        raise TensorError(f"expected numbers for {wanted}, got {got}")
    # NumPy calls int64 to float64 safe, although it drops digits beyond 2**53.
    wide_integer = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    if np.can_cast(array.dtype, wanted, "safe") and not (wide_integer and wanted.kind == "f"):
        return array.astype(wanted)
    # NumPy warns of casts that overflow. The result is compared below instead.
    with np.errstate(all="ignore"):
        result = array.astype(wanted)
        if rounding and array.dtype.kind == wanted.kind == "f":
            same = np.isfinite(result) | ~np.isfinite(array)
        else:
            # Compared in both dtypes, because float64 beside int64 is compared as float64, which hides a lost digit.
            same = (result == array) & (result.astype(array.dtype) == array)
            if array.dtype.kind in "iu" and wanted.kind in "iu":
                # -1 becomes 2**64 - 1 as uint64, and comes back as -1.
                same &= (result < 0) == (array < 0)
            # The result for a float beyond an integer's range depends on the processor; 2**63 may become 2**63 - 1.
            if array.dtype.kind == "f" and wanted.kind in "iu":
                same &= (array >= float(np.iinfo(wanted).min)) & (array < float(np.iinfo(wanted).max) + 1.0)
            if array.dtype.kind in "iu" and wanted.kind == "f":
                same &= result < float(np.iinfo(array.dtype).max) + 1.0
            if wanted.kind == "f" and array.dtype.kind == "f":
                # NaN is not equal to itself.
                same |= np.isnan(result) & np.isnan(array)
    if not same.all():
        bad = array.ravel()[np.flatnonzero(~np.ravel(same))[0]]
        raise TensorError(
            f"{bad!s} ({array.dtype}) does not fit {wanted} without loss; pass a value that {wanted} holds"
        )
    return result


def to_array(value: Any) -> Array:
    """Make an array; refuse values that NumPy would change, such as `[1, "a"]` or `[2**53 + 1, 0.5]`."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TensorError(f"expected a regular array, got a ragged {type(value).__name__}: {error}") from error
    if isinstance(value, (list, tuple)) and array.dtype.kind in "fU":
        # Nothing was converted, so the numbers need no check.
        if all(isinstance(item, np.ndarray) and item.dtype == array.dtype for item in value):
            return array
        for item in np.asarray(value, dtype=object).flat:
            if array.dtype.kind == "U" and not isinstance(item, str):
                raise TensorError(
                    f"expected a list of one type, got one of text and {type(item).__name__} {item!r:.80}"
                )
            if isinstance(item, (int, np.integer)) and int(item) != int(float(item)):
                raise TensorError(
                    f"{item} beside floats does not fit {array.dtype} without loss; pass it in another list"
                )
    return array


def pack_varint(number: int) -> bytes:
    """Return a non-negative number as a varint of Protocol Buffers."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _fill_payload(payload: Any, member: str, array: Array) -> None:
    """Put the elements of an array of a wire dtype into a `…Array` message."""
    if member in _BYTES:
        payload.array = array.tobytes()
        return
    if member in _BUFFERS:
        data = array.tobytes()
    elif array.size > 16 and array.min() >= 0 and array.max() < 128:
        # Varints of one byte are the bytes of the numbers. For few numbers the list is faster than NumPy.
        data = array.astype(np.uint8).tobytes()
    else:
        payload.array.extend(array.ravel().tolist())
        return
    if data:
        # The field `array` (1) as on the wire: protobuf copies it in one call, without a Python object for each
        # number.
        payload.MergeFromString(b"\x0a" + pack_varint(len(data)) + data)


def fill_tensor(tensor: pb.Tensor, array: Array) -> None:
    """Write an array of a wire dtype, or an object array of strings or messages, into an empty tensor message.

    Raises:
        TensorError: The dtype cannot travel unchanged.
    """
    member = _MEMBER_OF_DTYPE.get(array.dtype)
    if member is None:
        _fill_other(tensor, array)
        return
    payload = getattr(tensor, member)
    # Without elements the member of the oneof must still be set: otherwise the tensor is empty.
    if array.size == 0:
        payload.SetInParent()
    _fill_payload(payload, member, array)
    if array.ndim:
        tensor.shape.extend(array.shape)


def _fill_other(tensor: pb.Tensor, array: Array) -> None:
    if array.dtype.kind == "U":
        array = array.astype(object)
    if array.dtype != _OBJECT:
        fill_tensor(tensor, array.astype(wire_dtype(array.dtype)))
        return
    items = array.ravel().tolist()
    if all(isinstance(item, str) for item in items):
        tensor.strings.SetInParent()
        try:
            tensor.strings.array.extend(items)
        except (UnicodeEncodeError, ValueError) as error:
            raise TensorError(f"expected text that UTF-8 can encode, got {items!r:.120}: {error}") from error
    else:
        tensor.protos.SetInParent()
        for item in items:
            if not hasattr(item, "DESCRIPTOR"):
                raise TensorError(f"expected numbers, strings or protobuf messages, got a {type(item).__name__}")
            entry = tensor.protos.array.add()
            # An Any, as servers send them, is sent back unchanged, not inside another Any.
            if item.DESCRIPTOR.full_name == "google.protobuf.Any":
                entry.CopyFrom(item)
            else:
                entry.Pack(item)
    tensor.shape.extend(array.shape)


def pack_tensor(value: Any, dtype: npt.DTypeLike | None = None) -> pb.Tensor:
    """Make a tensor from a number, a string, a protobuf message, or an array or nested list of them.

    Args:
        value: The value. Python's own int, float and bool travel as int64, float64 and bool.
        dtype: The dtype to send it in, by a cast that loses nothing.

    Raises:
        TensorError: The value is ragged, of a type that no tensor holds, or does not fit `dtype`.
    """
    tensor = pb.Tensor()
    if dtype is not None:
        fill_tensor(tensor, cast(value, dtype))
        return tensor
    if isinstance(value, str) or hasattr(value, "DESCRIPTOR"):
        # NumPy's own text dtype would cut off trailing NULs.
        array = np.empty((), dtype=object)
        array[()] = value
    else:
        array = to_array(value)
    fill_tensor(tensor, array)
    return tensor


def _elements(message: Any, member: str) -> Array:
    """Read the elements of a payload as a flat array. For int8 and uint8 it is the message's own memory, read-only."""
    payload = getattr(message, member)
    dtype = _DTYPE_OF_MEMBER.get(member)
    if dtype is None:
        array = np.empty(len(payload.array), dtype=object)
        array[:] = list(payload.array)
        return array
    if member in _BYTES:
        return np.frombuffer(payload.array, dtype)
    count = len(payload.array)
    # `fromiter` is several times faster for a few elements, and slower from about forty on.
    return np.fromiter(payload.array, dtype, count) if count < 24 else np.array(payload.array, dtype)


def _check_dimensions(shape: tuple[int, ...], where: str) -> None:
    """Raise TensorError if a shape has too many dimensions: their product could take hours, and fill a message."""
    if len(shape) > _MAX_DIMENSIONS:
        raise TensorError(f"{where}: expected at most {_MAX_DIMENSIONS} dimensions, got {len(shape)}")


def _shaped(flat: Array, shape: tuple[int, ...], name: str) -> Array:
    """Give a flat array its shape: infer a variable dimension, broadcast a single element. The result is writable."""
    where = f"tensor {name!r}" if name else "tensor"
    _check_dimensions(shape, where)
    count = flat.size
    negative = [axis for axis, size in enumerate(shape) if size < 0]
    if len(negative) > 1:
        raise TensorError(
            f"{where}: the shape {list(shape)} has {len(negative)} variable dimensions; at most one is allowed"
        )
    if negative:
        rest = math.prod(size for size in shape if size >= 0)
        if (rest and count % rest) or (not rest and count):
            raise TensorError(f"{where}: {count} elements do not fill the shape {list(shape)}")
        axis = negative[0]
        shape = (*shape[:axis], count // rest if rest else 0, *shape[axis + 1 :])
    needed = math.prod(shape)
    if count != needed:
        if count == 1 and needed:
            # D-11 allows this, but the peer can declare a shape of any size in a few bytes.
            if needed * flat.itemsize > _MAX_BROADCAST:
                raise TensorError(
                    f"{where}: a single element for the shape {list(shape)} would fill {needed * flat.itemsize} bytes; "
                    f"at most {_MAX_BROADCAST} are allowed"
                )
            return np.full(shape, flat[0], flat.dtype)
        expected = "exactly one element" if not shape else f"{needed} elements (or one, to fill it)"
        raise TensorError(f"{where}: the shape {list(shape)} needs {expected}, got {count}")
    array = flat.reshape(shape)
    # int8 and uint8 arrays share the message's bytes and are read-only. All other arrays are writable.
    return array if array.flags.writeable else array.copy()


def unpack_tensor(tensor: pb.Tensor, name: str = "") -> Array:
    """Read a tensor into a writable array that shares no memory with the message.

    Args:
        tensor: The message.
        name: The tensor's name in errors.

    Returns:
        An array of the tensor's shape (`()` for a scalar) and dtype; strings and protos as an object array.

    Raises:
        TensorError: The tensor is empty, or its elements do not fill its shape.
    """
    member = tensor.WhichOneof("payload")
    if member is None:
        raise TensorError(f"tensor {name!r} holds nothing: none of its payload members is set")
    return _shaped(_elements(tensor, member), tuple(tensor.shape), name)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The name, dtype, shape and bounds of one tensor of an action or observation."""

    name: str
    """Unique among the actions or among the observations; a `.` separates levels of nesting."""
    shape: tuple[int, ...]
    """The shape. One dimension may be -1: its length varies."""
    dtype: np.dtype[Any]
    """The dtype on the wire; object for strings and protos."""
    data_type: int
    """The `DataType` on the wire."""
    minimum: Array | None = None
    """Inclusive lower bounds of shape `()` or `shape`; None: none."""
    maximum: Array | None = None
    """Inclusive upper bounds of shape `()` or `shape`; None: none."""

    @classmethod
    def number(
        cls,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        low: Array | None = None,
        high: Array | None = None,
    ) -> Spec:
        """Make a spec of numbers. Bounds have shape `()` or `shape`; useless ones are dropped (D-20)."""
        wire = wire_dtype(dtype)
        return cls(name, shape, wire, _TYPE_OF_DTYPE[wire], _bound(low, wire, -1), _bound(high, wire, 1))

    @classmethod
    def text(cls, name: str, shape: tuple[int, ...]) -> Spec:
        """Make the spec of strings."""
        return cls(name, shape, _OBJECT, pb.STRING)

    @classmethod
    def from_proto(cls, message: pb.TensorSpec) -> Spec:
        """Read a spec.

        Raises:
            TensorError: The data type is unknown, or a bound does not fit the shape or type.
        """
        member = _MEMBER_OF_TYPE.get(message.dtype)
        if member is None:
            raise TensorError(f"the spec {message.name!r} has the unknown data type {message.dtype}")
        shape = tuple(message.shape)
        _check_dimensions(shape, f"the spec {message.name!r}")
        if sum(size < 0 for size in shape) > 1:
            raise TensorError(f"the spec {message.name!r} has more than one variable dimension: {list(shape)}")
        dtype = _DTYPE_OF_MEMBER.get(member, _OBJECT)
        bounds = [_read_bound(message, side, member, shape) for side in ("min", "max")]
        return cls(message.name, shape, dtype, message.dtype, *bounds)

    def to_proto(self) -> pb.TensorSpec:
        """Return the message."""
        message = pb.TensorSpec(name=self.name, shape=self.shape, dtype=pb.DataType.Name(self.data_type))
        member = _MEMBER_OF_TYPE[self.data_type]
        for side, bound in (("min", self.minimum), ("max", self.maximum)):
            if bound is not None:
                payload = getattr(getattr(message, side), member)
                payload.SetInParent()
                _fill_payload(payload, member, bound)
        return message

    def batched(self, lanes: int) -> Spec:
        """Return the spec of the same tensor with a leading dimension of `lanes`."""
        bounds = [
            None if b is None else np.broadcast_to(b, (lanes, *b.shape)) if b.ndim else b
            for b in (self.minimum, self.maximum)
        ]
        return dataclasses.replace(self, shape=(lanes, *self.shape), minimum=bounds[0], maximum=bounds[1])

    def describe(self) -> str:
        """Return a line that says what is expected, for errors."""
        parts = [f"{pb.DataType.Name(self.data_type)} of shape {list(self.shape)}"]
        if self.minimum is not None:
            parts.append(f"min {_short(self.minimum)}")
        if self.maximum is not None:
            parts.append(f"max {_short(self.maximum)}")
        return ", ".join(parts)

    def read(self, tensor: pb.Tensor) -> Array:
        """Read a tensor of this spec's type and shape. `check_range` checks the range.

        Returns:
            A writable array of this spec's shape and dtype.

        Raises:
            TensorError: The tensor has another data type, or a shape that does not fit (D-11).
        """
        member = _MEMBER_OF_TYPE[self.data_type]
        if tensor.WhichOneof("payload") != member:
            got = tensor.WhichOneof("payload") or "nothing"
            raise TensorError(f"{self.name!r}: expected {self.describe()}, got a tensor that holds {got}")
        flat = _elements(tensor, member)
        shape = tuple(tensor.shape)
        # The usual case. The other branch is for variable dimensions, for a single element that fills the shape, and
        # for no elements, which a tensor can have if another dimension is 0.
        if shape == self.shape and flat.size == math.prod(shape) > 0:
            array = flat.reshape(shape)
            if not array.flags.writeable:
                array = array.copy()
        else:
            # Checked before a single element is broadcast: the shape may be of any size.
            fits = min(shape, default=0) < 0 or self.fits(shape)
            array = _shaped(flat, shape, self.name) if fits else flat
            if not fits or not self.fits(array.shape):
                raise TensorError(f"{self.name!r}: expected {self.describe()}, got the shape {list(shape)!r:.200}")
        return array

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor may have this shape."""
        return len(shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, shape, strict=True)
        )

    def check_range(self, array: Array) -> None:
        """Raise TensorError if an element is below the minimum, above the maximum, or NaN where a bound is set."""
        # The usual case for the actions of lanes: Python finds the extremes of so few integers faster than NumPy.
        if array.ndim and 0 < array.size <= FEW and array.dtype.kind in "iu":
            low, high, elements = self.minimum, self.maximum, array.ravel().tolist()
            if (low is None or (not low.ndim and min(elements) >= low.item())) and (
                high is None or (not high.ndim and max(elements) <= high.item())
            ):
                return
        for bound, holds, extreme, side in (
            (self.minimum, operator.ge, np.minimum.reduce, ", which is below the minimum"),
            (self.maximum, operator.le, np.maximum.reduce, ", which is above the maximum"),
        ):
            if bound is not None:
                # For a single number Python's comparison is many times faster than NumPy's.
                if not array.ndim and not bound.ndim and holds(array.item(), bound.item()):
                    continue
                # One pass over the elements, without an array of bools. A NaN becomes the extreme and fails the test.
                if array.size and not bound.ndim and holds(extreme(array, axis=None), bound):
                    continue
                inside = holds(array, bound)
                if not inside.all():
                    bad = np.broadcast_to(array, inside.shape)[~inside].ravel()[0]
                    text = f"{self.name!r}: expected {self.describe()}, got {bad}"
                    raise TensorError(text + side if bad == bad else text)  # NaN is on neither side


def _short(bound: Array) -> str:
    text = np.array2string(bound, threshold=8, edgeitems=2, separator=", ")
    return " ".join(text.split())


def _bound(bound: Array | None, dtype: np.dtype[Any], sign: int) -> Array | None:
    """Return a bound in the wire's dtype: a scalar if uniform, None if it excludes nothing (D-20)."""
    # Bools have no bounds on the wire.
    if bound is None or dtype.kind == "b":
        return None
    array = cast(bound, dtype)
    if array.size and (array == array.flat[0]).all():
        array = array.reshape(-1)[:1].reshape(())
    elif not array.size:
        return None
    # If only some elements are unbounded, keep the infinite bounds: the wire has one bound, or one for each element.
    limit = sign * math.inf if dtype.kind == "f" else np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min
    return None if (array == limit).all() else array


def _read_bound(message: pb.TensorSpec, side: str, member: str, shape: tuple[int, ...]) -> Array | None:
    if not message.HasField(side):
        return None
    value = getattr(message, side)
    got = value.WhichOneof("payload")
    if got is None:
        return None
    if got != member or member not in _RANGED:
        raise TensorError(f"the spec {message.name!r} is of {member}, but its {side} is of {got}")
    flat = _elements(value, member)
    # The bounds are copied below: `flat` may share the message's bytes, and bounds outlive the message.
    if flat.size == 1:
        return np.array(flat.reshape(()))
    # With a variable dimension only scalar bounds are allowed (D-20).
    if -1 in shape or flat.size != math.prod(shape):
        raise TensorError(f"the spec {message.name!r} of shape {list(shape)} has a {side} of {flat.size} elements")
    return np.array(flat.reshape(shape))


_MOST = 8  # most items along a variable dimension of a sample


class TensorSpace(Space[Any]):
    """The tensors that a TensorSpec allows.

    Elements are arrays of the spec's shape, in which one dimension may have any length. Their dtype is the spec's for
    numbers, and object for text and protobuf messages. A message arrives as a `google.protobuf.Any`, and is sent as
    one. An element of shape `()` is the string or message itself.

    Args:
        spec: The server's spec.
        seed: The seed for `sample`.
    """

    def __init__(self, spec: Spec, seed: int | np.random.Generator | None = None) -> None:
        self.spec = spec
        super().__init__(None if -1 in spec.shape else spec.shape, spec.dtype, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: the length is not fixed."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Return a random element: numbers within the range, empty strings, empty messages."""
        shape = tuple(int(self.np_random.integers(0, _MOST + 1)) if size < 0 else size for size in self.spec.shape)
        if self.spec.data_type == pb.STRING:
            return self.element(np.full(shape, "", object))
        if self.spec.data_type == pb.PROTO:
            messages = np.empty(shape, object)
            for index in np.ndindex(shape):
                messages[index] = any_pb2.Any()
            return self.element(messages)
        low = 0.0 if self.spec.minimum is None else self.spec.minimum
        high = low + np.asarray(1) if self.spec.maximum is None else self.spec.maximum
        return self.np_random.uniform(low, high, shape).astype(self.spec.dtype)

    def element(self, array: Array) -> Any:
        """Return the element from a tensor's array."""
        return array[()] if array.dtype == object and array.shape == () else array

    def to_array(self, element: Any, *, rounding: bool = False) -> Array:
        """Return the array of an element.

        Raises:
            TensorError: The element has another shape or type, or is out of range.
        """
        if self.spec.dtype == object:
            array = np.empty((), object)
            if isinstance(element, (str, Message)):
                array[()] = element
            else:
                array = np.asarray(element, object)
            kind: Any = str if self.spec.data_type == pb.STRING else Message
            if not all(isinstance(item, kind) for item in array.ravel()):
                raise TensorError(f"expected {self.spec.describe()}, got {element!r:.80}")
        else:
            array = cast(element, self.spec.dtype, rounding=rounding)
        if not self.spec.fits(array.shape):
            raise TensorError(f"expected {self.spec.describe()}, got the shape {list(array.shape)}")
        self.spec.check_range(array)
        return array

    def contains(self, x: Any) -> bool:
        """True if `x` is an element of the space."""
        try:
            self.to_array(x, rounding=True)
        except (TensorError, ValueError, TypeError):
            return False
        return True

    def __repr__(self) -> str:
        return f"TensorSpace({self.spec.describe()})"

    def __eq__(self, other: object) -> bool:
        # Compare messages: comparing specs whose bounds are arrays gives no single truth value.
        return isinstance(other, TensorSpace) and self.spec.to_proto() == other.spec.to_proto()
