"""Write Gymnasium spaces as JSON, and read them back exactly.

Kept exactly: a Box's dtype, per-element bounds and bounded flags (spaces may compare equal and still sample
differently); a Discrete's and MultiDiscrete's start and dtype; a Text's lengths and charset in order; a Dict's order
and keys of any plain type; a Sequence's stack flag; a Graph without edges. A uniform bound is written once, however
large the Box.

A space of another class is written as the plain space that replaces it, with the name of its class and those of its
attributes that JSON can hold. A reader that is registered under that name makes the exact space from them.
"""

from __future__ import annotations

import json
import math
import string
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces

from bridge.core.encoding.tensors import Array, cast
from bridge.core.encoding.values import MAX_DIMENSIONS
from bridge.core.gymnasium_versions import dict_space, discrete_space, graph_space
from bridge.errors import SettingError, TensorError, UnsupportedSpaceError

__all__ = [
    "SpaceReader",
    "check_space_bytes",
    "plain_space_from_json",
    "published_space",
    "register_space",
    "space_from_json",
    "space_to_json",
]

SpaceReader: TypeAlias = Callable[[Mapping[str, Any], Space[Any]], Space[Any]]
"""Makes a space from its attributes and from the plain space that replaces it."""

_MAX_DEPTH = 64
# The limit of memory that one line of JSON may claim.
_MAX_BYTES = 1 << 29
_CUSTOM_TEXT = {"min_length": 0, "max_length": 4096, "charset": string.printable}
_MAX_ATTRIBUTES = 1 << 16  # bytes of JSON
_readers: dict[str, SpaceReader] = {}


def register_space(name: str, read: SpaceReader) -> None:
    """Register a function that makes spaces of a custom class from a server's description.

    A space's code does not travel. For a space of a class that is not Gymnasium's, a server sends the name of the class
    and those of its public attributes that are plain data; functions and classes are sent by name, as
    `{"name": "module:qualified.name"}`. Without a reader the client uses a plain space in its place.

    Attributes come from the network: a reader must not import or call what they name without checking that it may.

    Args:
        name: The name of the class, `module:qualified.name`, such as `minigrid.core.mission:MissionSpace`.
        read: Takes the attributes, a dict, and the plain space; returns the space. Its samples must be like those of
            the plain space.

    Raises:
        SettingError: The name is invalid, or the reader cannot be called.
    """
    if not isinstance(name, str) or ":" not in name:
        raise SettingError(f"expected the name of a class as 'module:qualified.name', got {name!r:.80}")
    if not callable(read):
        raise SettingError(f"expected a function that takes attributes and a space, got {read!r:.80}")
    _readers[name] = read


def published_space(space: Space[Any]) -> Space[Any]:
    """Return the space that a client without a reader uses: the same, or a standard space for a custom class.

    A subclass of one of Gymnasium's spaces counts as that space. A custom space of strings (MiniGrid's MissionSpace)
    becomes a Text of printable characters.

    Raises:
        UnsupportedSpaceError: A custom space whose samples are not strings.
    """
    return plain_space_from_json(space_to_json(space))


def space_to_json(space: Space[Any]) -> str:
    """Write a space.

    Raises:
        UnsupportedSpaceError: The space is, or holds, a space or Dict key that cannot be written as JSON.
    """
    return json.dumps(_write(space), separators=(",", ":"))


def space_from_json(text: str) -> Space[Any]:
    """Read a space, by the reader that is registered for its class if there is one.

    Raises:
        TensorError: The text is not what `space_to_json` writes.
        UnsupportedSpaceError: The installed Gymnasium is too old for the space.
        SettingError: A registered reader failed.
    """
    return _read_text(text, _readers)


def plain_space_from_json(text: str) -> Space[Any]:
    """Read a space without registered readers; raises TensorError as `space_from_json`."""
    return _read_text(text, None)


def check_space_bytes(arrays: Iterable[tuple[Sequence[int], Any]]) -> None:
    """Refuse spaces whose bounds would take much memory, which a server can declare in a few bytes.

    Args:
        arrays: The shape and the dtype of each; a length below 0 is variable.

    Raises:
        TensorError: Together they take more than 512 MiB: two bounds, and two flags for each element.
    """
    size = 0
    for shape, dtype in arrays:
        size += math.prod(max(0, length) for length in shape) * (2 * np.dtype(dtype).itemsize + 2)
        if size > _MAX_BYTES:
            raise TensorError(
                f"expected spaces whose bounds take at most {_MAX_BYTES >> 20} MiB, "
                f"got one of shape {list(shape)!r:.80} and dtype {np.dtype(dtype)}"
            )


def _arrays(data: Any) -> Iterator[tuple[Sequence[int], Any]]:
    """Yield the shape and dtype of each array in a space's JSON, before any array is made."""
    # A stack instead of recursion: the depth was not checked yet.
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            if item.get("type") in ("Box", "MultiDiscrete"):
                yield _shape(item["shape"]), item["dtype"]
            elif item.get("type") == "MultiBinary":
                yield (item["n"],) if isinstance(item["n"], int) else _shape(item["n"]), np.int8
            else:
                # The attributes of a custom class may look like spaces.
                waiting += (value for name, value in item.items() if name != "attributes")


def _read_text(text: str, readers: Mapping[str, SpaceReader] | None) -> Space[Any]:
    try:
        data = json.loads(text)
        check_space_bytes(_arrays(data))
        return _read(data, 0, readers)
    except (SettingError, UnsupportedSpaceError):
        raise
    # Gymnasium's spaces check their arguments by `assert`.
    except (AssertionError, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise TensorError(f"expected a space as JSON, got {text!r:.200}: {error!r}") from error


def _write(space: Space[Any], where: str = "") -> dict[str, Any]:
    written = _write_plain(space, where)
    kind = type(space)
    if kind.__module__.partition(".")[0] != "gymnasium":
        written["class"] = _name_of(kind)
        written["attributes"] = _attributes(space)
    return written


def _name_of(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _attributes(space: Space[Any]) -> dict[str, Any]:
    """Return the attributes of a space itself that are public and plain data."""
    found: dict[str, Any] = {}
    for name, value in vars(space).items():
        try:
            # Values that JSON cannot hold are left out. The others are sent as JSON writes them.
            text = json.dumps(value, default=_named, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
        if not name.startswith("_") and len(text) <= _MAX_ATTRIBUTES:
            found[name] = json.loads(text)
    return found


def _named(value: Any) -> dict[str, str]:
    if not callable(value) or not hasattr(value, "__qualname__"):
        raise TypeError(f"{value!r:.80} is not plain data")
    return {"name": _name_of(value)}


def _write_plain(space: Space[Any], where: str) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        # JSON numbers are read as float64, which would lose digits.
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
            # Gymnasium before 1.4 has no such attribute, and sorts the keys of batches.
            "sort_keys": bool(getattr(space, "sort_keys", True)),
            "spaces": [[_write_key(key), _write(item, f"{where}[{key!r}]")] for key, item in space.spaces.items()],
        }
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        kind = "Tuple" if isinstance(space, spaces.Tuple) else "OneOf"
        return {"type": kind, "spaces": [_write(item, f"{where}[{index}]") for index, item in enumerate(space.spaces)]}
    if isinstance(space, spaces.Sequence):
        return {
            "type": "Sequence",
            "feature": _write(space.feature_space, f"{where}.feature_space"),
            "stack": bool(space.stack),
        }
    if isinstance(space, spaces.Graph):
        edge = None if space.edge_space is None else _write(space.edge_space, f"{where}.edge_space")
        return {"type": "Graph", "node": _write(space.node_space, f"{where}.node_space"), "edge": edge}
    if isinstance(space, Space) and space.dtype is not None and np.dtype(space.dtype).kind == "U":
        return {"type": "Text", **_CUSTOM_TEXT}
    raise UnsupportedSpaceError(
        f"expected a space of Gymnasium's own kinds{f' at {where}' if where else ''}, got {space!r:.200} of type "
        f"{type(space).__name__}; "
        "wrap the environment so that it has such a space (gymnasium.wrappers.TransformObservation, TransformAction)"
    )


def _read(data: dict[str, Any], depth: int, readers: Mapping[str, SpaceReader] | None) -> Space[Any]:
    """Read a space, with `readers` by the reader of its class."""
    plain = _read_plain(data, depth, readers)
    name = data.get("class")
    if readers is None or name is None:
        return plain
    if name not in readers:
        if data["type"] == "Text":
            warnings.warn(
                f"the remote space {name!r:.200} is a Text of printable characters here, for its code does not travel; "
                f"bridge.register_space({name!r:.200}, …) makes the exact one",
                RuntimeWarning,
                stacklevel=2,
            )
        return plain
    try:
        exact = readers[name](data.get("attributes", {}), plain)
        problem = "" if isinstance(exact, Space) else f"returned {exact!r:.80}, where a gymnasium.Space was expected"
        # The server sends samples of the plain space. A space with another dtype or range would fail only when a sample
        # is read.
        if not problem and _without_class(_write(exact)) != _without_class(data):
            problem = f"returned {exact!r:.80}, whose samples differ from those of {plain}"
    except Exception as error:  # whatever a user's function raises
        raise SettingError(f"the reader registered for the space {name} raised {error!r}") from error
    if problem:
        raise SettingError(f"the reader registered for the space {name} {problem}")
    return exact


def _without_class(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in ("class", "attributes")}


def _read_plain(data: dict[str, Any], depth: int, readers: Mapping[str, SpaceReader] | None) -> Space[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    kind = data["type"]
    if kind == "Box":
        shape, dtype = _shape(data["shape"]), np.dtype(data["dtype"])
        box = spaces.Box(_array(data["low"], shape, dtype), _array(data["high"], shape, dtype), shape, dtype.type)
        # `Box` derives the flags from these bounds, which are finite in an integer space that was made with infinite
        # ones.
        box.bounded_below = _array(data["bounded_below"], shape, np.dtype(bool))
        box.bounded_above = _array(data["bounded_above"], shape, np.dtype(bool))
        return box
    if kind == "Discrete":
        return discrete_space(data["n"], data["start"], np.dtype(data["dtype"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"] if isinstance(data["n"], int) else list(_shape(data["n"])))
    if kind == "MultiDiscrete":
        shape, dtype = _shape(data["shape"]), np.dtype(data["dtype"])
        nvec, start = _array(data["nvec"], shape, dtype), _array(data["start"], shape, dtype)
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    if kind == "Text":
        return spaces.Text(data["max_length"], min_length=data["min_length"], charset=data["charset"])
    if kind == "Dict":
        items = [(_read_key(key), _read(item, depth + 1, readers)) for key, item in data["spaces"]]
        return dict_space(items, sort_keys=data["sort_keys"])
    if kind in ("Tuple", "OneOf"):
        members = [_read(item, depth + 1, readers) for item in data["spaces"]]
        return spaces.Tuple(members) if kind == "Tuple" else spaces.OneOf(members)
    if kind == "Sequence":
        return spaces.Sequence(_read(data["feature"], depth + 1, readers), stack=data["stack"])
    if kind == "Graph":
        edge = None if data["edge"] is None else _read(data["edge"], depth + 1, readers)
        return graph_space(_read(data["node"], depth + 1, readers), edge)
    raise ValueError(f"unknown kind of space {kind!r}")


def _numbers(array: Array) -> Any:
    """Return one number if all are the same, else the flat list; infinities as text, because JSON has none."""
    if array.size and (array == array.flat[0]).all():
        return _number(array.flat[0].item())
    return [_number(item) for item in array.ravel().tolist()]


def _number(item: Any) -> Any:
    return ("inf" if item > 0 else "-inf") if isinstance(item, float) and math.isinf(item) else item


def _shape(data: Any) -> tuple[int, ...]:
    shape = tuple(data)
    # The product of a million numbers would take hours.
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"expected sizes of 0 or more, got {data!r:.80}")
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
    # Check bool before int, of which it is a subclass.
    if key is None or isinstance(key, bool):
        return {"constant": key}
    if isinstance(key, (int, np.integer)):
        return {"int": int(key)}
    if isinstance(key, (float, np.floating)):
        # The hexadecimal form is exact, also for infinities and NaN.
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
