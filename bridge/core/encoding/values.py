"""The values codec, which encodes infos, reset options, keyword arguments and results.

It preserves exactly: None, bool, int, float, complex, str, bytes, NumPy scalars and arrays of any fixed-size dtype (and
object arrays of such values), lists, tuples, sets and dicts. An Enum travels as its value, a dataclass as a dict of its
fields, an instance of a subclass as the plain type. Nothing is ever unpickled.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from bridge.core.encoding.columns import PLAIN_KINDS, fill_column, read_column
from bridge.core.encoding.names import AttributeNames
from bridge.errors import TensorError
from bridge.pb import bridge_pb2 as pb

__all__ = [
    "EMPTY_DICT",
    "MAX_DIMENSIONS",
    "MAX_VALUES_IN_ACTION",
    "UNCHANGED",
    "Notes",
    "StepInfo",
    "check_count",
    "decode",
    "decode_info",
    "decode_request",
    "decode_step_info",
    "encode",
    "encode_info",
    "from_value",
    "read_varint",
    "remarks_of",
    "to_value",
    "with_remarks",
]

T = TypeVar("T")
EMPTY_DICT = pb.Value(dict=pb.Value.Dict()).SerializeToString()
"""The result of `encode` for an empty dict."""
# The first bytes of an empty info whose only remark says how lanes began; the rest of the info is that remark.
_BEGUN_ALONE = EMPTY_DICT + pb.Value(begun=pb.Value.Begun()).SerializeToString()[:-1]
# The results of `numpy.dtype.str` for these dtypes; NumPy would evaluate other text.
_DTYPE = re.compile(r"[<>|]?[biufcUSMm]\d{1,9}(\[\d*[a-zμ]+\])?", re.IGNORECASE)
# Protobuf refuses more than a hundred nested messages, and each level takes two. The limit also ends the encoding of a
# structure that contains itself.
_MAX_DEPTH = 32
_INT64 = 1 << 63
# Python itself reads no integer of more than 4300 digits.
MAX_DIGITS = 4000
_MAX_BITS = int(MAX_DIGITS * math.log2(10))
MAX_DIMENSIONS = 64  # the limit of the newest NumPy
# The most elements of an array whose elements take no bytes.
_MAX_WITHOUT_BYTES = 1 << 16
# Limited, because an environment may use ever new keys in its infos, and each note is remembered.
_MAX_NOTES = 100
# The most values of one message. Reading as many takes a server up to half a second and some ten MiB.
_MOST_VALUES = 100_000
MAX_VALUES_IN_ACTION = 10_000
"""The most values in an action, for each lane: a Step should take no longer than the environment does."""
# An item of a column takes a reader less than a quarter of the time and the memory of a value.
_ITEMS_A_VALUE = 4
_MAX_ALIKE = 1000
# Wire types of fields.
_VARINT, _WITH_LENGTH = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_COLUMN = pb.Value.Column.DESCRIPTOR
UNCHANGED: Any = object()
"""Stands for the form of observations, or for the type of rewards, if it has not changed."""


class StepInfo(NamedTuple):
    """An info, and the remarks that travel with it."""

    info: Any
    """A dict, or a list of the lanes' dicts."""
    notes: Sequence[str] = ()
    """Notes for the user."""
    form: Any = UNCHANGED
    """The result of `Layout.form` for the observations from here on."""
    reward: Any = UNCHANGED
    """A reward of the type that the following rewards have."""
    agents: Sequence[str] = ()
    """With several agents: the ids of those alive; empty: as before, without those that ended."""
    missing: Sequence[str] = ()
    """For one of several agents: the parts that the environment did not return for it."""
    failed: Sequence[int] = ()
    """For lanes: the lanes whose environments failed, each with an `error` in its info."""
    begun: pb.Value.Begun | None = None
    """For lanes: how the ended ones began their next episodes; None: not requested, or no lane ended."""


class _TooDeepError(TensorError):
    """A value is nested too deep. A value that contains itself always is.

    Only the two upper levels of an info leave such a value out. If each level did, and went on with its other items, a
    value that contains itself twice would be filled in once at the first level, twice at the second, 4 times at the
    third, and so on.
    """


class Notes:
    """Notes for the receiver of infos, each sent once: on values that did not travel, or were changed."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.fresh: list[str] = []
        """The notes not taken yet; also the names of attributes, if they have changed."""

    def __bool__(self) -> bool:
        return bool(self.fresh)

    def add(self, place: str, text: str) -> None:
        """Add a note on a place, unless the place has one already, or there are 100 notes."""
        place = re.sub(r"\[\d+\]", "[]", place)  # all items of a list count as one place
        if place not in self._seen and len(self._seen) < _MAX_NOTES:
            self._seen.add(place)
            self.fresh.append(text)

    def rename(self, names: AttributeNames) -> None:
        """Send the names of the environment's attributes and methods with the next info."""
        self.fresh.append(names)

    def take(self) -> list[str]:
        """Return the notes that were not taken yet."""
        fresh, self.fresh = self.fresh, []
        return fresh


def encode(value: Any, *, columns: bool = False) -> bytes:
    """Encode a value.

    Args:
        value: The value.
        columns: Whether the reader can read long lists of similar items as columns.

    Raises:
        TensorError: The value has a part that the codec cannot carry; the message says where.
    """
    return to_value(value, columns=columns).SerializeToString()


def encode_info(
    info: Mapping[str, Any] | list[Mapping[str, Any]],
    notes: Notes,
    form: Any = UNCHANGED,
    *,
    reward: Any = UNCHANGED,
    agents: Sequence[str] = (),
    missing: Sequence[str] = (),
    failed: Sequence[int] = (),
) -> bytes:
    """Encode an info. Values that cannot be sent are left out of dicts and sets, and replaced by None in lists.

    Args:
        info: The environment's own dict, or a list of the lanes' dicts.
        notes: The values that are left out are added; all notes that were not sent yet are sent.
        form: See `StepInfo`, as for the following arguments.
        reward: Given if the tensor does not tell the reward's type.
        agents: Given if other agents are alive than the receiver expects.
        missing: For one of several agents.
        failed: For lanes.
    """
    # The usual case: there is nothing to send, and both ends skip building and parsing a message.
    if not (info or notes or agents or missing or failed) and form is UNCHANGED and reward is UNCHANGED:
        return EMPTY_DICT
    message = pb.Value()
    _fill(message, info, "info", 0, notes)
    for note in notes.take():
        if isinstance(note, AttributeNames):
            message.names = note
        else:
            message.notes.append(note)
    if form is not UNCHANGED:
        _fill(message.form, form, "form", 0)
    if reward is not UNCHANGED:
        _fill(message.reward, reward, "reward", 0)
    message.agents.extend(agents)
    message.missing.extend(missing)
    message.failed.extend(failed)
    return message.SerializeToString()


def decode_info(data: bytes) -> tuple[Any, list[str], Any]:
    """Decode the result of `encode_info`; raises as `decode`.

    Returns:
        The info, the notes that came with it, and the form of observations from here on, or `UNCHANGED`. Names of
        attributes are an `AttributeNames` after the notes.
    """
    info, notes, form, *_ = decode_step_info(data)
    return info, list(notes), form


def decode_step_info(data: bytes) -> StepInfo:
    """Decode the result of `encode_info` with all its remarks; raises as `decode`."""
    if data == EMPTY_DICT:
        return StepInfo({})
    if data.startswith(_BEGUN_ALONE) and len(data) > len(_BEGUN_ALONE):  # most infos that say how lanes began
        at = len(_BEGUN_ALONE)
        size, start = (data[at], at + 1) if data[at : at + 1] < b"\x80" else read_varint(data, at, 5)
        if start + size == len(data):
            return StepInfo({}, begun=_parse(data).begun)
    message = _parse(data)
    form = from_value(message.form) if message.HasField("form") else UNCHANGED
    reward = from_value(message.reward) if message.HasField("reward") else UNCHANGED
    names = [AttributeNames(message.names)] if message.names else []
    notes = [*message.notes, *names]
    begun = message.begun if message.HasField("begun") else None
    beside = message.agents, message.missing, message.failed, begun
    return StepInfo(from_value(message), notes, form, reward, *beside)


def remarks_of(data: bytes) -> pb.Value | None:
    """Return the notes, the form and the names of an encoded info; None: it has none. Raises as `decode`."""
    if data == EMPTY_DICT:
        return None
    message = _parse(data)
    if not message.notes and not message.HasField("form") and not message.names:
        return None
    remarks = pb.Value(notes=message.notes, names=message.names)
    if message.HasField("form"):
        remarks.form.CopyFrom(message.form)
    return remarks


def with_remarks(data: bytes, remarks: pb.Value) -> bytes:
    """Return an encoded info with these notes, this form and these names in place of its own."""
    message = _parse(data)
    message.ClearField("notes")
    message.ClearField("form")
    message.ClearField("names")
    message.MergeFrom(remarks)
    return message.SerializeToString()


def decode(data: bytes) -> Any:
    """Decode the result of `encode` or `encode_info`; arrays are writable.

    Raises:
        TensorError: The bytes are no encoded value.
    """
    return {} if data == EMPTY_DICT else from_value(_parse(data))


def decode_request(data: bytes) -> Any:
    """Decode a value from a client: as `decode`, but with at most 100,000 values.

    A list or a dict counts as one value plus its contents; an array of numbers counts as one. In a column four numbers
    or strings count as one.
    """
    check_count(data)
    return decode(data)


def check_count(data: bytes, kind: type[Message] = pb.Value, most: int = _MOST_VALUES) -> None:
    """Raise TensorError if a client's message has too many values to be read quickly. The message is not parsed.

    Each value takes a server some microseconds, and a hundred bytes or more for two on the wire. Bytes that no writer
    of protobuf makes (groups, long forms of small integers, lengths past the end) are refused: a reader that understood
    them in another way would find values that were not counted.

    Args:
        data: A message on the wire (https://protobuf.dev/programming-guides/encoding), which is not trusted.
        kind: The message's class: `Value`, or a class with fields of that type.
        most: The most values that the message may have.
    """
    if len(data) <= most:  # a value takes more than a byte, and an item of a column at least a byte
        return
    # A stack instead of recursion, because the client chooses the depth.
    waiting, values, fields, items = [(0, len(data), kind.DESCRIPTOR)], 1, 0, 0
    while waiting:
        at, end, descriptor = waiting.pop()
        while at < end:
            # Nearly all tags and lengths have one byte: calling a function for each took half of the time.
            tag, at = data[at], at + 1
            if tag >= 0x80:
                # Five bytes hold 32 bits. Protobuf has no longer tags, and refuses longer lengths.
                tag, at = read_varint(data, at - 1, 5)
            if tag & 7 == _WITH_LENGTH:
                if at < end and data[at] < 0x80:
                    length, at = data[at], at + 1
                else:
                    length, at = read_varint(data, at, 5)
                if length > end - at:
                    raise _malformed(data)
                field = descriptor.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, at + length, field.message_type))
                    # Lists, dicts and arrays are messages too, but not values.
                    values += field.message_type is pb.Value.DESCRIPTOR
                at += length
            elif tag & 7 == _VARINT:
                number, at = read_varint(data, at, 10)
                # The reader refuses a column that does not have as many items.
                if descriptor is _COLUMN and tag >> 3 == pb.Value.Column.COUNT_FIELD_NUMBER:
                    items += number
                elif descriptor is _COLUMN and tag >> 3 == pb.Value.Column.OBJECTS_FIELD_NUMBER:
                    values += number
            elif tag & 7 in _FIXED_BYTES:
                at += _FIXED_BYTES[tag & 7]
            else:
                raise _malformed(data)
            fields += 1
            # A value is a field of a list or a dict, and has one or two fields itself; a dict's key is another one.
            if values + items // _ITEMS_A_VALUE > most or fields > 4 * most:
                raise TensorError(f"expected at most {most} values, got more; send numbers as NumPy arrays")


def read_varint(data: bytes | bytearray, at: int, most: int) -> tuple[int, int]:
    """Return an integer of seven bits per byte, and where it ends; raise TensorError if it has more than `most`."""
    value = 0
    for index, byte in enumerate(data[at : at + most]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise _malformed(data)


def _malformed(data: bytes | bytearray) -> TensorError:
    return TensorError(f"expected an encoded value, got {len(data)} bytes that are none")


def _parse(data: bytes) -> pb.Value:
    try:
        return pb.Value.FromString(data)
    except (DecodeError, ValueError) as error:
        raise TensorError(f"expected an encoded value, got {len(data)} bytes that are none: {error}") from error


def to_value(value: Any, *, columns: bool = False) -> pb.Value:
    """Return the message of a value; arguments and errors are those of `encode`."""
    if columns:
        message = pb.Value()
        try:
            _fill(message, value, "value", 0, columns=True)
        except TensorError:
            pass  # without columns the error says which item cannot be sent
        else:
            return message
    message = pb.Value()
    _fill(message, value, "value", 0)
    return message


def _fill(
    message: pb.Value, value: Any, where: str, depth: int, notes: Notes | None = None, *, columns: bool = False
) -> None:
    if depth > _MAX_DEPTH:
        raise _TooDeepError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if value is None:
        message.none.SetInParent()
    # Check NumPy's types before Python's: `np.float64` is a float, and `np.str_` a str.
    elif isinstance(value, (np.ndarray, np.generic)):
        _fill_array(message.array, value, where, depth, notes, columns=columns)
    # Check bool before int, of which it is a subclass.
    elif isinstance(value, bool):
        message.boolean = value
    elif isinstance(value, int) and -_INT64 <= value < _INT64:
        message.integer = value
    elif isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise TensorError(f"{where} is an int of {value.bit_length()} bits, more than the {_MAX_BITS} that travel")
        message.big_integer = str(int(value))
    elif isinstance(value, float):
        message.number = value
    elif isinstance(value, str):
        _check_text(value, where)
        message.text = value
    elif isinstance(value, (bytes, bytearray)):
        message.data = bytes(value)
    elif columns and isinstance(value, (list, tuple)) and _fill_column(message.column, value, where, depth):
        message.column.is_tuple = not isinstance(value, list)
    elif isinstance(value, (list, tuple)):
        items = message.list if isinstance(value, list) else message.tuple
        items.SetInParent()
        for index, item in enumerate(value):
            _fill_item(items.items.add(), item, f"{where}[{index}]", depth + 1, notes, columns=columns)
    elif isinstance(value, Mapping):
        message.dict.SetInParent()
        _fill_dict(message.dict, value, where, depth, notes, columns=columns)
    elif isinstance(value, (set, frozenset)):
        items = message.set if isinstance(value, set) else message.frozenset
        items.SetInParent()
        for item in value:
            _fill_member(items, item, f"{where}{{{item!r:.40}}}", depth + 1, notes)
    elif isinstance(value, complex):
        message.complex.real, message.complex.imaginary = value.real, value.imag
    elif isinstance(value, enum.Enum):
        _fill(message, value.value, where, depth, notes, columns=columns)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `asdict` would copy all values deeply, which fails for values that cannot be copied.
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        _fill(message, fields, where, depth, notes, columns=columns)
    else:
        raise TensorError(
            f"{where} is of type {type(value).__name__}, which cannot be sent; expected None, bool, int, float, "
            "complex, str, bytes, NumPy scalars and arrays, lists, tuples, sets, dicts, enums or dataclasses"
        )


def _fill_column(column: pb.Value.Column, items: Sequence[Any], where: str, depth: int) -> bool:
    """Fill in a list as a column. Return False, and change nothing, if its items are not similar."""

    def fill_array(message: pb.Value.Array, array: Any) -> None:
        _fill_array(message, array, where, depth)

    def fill(message: pb.Value, part: list[Any]) -> None:
        # The list of the parts is no level: its items are as deep as in the rows.
        _fill(message, part, where, depth + 1, columns=True)

    return fill_column(column, items, fill_array, fill)


def _fill_item(
    message: pb.Value, value: Any, where: str, depth: int, notes: Notes | None, *, columns: bool = False
) -> None:
    """Fill in an item of a list; with `notes`, an item that cannot be sent becomes None, to keep the others' places."""
    try:
        _fill(message, value, where, depth, notes, columns=columns)
    except TensorError as error:
        if notes is None or (depth > 2 and isinstance(error, _TooDeepError)):
            raise
        notes.add(where, f"None stands for what does not travel: {error}")
        # Remove the parts that were filled in before the error, such as the first items of a list.
        message.Clear()
        message.none.SetInParent()


def _fill_member(items: pb.Value.List, value: Any, where: str, depth: int, notes: Notes | None) -> None:
    # Fill in a separate message, so that a member that fails halfway leaves nothing behind.
    entry = pb.Value()
    try:
        _fill_hashable(entry, value, where, depth)
    except TensorError as error:
        if notes is None:
            raise
        notes.add(where, f"left out, for it does not travel: {error}")
    else:
        items.items.append(entry)


def _fill_hashable(message: pb.Value, value: Any, where: str, depth: int) -> None:
    _fill(message, value, where, depth)
    _hashed(lambda: {from_value(message)}, f"{where}: a set")  # a dataclass becomes a dict


def _fill_dict(
    message: pb.Value.Dict,
    value: Mapping[Any, Any],
    where: str,
    depth: int,
    notes: Notes | None = None,
    *,
    columns: bool = False,
) -> None:
    # Nearly all dicts have only text keys. Such a key is a string on the wire, not a message.
    texts = all(isinstance(key, str) for key in value)
    for key, item in value.items():
        path = f"{where}[{key!r}]"
        # Fill in separate messages, as `_fill_member` does: there must be as many keys as values.
        entry, other = pb.Value(), pb.Value()
        try:
            if texts:
                _check_text(key, f"the key of {path}")
            else:
                _fill_hashable(other, key, f"the key of {path}", depth + 1)
            _fill(entry, item, path, depth + 1, notes, columns=columns)
        except TensorError as error:
            if notes is None or (depth > 1 and isinstance(error, _TooDeepError)):
                raise
            notes.add(path, f"left out, for it does not travel: {error}")
            continue
        if texts:
            message.keys.append(key)
        else:
            message.any_keys.append(other)
        message.values.append(entry)


def _check_text(text: str, where: str) -> None:
    try:
        # This fails for lone surrogates, as in file names that Python could not decode.
        text.encode()
    except UnicodeEncodeError as error:
        raise TensorError(f"{where} is text that UTF-8 cannot encode: {error}") from error


def _fill_array(
    message: pb.Value.Array, value: Any, where: str, depth: int, notes: Notes | None = None, *, columns: bool = False
) -> None:
    if isinstance(value, np.ma.MaskedArray):
        # `asarray` would silently drop the mask.
        raise TensorError(f"{where} is a masked array, whose mask cannot be sent; send data and mask as two arrays")
    array = np.asarray(value)
    message.is_scalar = isinstance(value, np.generic)
    message.shape.extend(array.shape)
    if array.dtype == object:
        message.dtype = "object"
        items = array.ravel().tolist()
        if columns and _fill_column(message.column, items, where, depth):
            return
        for index, item in enumerate(items):
            _fill_item(message.items.add(), item, f"{where}[{index}]", depth + 1, notes, columns=columns)
    elif array.dtype.kind in PLAIN_KINDS:
        # The wire has one byte order, whatever the writing machine's.
        plain = array.astype(array.dtype.newbyteorder("<"), copy=False)
        message.dtype = plain.dtype.str
        message.data = plain.tobytes()
    else:
        raise TensorError(f"{where} is an array of {array.dtype}, which cannot be sent")


def from_value(message: pb.Value, depth: int = 0) -> Any:
    """Return the value of a message; raises as `decode`."""
    kind = message.WhichOneof("kind")
    if depth > _MAX_DEPTH:
        raise TensorError(f"the value is nested more than {_MAX_DEPTH} levels deep")
    if kind is None:
        raise TensorError("expected a value, got an empty message")
    if kind == "none":
        return None
    if kind == "dict":
        return _read_dict(message.dict, depth)
    if kind == "list":
        return [from_value(item, depth + 1) for item in message.list.items]
    if kind == "tuple":
        return tuple(from_value(item, depth + 1) for item in message.tuple.items)
    if kind == "array":
        return _read_array(message.array, depth)
    if kind == "column":
        items = _read_column(message.column, depth)
        return tuple(items) if message.column.is_tuple else items
    if kind in ("set", "frozenset"):
        items = [from_value(item, depth + 1) for item in getattr(message, kind).items]
        return _hashed(lambda: set(items) if kind == "set" else frozenset(items), f"a {kind}", items)
    if kind == "complex":
        return complex(message.complex.real, message.complex.imaginary)
    if kind == "big_integer":
        text = message.big_integer
        # `int` also accepts blanks, underscores and digits of other scripts.
        if len(text) > MAX_DIGITS + 1 or not re.fullmatch("-?[0-9]+", text):
            raise TensorError(f"expected an integer in decimal, got {text:.40}")
        return int(text)
    return getattr(message, kind)


def _read_column(column: pb.Value.Column, depth: int) -> list[Any]:
    return read_column(column, lambda array: _read_array(array, depth), lambda value: from_value(value, depth + 1))


def _read_dict(message: pb.Value.Dict, depth: int) -> dict[Any, Any]:
    keys: list[Any] = list(message.keys) or [from_value(key, depth + 1) for key in message.any_keys]
    values = message.values
    if len(keys) != len(values):
        raise TensorError(f"a dict came with {len(keys)} keys and {len(values)} values")
    if not values:  # the usual case of an info
        return {}
    items = [from_value(value, depth + 1) for value in values]
    # A client cannot choose the hashes of text.
    return _hashed(lambda: dict(zip(keys, items, strict=True)), "a dict", () if message.keys else keys)


def _hashed(make: Callable[[], T], kind: str, members: Iterable[Any] = ()) -> T:
    try:
        # The multiples of a certain prime all have the hash 0, and a set of them takes time quadratic in their number.
        if max(collections.Counter(map(hash, members)).values(), default=0) > _MAX_ALIKE:
            raise ValueError(f"more than {_MAX_ALIKE} have the same hash")
        return make()
    except (TypeError, ValueError) as error:  # timedeltas without a unit raise ValueError
        raise TensorError(f"{kind} cannot hold what travels: {error}") from error


def _read_array(message: pb.Value.Array, depth: int) -> Any:
    shape = tuple(message.shape)
    try:
        # NumPy would refuse them too, but only after computing the product of a million numbers, which takes hours.
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"it has more than {MAX_DIMENSIONS} dimensions")
        if message.dtype == "object":
            if message.HasField("column"):
                items = _read_column(message.column, depth)
            else:
                items = [from_value(item, depth + 1) for item in message.items]
            array: Any = np.empty(len(items), dtype=object)
            for index, item in enumerate(items):
                array[index] = item
        else:
            array = _read_plain(message, shape)
        # `reshape` would infer a dimension of -1.
        if min(shape, default=0) < 0:
            raise ValueError("a dimension is negative")
        array = array.reshape(shape)
        return array[()] if message.is_scalar else array
    except (TypeError, ValueError, OverflowError) as error:
        raise TensorError(
            f"an array of dtype {message.dtype[:80]!r} and shape {list(shape[:32])} cannot be read: {error}"
        ) from error


def _read_plain(message: pb.Value.Array, shape: tuple[int, ...]) -> Any:
    if not _DTYPE.fullmatch(message.dtype):
        raise ValueError("this dtype is not allowed")
    dtype = np.dtype(message.dtype)
    # Texts of length 0 take no bytes: only the shape, which may be of any size, says how many there are.
    if dtype.itemsize == 0:
        if math.prod(shape) > _MAX_WITHOUT_BYTES:
            raise ValueError(f"it has more than {_MAX_WITHOUT_BYTES} elements without any bytes")
        return np.empty(math.prod(shape), dtype)
    # Copied, because an array over bytes is read-only.
    array = np.frombuffer(message.data, dtype).copy() if message.data else np.empty(0, dtype)
    # Otherwise NumPy raises SystemError later, when the text is read.
    if dtype.kind == "U" and (array.view(dtype.str[0] + "u4") > 0x10FFFF).any():
        raise ValueError("it holds numbers that are no characters")
    if dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        raise ValueError("it holds bytes that are neither true nor false")
    return array.astype(dtype.newbyteorder("="), copy=False)
