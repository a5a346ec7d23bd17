"""The values codec: what infos, reset options, keyword arguments and results are made of.

Carried exactly: None, bool, int, float, str, bytes, NumPy scalars and arrays of any fixed-size dtype (and object arrays
of carried values), lists, tuples and dicts with string keys. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bridge.errors import TensorError
from bridge.pb import bridge_pb2 as pb

__all__ = ["EMPTY_DICT", "decode", "encode", "encode_info", "from_value", "to_value"]

EMPTY_DICT = pb.Value(dict=pb.Value.Dict()).SerializeToString()
"""What `encode` gives for an empty dict."""
# Dtype kinds whose elements are plain bytes: bool, integers, floats, complex, fixed text and bytes, dates and spans.
_PLAIN_KINDS = "biufcUSMm"
# What `numpy.dtype.str` gives for them; NumPy would evaluate other text.
_DTYPE = re.compile(r"[<>|]?[biufcUSMm]\d{1,9}(\[\d*[a-zμ]+\])?", re.IGNORECASE)
_MAX_DEPTH = 32
_INT64 = 1 << 63
# Python itself reads no integer of more than 4300 digits.
_MAX_DIGITS = 4000
_MAX_BITS = int(_MAX_DIGITS * math.log2(10))
# Elements of an array that takes no bytes on the wire.
_MAX_WITHOUT_BYTES = 1 << 16


def encode(value: Any) -> bytes:
    """Encode a value.

    Raises:
        TensorError: It holds something that the codec does not carry; the message says where.
    """
    return to_value(value).SerializeToString()


def encode_info(info: Mapping[str, Any] | list[Mapping[str, Any]], warned: set[str]) -> bytes:
    """Encode an info, leaving out what cannot be carried.

    Args:
        info: The environment's own dict, or a list of the lanes' dicts.
        warned: The paths that a warning was given for; grows.
    """
    if not info:
        return EMPTY_DICT
    message = pb.Value()
    _fill(message, info, "info", 0, warned)
    return message.SerializeToString()


def decode(data: bytes) -> Any:
    """Decode what `encode` or `encode_info` gave; arrays are writable.

    Raises:
        TensorError: The bytes are not such a value.
    """
    if data == EMPTY_DICT:
        return {}
    try:
        message = pb.Value.FromString(data)
    except (DecodeError, ValueError) as error:
        raise TensorError(f"expected an encoded value, got {len(data)} bytes that are none: {error}") from error
    return from_value(message)


def to_value(value: Any) -> pb.Value:
    """Return the message of a value; raises as `encode`."""
    message = pb.Value()
    _fill(message, value, "value", 0)
    return message


def _fill(message: pb.Value, value: Any, where: str, depth: int, warned: set[str] | None = None) -> None:
    if depth > _MAX_DEPTH:
        raise TensorError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if value is None:
        message.none.SetInParent()
    elif isinstance(value, (np.ndarray, np.generic)):
        _fill_array(message.array, value, where, depth)
    elif isinstance(value, bool):
        message.boolean = value
    elif isinstance(value, int):
        if -_INT64 <= value < _INT64:
            message.integer = value
        elif value.bit_length() > _MAX_BITS:
            raise TensorError(f"{where} is an int of {value.bit_length()} bits, more than the {_MAX_BITS} that travel")
        else:
            message.big_integer = str(int(value))
    elif isinstance(value, float):
        message.number = value
    elif isinstance(value, str):
        _check_text(value, where)
        message.text = value
    elif isinstance(value, (bytes, bytearray)):
        message.data = bytes(value)
    elif isinstance(value, (list, tuple)):
        items = message.list if isinstance(value, list) else message.tuple
        items.SetInParent()
        for index, item in enumerate(value):
            _fill(items.items.add(), item, f"{where}[{index}]", depth + 1, warned)
    elif isinstance(value, Mapping):
        message.dict.SetInParent()
        _fill_dict(message.dict, value, where, depth, warned)
    else:
        raise TensorError(
            f"{where} is of type {type(value).__name__}, which does not travel; what travels is None, bool, int, "
            "float, str, bytes, NumPy scalars and arrays, lists, tuples and dicts with string keys"
        )


def _fill_dict(
    message: pb.Value.Dict, value: Mapping[Any, Any], where: str, depth: int, warned: set[str] | None = None
) -> None:
    for key, item in value.items():
        path = f"{where}[{key!r}]"
        entry = pb.Value()
        try:
            if not isinstance(key, str):
                raise TensorError(f"{path} has a key of type {type(key).__name__}, where a string was expected")
            _check_text(key, f"the key of {path}")
            _fill(entry, item, path, depth + 1, warned)
        except TensorError as error:
            if warned is None:
                raise
            if path not in warned:
                warned.add(path)
                warnings.warn(f"left out of what is sent: {error}", RuntimeWarning, stacklevel=2)
            continue
        message.keys.append(key)
        message.values.append(entry)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TensorError(f"{where} is text that UTF-8 cannot encode: {error}") from error


def _fill_array(message: pb.Value.Array, value: Any, where: str, depth: int) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise TensorError(f"{where} is a masked array, whose mask does not travel; send its data and mask apart")
    array = np.asarray(value)
    message.is_scalar = isinstance(value, np.generic)
    message.shape.extend(array.shape)
    if array.dtype == object:
        message.dtype = "object"
        for index, item in enumerate(array.ravel().tolist()):
            _fill(message.items.add(), item, f"{where}[{index}]", depth + 1)
    elif array.dtype.kind in _PLAIN_KINDS:
        plain = array.astype(array.dtype.newbyteorder("<"), copy=False)
        message.dtype = plain.dtype.str
        message.data = plain.tobytes()
    else:
        raise TensorError(f"{where} is an array of {array.dtype}, which does not travel")


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
        keys, values = message.dict.keys, message.dict.values
        if len(keys) != len(values):
            raise TensorError(f"a dict came with {len(keys)} keys and {len(values)} values")
        return {key: from_value(value, depth + 1) for key, value in zip(keys, values, strict=True)}
    if kind == "list":
        return [from_value(item, depth + 1) for item in message.list.items]
    if kind == "tuple":
        return tuple(from_value(item, depth + 1) for item in message.tuple.items)
    if kind == "array":
        return _read_array(message.array, depth)
    if kind == "big_integer":
        text = message.big_integer
        if len(text) > _MAX_DIGITS + 1 or not re.fullmatch("-?[0-9]+", text):
            raise TensorError(f"expected an integer in decimal, got {text:.40}")
        return int(text)
    return getattr(message, kind)


def _read_array(message: pb.Value.Array, depth: int) -> Any:
    shape = tuple(message.shape)
    try:
        if message.dtype == "object":
            array: Any = np.empty(len(message.items), dtype=object)
            for index, item in enumerate(message.items):
                array[index] = from_value(item, depth + 1)
        else:
            array = _read_plain(message, shape)
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
        raise ValueError("such a dtype does not travel")
    dtype = np.dtype(message.dtype)
    if dtype.itemsize == 0:
        if math.prod(shape) > _MAX_WITHOUT_BYTES:
            raise ValueError(f"it has more than {_MAX_WITHOUT_BYTES} elements without any bytes")
        return np.empty(math.prod(shape), dtype)
    array = np.frombuffer(message.data, dtype).copy() if message.data else np.empty(0, dtype)
    if dtype.kind == "U" and (array.view(dtype.str[0] + "u4") > 0x10FFFF).any():
        raise ValueError("it holds numbers that are no characters")
    if dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        raise ValueError("it holds bytes that are neither true nor false")
    return array.astype(dtype.newbyteorder("="), copy=False)
