"""The messages of openpi's protocol: msgpack, with NumPy arrays as maps. No object arrays, no pickle, bounded sizes.

When a client connects, the server sends a map with its metadata. Then each binary message of the client is a map with
one observation, and the response is a map with `actions`, an array whose first axis is time: a chunk of actions. A text
message of the server is an error.

Between two ends of this package one message may contain several stacked observations: the server's metadata has
`MAX_BATCH`, the request `BATCH`, and `actions` has an additional first axis. openpi has no such message, so a client
sends it only if the metadata has `MAX_BATCH`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from bridge.core.extras import needed
from bridge.errors import SettingError

with needed("policies over the network need the packages msgpack and websockets", "policy"):
    import msgpack
    import websockets  # noqa: F401 - other modules import parts of it; the error is the same for all

__all__ = ["BATCH", "MAX_BATCH", "MAX_MESSAGE_BYTES", "OBSERVATION", "WireError", "check_chunks", "pack", "unpack"]

MAX_MESSAGE_BYTES = 64 * 2**20
"""The default for the largest message."""
OBSERVATION = "observation"
BATCH = "bridge/batch"
MAX_BATCH = "bridge/max_batch"

_MAX_VALUES = 100_000
# msgpack allocates a list as long as its header announces, also for nested lists: this limits the memory that a few
# bytes can take.
_MAX_LENGTH = 10_000
_DTYPE = re.compile(r"[<>|=](?:b1|[iuf][1248]|f16|[SU][1-9][0-9]{0,5})")


class WireError(ValueError):
    """Bytes that are not a message of this protocol, or a message that lacks a required entry."""


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        SettingError: The message contains an array of objects, or another value that cannot be packed.
    """
    return bytes(msgpack.packb(message, default=_pack_array))


def _pack_array(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise SettingError(f"expected arrays, numbers, text, lists and maps, got {type(value).__name__}")
    if not _DTYPE.fullmatch(value.dtype.str):
        raise SettingError(f"expected arrays of bools, numbers or text, got the dtype {value.dtype}")
    # The bytes are copied row by row, so a strided view is packed with the values it shows; a scalar has no axes.
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def unpack(data: Any) -> dict[str, Any]:
    """Return the message that bytes encode; its arrays are writable copies.

    Raises:
        WireError: They encode no message, or more than 100,000 values; an array counts as one.
    """
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
    except Exception as error:  # msgpack's exceptions have no common base class; those of NumPy come from the hook
        wanted = "" if isinstance(error, WireError) else f"expected a message of msgpack: {type(error).__name__}: "
        raise WireError(f"{wanted}{' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise WireError(f"expected a map with text as keys, got a {type(found).__name__}")
    return found


def _unpack_array(item: dict[Any, Any]) -> Any:
    """Return the array or scalar that a map encodes, or the map itself if it encodes none."""
    # openpi-client uses bytes as keys; other implementations of the protocol use str.
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in item.items()}
    if "__ndarray__" not in fields and "__npgeneric__" not in fields:
        return item
    dtype, data = fields["dtype"], fields["data"]
    dtype = dtype.decode("latin-1") if isinstance(dtype, bytes) else dtype
    if not _DTYPE.fullmatch(dtype):
        raise WireError(f"expected an array of bools, numbers or text, got the dtype {dtype!r:.40}")
    if "__npgeneric__" in fields:
        return np.dtype(dtype).type(data)
    shape = tuple(fields["shape"])
    array: Any = np.ndarray(shape, dtype, data)  # raises if bytes are missing; accepts one length of -1
    if (array.shape, array.nbytes) != (shape, len(data)):
        raise WireError(f"expected an array of {dtype} whose shape fits its {len(data)} bytes, got {shape}")
    return array.copy()


def check_chunks(chunks: Any, rows: int) -> None:
    """Raise WireError unless the chunks are finite actions, `(rows, horizon, …)`."""
    is_numeric = isinstance(chunks, np.ndarray) and chunks.dtype.kind in "biuf"
    if not is_numeric or chunks.ndim < 2 or len(chunks) != rows or not chunks.shape[1]:
        came = f"{chunks.dtype} of {chunks.shape}" if isinstance(chunks, np.ndarray) else f"{chunks!r:.100}"
        raise WireError(f"expected actions as an array of numbers, ({rows}, horizon, …), got {came}")
    if not np.isfinite(chunks).all():
        raise WireError("expected finite actions, got NaN or infinity; look at what the policy computes")
