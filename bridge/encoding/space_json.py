"""Write Gymnasium spaces as JSON, and read them back exactly.

Kept exactly: a Box's dtype, per-element bounds and bounded flags (spaces may compare equal and still sample
differently); a Discrete's and MultiDiscrete's start and dtype; a Text's lengths and charset in order; a Dict's order
and keys of any plain type; a Sequence's stack flag; a Graph without edges. A uniform bound is written once, however
large the Box.
"""

from __future__ import annotations

import json
import math
import string
import warnings
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from bridge.encoding.tensors import Array, cast
from bridge.errors import TensorError, UnsupportedSpaceError

__all__ = ["published_space", "space_from_json", "space_to_json"]

_MAX_DEPTH = 64
# A line of JSON must not claim any amount of memory.
_MAX_ELEMENTS = 1 << 28
_CUSTOM_TEXT = {"min_length": 0, "max_length": 4096, "charset": string.printable}


def published_space(space: Space[Any]) -> Space[Any]:
    """Return the space that the other end will have: the same, or a standard one for a custom class.

    A subclass of one of Gymnasium's spaces counts as that space. A custom space of strings (MiniGrid's MissionSpace)
    becomes a Text of printable characters, with a warning, because its code is not sent.

    Raises:
        UnsupportedSpaceError: A custom space of anything else.
    """
    return space_from_json(space_to_json(space))


def space_to_json(space: Space[Any]) -> str:
    """Write a space.

    Raises:
        UnsupportedSpaceError: It is, or holds, a space or Dict key that has no form here.
    """
    return json.dumps(_write(space), separators=(",", ":"))


def space_from_json(text: str) -> Space[Any]:
    """Read a space.

    Raises:
        TensorError: The text is not what `space_to_json` writes.
    """
    try:
        return _read(json.loads(text), 0)
    except (AssertionError, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise TensorError(f"expected a space as JSON, got {text!r:.200}: {error!r}") from error


def _write(space: Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        if space.dtype.itemsize > 8:
            raise UnsupportedSpaceError(f"expected a Box of at most 64 bits an element, got {space}; use float64")
        return {
            "type": "Box",
            "shape": list(space.shape),
            "dtype": space.dtype.name,
            "low": _numbers(space.low),
            "high": _numbers(space.high),
            "bounded_below": _numbers(space.bounded_below),
            "bounded_above": _numbers(space.bounded_above),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "MultiDiscrete",
            "shape": list(space.shape),
            "dtype": space.dtype.name,
            "nvec": _numbers(space.nvec),
            "start": _numbers(space.start),
        }
    if isinstance(space, spaces.Text):
        return {
            "type": "Text",
            "min_length": space.min_length,
            "max_length": space.max_length,
            "charset": "".join(space.character_list),
        }
    if isinstance(space, spaces.Dict):
        return {
            "type": "Dict",
            "sort_keys": bool(getattr(space, "sort_keys", True)),
            "spaces": [[_write_key(key), _write(item)] for key, item in space.spaces.items()],
        }
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        kind = "Tuple" if isinstance(space, spaces.Tuple) else "OneOf"
        return {"type": kind, "spaces": [_write(item) for item in space.spaces]}
    if isinstance(space, spaces.Sequence):
        return {"type": "Sequence", "feature": _write(space.feature_space), "stack": bool(space.stack)}
    if isinstance(space, spaces.Graph):
        edge = None if space.edge_space is None else _write(space.edge_space)
        return {"type": "Graph", "node": _write(space.node_space), "edge": edge}
    if isinstance(space, Space) and space.dtype is not None and np.dtype(space.dtype).kind == "U":
        warnings.warn(
            f"the custom space {type(space).__name__} is published as a Text of printable characters, "
            "because the code of a space cannot be sent",
            RuntimeWarning,
            stacklevel=2,
        )
        return {"type": "Text", **_CUSTOM_TEXT}
    raise UnsupportedSpaceError(
        f"expected a space of Gymnasium's own kinds, got {space!r} of type {type(space).__name__}; "
        "wrap the environment so that it has such a space (gymnasium.wrappers.TransformObservation, TransformAction)"
    )


def _read(data: dict[str, Any], depth: int) -> Space[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    kind = data["type"]
    if kind == "Box":
        shape, dtype = _shape(data["shape"]), np.dtype(data["dtype"])
        box = spaces.Box(_array(data["low"], shape, dtype), _array(data["high"], shape, dtype), shape, dtype.type)
        box.bounded_below = _array(data["bounded_below"], shape, np.dtype(bool))
        box.bounded_above = _array(data["bounded_above"], shape, np.dtype(bool))
        return box
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"], dtype=np.dtype(data["dtype"]).type)
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"] if isinstance(data["n"], int) else list(_shape(data["n"])))
    if kind == "MultiDiscrete":
        shape, dtype = _shape(data["shape"]), np.dtype(data["dtype"])
        nvec, start = _array(data["nvec"], shape, dtype), _array(data["start"], shape, dtype)
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    if kind == "Text":
        return spaces.Text(data["max_length"], min_length=data["min_length"], charset=data["charset"])
    if kind == "Dict":
        items = [(_read_key(key), _read(item, depth + 1)) for key, item in data["spaces"]]
        return spaces.Dict(items, sort_keys=data["sort_keys"])
    if kind in ("Tuple", "OneOf"):
        members = [_read(item, depth + 1) for item in data["spaces"]]
        return spaces.Tuple(members) if kind == "Tuple" else spaces.OneOf(members)
    if kind == "Sequence":
        return spaces.Sequence(_read(data["feature"], depth + 1), stack=data["stack"])
    if kind == "Graph":
        edge = None if data["edge"] is None else _read(data["edge"], depth + 1)
        return spaces.Graph(_read(data["node"], depth + 1), edge)
    raise ValueError(f"unknown kind of space {kind!r}")


def _numbers(array: Array) -> Any:
    """One number where all are the same, else the flat list; infinities as text, for JSON has none."""
    if array.size and (array == array.flat[0]).all():
        return _number(array.flat[0].item())
    return [_number(item) for item in array.ravel().tolist()]


def _number(item: Any) -> Any:
    return ("inf" if item > 0 else "-inf") if isinstance(item, float) and math.isinf(item) else item


def _shape(data: Any) -> tuple[int, ...]:
    shape = tuple(data)
    if not all(isinstance(size, int) and size >= 0 for size in shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise ValueError(f"expected sizes of 0 or more, of at most {_MAX_ELEMENTS} elements together, got {data!r:.80}")
    return shape


def _array(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if isinstance(data, list):
        return cast([float(item) if isinstance(item, str) else item for item in data], dtype).reshape(shape)
    return np.full(shape, cast(float(data) if isinstance(data, str) else data, dtype), dtype)


def _write_key(key: Any) -> Any:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, tuple):
        return {"tuple": [_write_key(item) for item in key]}
    if key is None or isinstance(key, bool):
        return {"constant": key}
    if isinstance(key, (int, np.integer)):
        return {"int": int(key)}
    if isinstance(key, (float, np.floating)):
        return {"float": float(key).hex()}
    raise UnsupportedSpaceError(
        f"expected Dict keys of type str, int, float, bool, None or tuples of them, got {key!r} of type "
        f"{type(key).__name__}"
    )


def _read_key(data: Any) -> Any:
    if isinstance(data, str):
        return data
    if "tuple" in data:
        return tuple(_read_key(item) for item in data["tuple"])
    if "int" in data:
        return int(data["int"])
    return float.fromhex(data["float"]) if "float" in data else data["constant"]
