"""The messages of openpi's wire: msgpack, with NumPy arrays as maps. No object arrays, no pickle, sizes bounded.

The server sends a map with its metadata when a client connects. Then each binary message of the client is a map with
one observation, and its answer a map with `actions`, an array whose first axis is time: a chunk of actions. A text
message of the server is an error.

Between two ends of this package one message may hold several observations, stacked: the server's metadata has
`MAX_BATCH`, the request `BATCH`, and `actions` has one more axis in front. openpi has no such message, so that a client
asks for it only where the metadata names it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from bridge.extras import needed

with needed("policies over the network need the packages msgpack and websockets", "policy"):
    import msgpack
    import websockets  # noqa: F401 - the modules beside import its parts; the error is the same for both

__all__ = ["ACTIONS", "BATCH", "MAX_BATCH", "MAX_MESSAGE_BYTES", "OBSERVATION", "WireError", "pack", "unpack"]

MAX_MESSAGE_BYTES = 64 * 2**20
"""The largest message, unless told otherwise."""
ACTIONS = "actions"
OBSERVATION = "observation"
BATCH = "bridge/batch"
MAX_BATCH = "bridge/max_batch"

_MAX_VALUES = 100_000
# msgpack makes a list as long as its head announces, one inside of the other: this bounds what a few bytes can take.
_MAX_LENGTH = 10_000
_DTYPE = re.compile(r"[<>|=](?:b1|[iuf][1248]|f16|[SU][1-9][0-9]{0,5})")


class WireError(ValueError):
    """Bytes that are no message of this wire, or a value that it has no form for."""


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        WireError: It holds an array of objects, or something else that has no form.
    """
    try:
        packed: bytes = msgpack.packb(message, default=_pack_array)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot be sent: {error}") from None
    return packed


def _pack_array(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"expected arrays, numbers, text, lists and maps, got {type(value).__name__}")
    if not _DTYPE.fullmatch(value.dtype.str):
        raise TypeError(f"expected arrays of bools, numbers or text, got the dtype {value.dtype}")
    # The bytes are copied row by row: a view with strides travels as what it shows; a scalar has no axes.
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def unpack(data: Any) -> dict[str, Any]:
    """Return the message that bytes hold; its arrays are writable copies.

    Raises:
        WireError: They hold none, or more than 100,000 values; an array counts as one.
    """
    if not isinstance(data, bytes):
        raise WireError("expected a binary message, got a text")
    values = 0

    def count(container: Any) -> Any:
        nonlocal values
        values += 1 + len(container)
        if values > _MAX_VALUES:
            raise WireError(f"expected at most {_MAX_VALUES} values in a message, got more; send numbers as arrays")
        return container

    try:
        found = msgpack.unpackb(
            data,
            object_hook=lambda item: _unpack_array(count(item)),
            list_hook=count,
            strict_map_key=False,
            max_array_len=_MAX_LENGTH,
            max_map_len=_MAX_LENGTH,
            max_ext_len=0,
        )
    except WireError:
        raise
    except Exception as error:  # msgpack's own errors have no common class; those of NumPy come from the hook
        reason = " ".join(str(error).split())[:200]
        raise WireError(f"expected a message of msgpack, got {len(data)} bytes that are none: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise WireError(f"expected a map with text as keys, got a {type(found).__name__}")
    return found


def _unpack_array(item: dict[Any, Any]) -> Any:
    """Return the array or scalar that a map stands for, or the map itself."""
    # openpi-client has keys of bytes; other implementations of the same wire write text.
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in item.items()}
    if "__ndarray__" not in fields and "__npgeneric__" not in fields:
        return item
    dtype, data, shape = (fields.get(name) for name in ("dtype", "data", "shape"))
    dtype = dtype.decode("latin-1") if isinstance(dtype, bytes) else dtype
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise WireError(f"expected an array of bools, numbers or text, got the dtype {dtype!r:.40}")
    kind = np.dtype(dtype)
    if "__npgeneric__" in fields:
        if not isinstance(data, (bool, int, float, str, bytes)):
            raise WireError(f"expected a number or text as a scalar of {dtype}, got a {type(data).__name__}")
        return kind.type(data)
    if not (isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)):
        raise WireError(f"expected the shape of an array as at most 32 lengths, got {shape!r:.80}")
    if not isinstance(data, bytes) or math.prod(shape) * kind.itemsize != len(data):
        size = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise WireError(f"expected {math.prod(shape) * kind.itemsize} bytes for {dtype} of {shape}, got {size}")
    return np.ndarray(tuple(shape), kind, data).copy()
